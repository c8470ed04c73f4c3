// Groups of ranks as objects: no hidden default group.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace serried {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

/// Options of a backend by name, as in `{{"threads", 2}}`.
using BackendOptions = std::map<std::string, c10::IValue>;

/// How long a collective, and a rendezvous, wait before they raise.
/// The default is SERRIED_TIMEOUT seconds.
std::chrono::milliseconds default_timeout();

struct GroupOptions {
  std::chrono::milliseconds timeout = default_timeout();
  at::Device device = at::kCPU;
  std::string init_method = "env://";
  c10::intrusive_ptr<c10d::Store> store =
      {};  // explicit: then rank and world_size are needed and init_method is unused
  int rank = -1;
  int world_size = -1;
  BackendOptions backend_options = {};
};

/// A group that spans all ranks of the rendezvous. Every rank calls it, in the same order as its other groups;
/// blocks until all have come or the timeout passes. Several groups may share one store: each gets its own
/// prefix and registered name.
///     Group world = new_group();                         // shm on one host, else hierarchical
///     Group other = new_group("gloo", {.timeout = 30s});
Group new_group(const std::string& backend = "auto", GroupOptions options = {});

/// This rank's part of `parent`, null if it is in none. Every rank of `parent` calls it with the same lists.
///     Group half = split_group(world, {{0, 1}, {2, 3}});
Group split_group(const Group& parent, const std::vector<std::vector<int>>& parts);

/// What a backend's factory gets. `store` is already the group's own.
struct FactoryArgs {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout;
  at::Device device = at::kCPU;
  BackendOptions options;
  std::string name;  // the group's registered name
  std::string desc;  // the same on all ranks, for people
};

using BackendFactory = std::function<Group(const FactoryArgs&)>;

/// Adds a backend to `new_group`; ValueError if the name is taken. Thread-safe.
void register_backend(const std::string& name, BackendFactory factory);

/// Removes a backend that `register_backend` added; ValueError if there is none. Groups made by it live on.
void unregister_backend(const std::string& name);

/// All names `new_group` knows, sorted, whether or not they work here.
std::vector<std::string> registered_backends();

/// Whether `new_group(name)` can work on this machine with this LibTorch.
bool is_backend_available(const std::string& name);

/// Why it cannot; empty where it can. ValueError for an unknown name.
std::string why_backend_unavailable(const std::string& name);

/// This thread's current group, null where none was set. Holds inside backward.
Group current_process_group();

/// The same, but a ValueError that says how to set one where there is none, in the name of `where`.
Group require_current_process_group(const char* where = "require_current_process_group");

/// Makes `group`, or none if null, this thread's current group while alive; nests.
class ProcessGroupGuard {
 public:
  explicit ProcessGroupGuard(Group group);
  ~ProcessGroupGuard();
  ProcessGroupGuard(const ProcessGroupGuard&) = delete;
  ProcessGroupGuard& operator=(const ProcessGroupGuard&) = delete;

 private:
  Group previous_;
  c10::DebugInfoGuard carried_;  // what autograd takes along to its own threads
};

/// A ProcessGroup around one backend that serves `args.device`: the last step of most factories.
Group make_group(const FactoryArgs& args, const c10::intrusive_ptr<c10d::Backend>& backend,
                 c10d::ProcessGroup::BackendType type = c10d::ProcessGroup::BackendType::CUSTOM);

/// ValueError that names the first option of `args` that is not in `known`.
void reject_unknown_options(const FactoryArgs& args, const std::vector<std::string>& known);

}  // namespace serried
