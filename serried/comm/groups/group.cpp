// Makes groups (checks, meets, agrees on a prefix and a name, calls the backend's factory), and keeps a thread's
// current one.
#include "serried/comm/groups/group.h"

#include <algorithm>
#include <random>

#include <ATen/Context.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/agree/says_that_it_meets.h"
#include "serried/comm/groups/live_groups.h"
#include "serried/comm/groups/named_group.h"
#include "serried/comm/rendezvous/launch_environment.h"
#include "serried/comm/rendezvous/rendezvous.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried {
namespace {

using std::chrono::milliseconds;

void check_ranks(const GroupOptions& options) {
  if (options.world_size != -1 && options.world_size < 1) {
    raise<c10::ValueError>(
        {"new_group", c10::str("world_size is ", options.world_size), "pass the number of ranks, 1 or more"});
  }
  const bool both = options.rank != -1 && options.world_size != -1;
  if (options.store && !both) {
    raise<c10::ValueError>({"new_group",
                            c10::str("an explicit store needs rank and world_size, not rank ", options.rank,
                                     " and world_size ", options.world_size),
                            "pass {.store = store, .rank = 0, .world_size = 2}"});
  }
  if (options.rank < -1 || (both && options.rank >= options.world_size)) {
    raise<c10::ValueError>({"new_group", c10::str("rank ", options.rank, " is not in 0..", options.world_size - 1),
                            "pass each rank once, counted from 0"});
  }
}

// All that can be refused without the network.
void check_arguments(const std::string& backend, const GroupOptions& options) {
  detail::find_backend("new_group", backend);
  if (options.timeout <= milliseconds(0)) {
    raise<c10::ValueError>({"new_group", c10::str("the timeout is ", options.timeout.count(), " ms"),
                            "pass a timeout above 0, as in {.timeout = 30s}"});
  }
  check_ranks(options);
  const std::string why = why_backend_unavailable(backend);
  if (why.empty()) return;
  raise<c10::NotImplementedError>(
      {"new_group", c10::str("\"", backend, "\" does not work here: ", why), "use \"auto\", \"shm\" or \"gloo\""});
}

Meeting meet(const std::string& backend, const GroupOptions& options) {
  if (options.store) return {options.store, options.rank, options.world_size};
  // Nobody else comes to a fake group.
  if (backend == "fake" && options.rank >= 0 && options.world_size > 0) {
    return {c10::make_intrusive<c10d::HashStore>(), options.rank, options.world_size};
  }
  return rendezvous(options.init_method, {options.rank, options.world_size, options.timeout});
}

std::string random_id() {
  std::random_device source;
  std::string id;
  for (int i = 0; i < 8; ++i) id += "0123456789abcdef"[source() & 15U];
  return id;
}

// What makes this group different from all others on its store; the same on all ranks.
struct Place {
  std::string prefix;
  std::string name;
};

Place agree_on_place(const std::string& backend, const Meeting& meeting) {
  // A restarted job, or one that goes on with fewer ranks, may find the keys of the former one.
  const std::string root = c10::str("serried/", detail::attempt_of_all(), "/", meeting.world_size);
  c10d::Store& store = *meeting.store;
  const int64_t index = store.add(c10::str(root, "/groups/", meeting.rank), 1);
  const std::string id = detail::first_text(store, root + "/id", random_id());
  const std::string prefix = c10::str(root, "/", index);
  detail::agree(store, prefix + "/backend", "new_group", c10::str("\"", backend, "\" for group ", index));
  return {prefix, c10::str(backend, "/", id, "/", index)};
}

Group make_group_of_all(const std::string& backend, GroupOptions options) {
  const Meeting meeting = meet(backend, options);
  const bool share_process = detail::is_process_local(meeting.store);
  if (!share_process && rank_label().rank < 0) set_process_rank_label({meeting.rank, meeting.world_size});
  if (meeting.store->getTimeout() != options.timeout) meeting.store->setTimeout(options.timeout);
  const Place place = agree_on_place(backend, meeting);
  FactoryArgs args{.store = c10::make_intrusive<c10d::PrefixStore>(place.prefix, meeting.store),
                   .rank = meeting.rank,
                   .world_size = meeting.world_size,
                   .timeout = options.timeout,
                   .device = options.device,
                   .options = std::move(options.backend_options),
                   .name = detail::reserve_name(place.name, meeting.rank, share_process),
                   .desc = place.name};
  Group group = detail::create_group("new_group", backend, args);
  detail::note_group(group);
  return group;
}

// The current group is in c10d's own variable, and in what autograd carries to its threads.
constexpr std::string_view kSlotName = "serried::current_process_group";
constexpr c10::DebugInfoKind kSlot(&kSlotName);

// at::ThreadLocalState takes this along: a backward that runs on another thread sees the group of its caller.
struct CarriedGroup final : c10::DebugInfoBase {
  explicit CarriedGroup(Group group) : group(std::move(group)) {}
  Group group;
};

}  // namespace

milliseconds default_timeout() {
  const int64_t seconds = env::integer("SERRIED_TIMEOUT");
  constexpr int64_t kMostSeconds = 1'000'000'000;  // 31 years; clocks count nanoseconds in 63 bits
  if (seconds > 0 && seconds <= kMostSeconds) return std::chrono::seconds(seconds);
  raise<c10::ValueError>({"environment", c10::str("SERRIED_TIMEOUT is ", seconds),
                          seconds > 0 ? c10::str("set it to at most ", kMostSeconds, " seconds")
                                      : std::string("set it to seconds above 0")});
}

Group new_group(const std::string& backend, GroupOptions options) {
  const trace::Span span("new_group", trace::kSetup);
  check_arguments(backend, options);
  // On a store of their own, ranks may be some of the job.
  const detail::SaysThatItMeets says(options.store ? "new_group on a store" : "new_group");
  return detail::through_store("new_group", [&] { return make_group_of_all(backend, std::move(options)); });
}

Group make_group(const FactoryArgs& args, const c10::intrusive_ptr<c10d::Backend>& backend,
                 c10d::ProcessGroup::BackendType type) {
  auto group = c10::make_intrusive<detail::NamedGroup>(args, backend->getBackendName());
  if (args.device.has_index() && !args.device.is_cpu()) group->setBoundDeviceId(args.device);
  group->setBackend(args.device.type(), type, backend);
  // NCCL has nothing to offer the CPU; every other backend serves it too, and Gloo also CUDA.
  if (type != c10d::ProcessGroup::BackendType::NCCL) group->setBackend(at::kCPU, type, backend);
  if (type == c10d::ProcessGroup::BackendType::GLOO && at::hasCUDA()) group->setBackend(at::kCUDA, type, backend);
  group->setDefaultBackend(type);
  if (group->backendSupportsSequenceNumbers(type)) backend->setSequenceNumberForGroup();
  group->setGroupName(args.name);
  group->setGroupDesc(args.desc);
  return group;
}

void reject_unknown_options(const FactoryArgs& args, const std::vector<std::string>& known) {
  for (const auto& [name, value] : args.options) {
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    raise<c10::ValueError>({"new_group",
                            c10::str("unknown backend option \"", name,
                                     "\"; known: ", known.empty() ? std::string("none") : c10::Join(", ", known)),
                            "leave the option out, or correct its name"});
  }
}

Group current_process_group() {
  if (const Group& group = c10d::currentProcessGroup()) return group;
  const auto* carried = static_cast<const CarriedGroup*>(c10::ThreadLocalDebugInfo::get(kSlot));
  return carried == nullptr ? nullptr : carried->group;
}

Group require_current_process_group(const char* where) {
  if (Group group = current_process_group()) return group;
  raise<c10::ValueError>({where, "this thread has no current group",
                          "keep a ProcessGroupGuard guard(group) alive around the call, or pass the group"});
}

ProcessGroupGuard::ProcessGroupGuard(Group group)
    : previous_(c10d::currentProcessGroup()), carried_(kSlot, std::make_shared<CarriedGroup>(group)) {
  c10d::setProcessGroup(std::move(group));
}

ProcessGroupGuard::~ProcessGroupGuard() {
  c10d::setProcessGroup(std::move(previous_));
}

}  // namespace serried
