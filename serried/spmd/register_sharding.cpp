// A user's rule, for an op that exists.
#include "serried/spmd/register_sharding.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/spmd/registry.h"

namespace serried {
namespace {

void check_exists(const std::string& op) {
  std::vector<std::string> overloads;
  const std::string name = op.substr(0, op.find('.'));
  for (const c10::OperatorName& known : c10::Dispatcher::singleton().getAllOpNames()) {
    if (known.name != name) continue;
    if (op == name || op == name + "." + known.overload_name) return;
    overloads.push_back("\"" + name + (known.overload_name.empty() ? "" : "." + known.overload_name) + "\"");
  }
  std::sort(overloads.begin(), overloads.end());
  raise<c10::ValueError>({"register_sharding", "there is no op \"" + op + "\"",
                          overloads.empty() ? "pass \"namespace::name\" of an op that TORCH_LIBRARY has registered"
                                            : "pass one of " + c10::Join(", ", overloads)});
}

}  // namespace

void register_sharding(const std::string& op, const std::string& rule) {
  check_exists(op);
  spmd::register_rule(op, rule);
}

}  // namespace serried
