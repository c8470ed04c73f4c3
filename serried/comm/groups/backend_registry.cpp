// One table of backends: the built-in ones, "auto", which chooses one of them, and those that users add.
#include "serried/comm/groups/named_group.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/backends/factories.h"

namespace serried {
namespace {

struct BuiltinBackend {
  const char* name;
  Group (*factory)(const FactoryArgs&);
  std::string (*why_unavailable)();  // empty text: it works here
};

std::string works_everywhere() {
  return "";
}

constexpr const char* kNoShm = "no shm: ";

// Every rank sees the same texts, so all choose alike; a rank that cannot use shared memory says so in its text.
Group make_auto_group(const FactoryArgs& args) {
  const std::string unavailable = why_shm_unavailable();
  const std::string mine = unavailable.empty() ? detail::host_identity() : kNoShm + unavailable;
  const std::vector<std::string> hosts =
      detail::exchange({args.store, args.rank, args.world_size, args.timeout}, "new_group", "auto/host", mine);
  const bool one_host = std::all_of(hosts.begin(), hosts.end(), [&](const std::string& h) { return h == hosts[0]; });
  const auto without = std::find_if(hosts.begin(), hosts.end(), [](auto& host) { return host.starts_with(kNoShm); });
  const auto take = [&](const char* backend, const std::string& why, auto* make) {
    log::line(log::Topic::comm, "auto takes ", backend, " for ", args.name, ": ", why);
    return make(args);
  };
  if (without != hosts.end()) {
    return take("gloo", c10::str("rank ", without - hosts.begin(), " has ", *without), make_gloo_group);
  }
  if (one_host) return take("shm", "all ranks share this host", make_shm_group);
  if (args.world_size > kMostHierarchicalRanks)
    return take("gloo", "ranks are many, on several hosts", make_gloo_group);
  return take("hierarchical", "ranks are on several hosts", make_hierarchical_group);
}

// Sorted by name; a new backend is one folder and one line here.
constexpr std::array kBuiltins{
    BuiltinBackend{"auto", make_auto_group, works_everywhere},
    BuiltinBackend{"fake", make_fake_group, works_everywhere},
    BuiltinBackend{"gloo", make_gloo_group, works_everywhere},
    BuiltinBackend{"hierarchical", make_hierarchical_group, why_shm_unavailable},
    BuiltinBackend{"mpi", make_mpi_group, why_mpi_unavailable},
    BuiltinBackend{"nccl", make_nccl_group, why_nccl_unavailable},
    BuiltinBackend{"shm", make_shm_group, why_shm_unavailable},
    BuiltinBackend{"threads", make_threads_group, works_everywhere},
};

struct Registry {
  std::mutex mutex;
  std::map<std::string, BackendFactory> added;
};

Registry& registry() {
  static auto* all = new Registry();
  return *all;
}

const BuiltinBackend* find_builtin(const std::string& name) {
  for (const BuiltinBackend& backend : kBuiltins) {
    if (name == backend.name) return &backend;
  }
  return nullptr;
}

[[noreturn]] void raise_unknown(std::string_view where, const std::string& name) {
  raise<c10::ValueError>({where,
                          c10::str("unknown backend \"", name, "\"; known: ", c10::Join(", ", registered_backends())),
                          "pass one of the known names, or register_backend first"});
}

}  // namespace

BackendFactory detail::find_backend(std::string_view where, const std::string& name) {
  if (const BuiltinBackend* builtin = find_builtin(name)) return builtin->factory;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    const auto found = registry().added.find(name);
    if (found != registry().added.end()) return found->second;
  }
  raise_unknown(where, name);
}

void register_backend(const std::string& name, BackendFactory factory) {
  if (name.empty() || !factory) {
    raise<c10::ValueError>({"register_backend",
                            name.empty() ? "the name is empty" : "the factory of \"" + name + "\" is empty",
                            "pass a name and a function that makes a group"});
  }
  std::lock_guard<std::mutex> lock(registry().mutex);
  if (find_builtin(name) == nullptr && registry().added.emplace(name, std::move(factory)).second) return;
  raise<c10::ValueError>({"register_backend", c10::str("the backend \"", name, "\" is already registered"),
                          "choose another name, or unregister_backend first"});
}

void unregister_backend(const std::string& name) {
  if (find_builtin(name) != nullptr) {
    raise<c10::ValueError>(
        {"unregister_backend", c10::str("\"", name, "\" is built in"), "unregister only what register_backend added"});
  }
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (registry().added.erase(name) == 1) return;
  }
  raise_unknown("unregister_backend", name);
}

std::vector<std::string> registered_backends() {
  std::vector<std::string> names;
  for (const BuiltinBackend& backend : kBuiltins) names.emplace_back(backend.name);
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (const auto& [name, factory] : registry().added) names.push_back(name);
  std::sort(names.begin(), names.end());
  return names;
}

std::string why_backend_unavailable(const std::string& name) {
  if (const BuiltinBackend* builtin = find_builtin(name)) return builtin->why_unavailable();
  detail::find_backend("why_backend_unavailable", name);
  return "";
}

bool is_backend_available(const std::string& name) {
  const std::vector<std::string> names = registered_backends();
  return std::binary_search(names.begin(), names.end(), name) && why_backend_unavailable(name).empty();
}

}  // namespace serried
