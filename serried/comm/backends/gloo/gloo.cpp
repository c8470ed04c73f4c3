// Options of the gloo backend, and the group around it.
#include "serried/comm/backends/factories.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/gloo/backend.h"

namespace serried {
namespace {

[[noreturn]] void reject_option(const std::string& name, const c10::IValue& value, const char* wanted) {
  raise<c10::ValueError>(
      {"new_group", c10::str("backend option \"", name, "\" of gloo is ", value), c10::str("pass ", wanted)});
}

std::string text_option(const BackendOptions& options, const std::string& name) {
  const auto found = options.find(name);
  if (found == options.end()) return "";
  if (!found->second.isString()) reject_option(name, found->second, "a text");
  return found->second.toStringRef();
}

int threads_option(const BackendOptions& options) {
  const auto found = options.find("threads");
  if (found == options.end()) return 2;
  if (!found->second.isInt() || found->second.toInt() < 1 || found->second.toInt() > 1024) {
    reject_option("threads", found->second, "a whole number from 1 to 1024");
  }
  return int(found->second.toInt());
}

}  // namespace

Group make_gloo_group(const FactoryArgs& args) {
  reject_unknown_options(args, {"hostname", "interface", "threads"});
  gloo::EngineOptions options;
  options.timeout = args.timeout;
  options.threads = threads_option(args.options);
  options.interface = text_option(args.options, "interface");
  options.hostname = text_option(args.options, "hostname");
  auto backend = c10::make_intrusive<gloo::GlooBackend>(args.store, args.rank, args.world_size, options);
  return make_group(args, backend, c10d::ProcessGroup::BackendType::GLOO);
}

}  // namespace serried
