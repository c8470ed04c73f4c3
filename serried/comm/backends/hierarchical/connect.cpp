// Ranks that may share a host try to; who maps the memory of the lowest rank has shown it.
#include "serried/comm/backends/hierarchical/connect.h"

#include <unistd.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/backends/factories.h"
#include "serried/comm/backends/hierarchical/engine.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::hierarchical {
namespace {

using shm::ConnectArgs;
using shm::failure_of;
using shm::Greeting;
using shm::Segment;
using shm::SegmentShape;

std::vector<std::string> exchange(const ConnectArgs& args, const char* key, const std::string& mine) {
  return detail::exchange({args.store, args.rank, args.world_size, args.timeout}, args.backend, key, mine);
}

/// A line of text of each rank says how it fared: "" for well.
void raise_failures(const ConnectArgs& args, const char* key, const std::string& mine) {
  const std::vector<std::string> failures = exchange(args, key, mine);
  for (int rank = 0; rank < args.world_size; ++rank) {
    if (failures[size_t(rank)].empty()) continue;
    raise<c10::DistBackendError>(
        {args.backend, c10::str("rank ", rank, " cannot take part: ", failures[size_t(rank)]), ""});
  }
}

SegmentShape shape_of(const ConnectArgs& args, int64_t heap_bytes, int64_t round_bytes) {
  return {.world_size = args.world_size,
          .heap_bytes = heap_bytes,
          .round_bytes = round_bytes,
          .arrival_bytes = (Arrival::room(args.world_size) + 4095) / 4096 * 4096};
}

/// The memory of this host, and who shares it.
struct Host {
  std::optional<Segment> segment;
  std::vector<int> members;
  std::string problem = {};  // why this rank cannot share memory with those that its host's name promises
};

Segment attach(const ConnectArgs& args, int lowest, const Greeting& owner) {
  const SegmentShape shape = shape_of(args, owner.heap_bytes, owner.round_bytes);
  std::string problem = shape.problem();
  if (owner.memory.fd < 0) problem = "no memory";
  if (problem.empty()) return Segment::attach(shape, owner.memory);
  raise<c10::DistBackendError>({args.backend, c10::str("rank ", lowest, " offers ", problem),
                                "find out who else writes to the store of this job"});
}

Host try_to_share(const ConnectArgs& args, const Topology& candidates) {
  const std::vector<int>& neighbours = candidates.neighbours(args.rank);
  const shm::WaitPolicy policy = shm::WaitPolicy::for_ranks(int(neighbours.size()));
  const SegmentShape mine = shape_of(args, args.heap_bytes, policy.own_core ? 64 << 10 : SegmentShape::kStageBytes);
  const int lowest = neighbours.front();
  Host host{.segment = std::nullopt, .members = neighbours};
  if (args.rank == lowest) host.problem = failure_of([&] { host.segment.emplace(Segment::create(mine)); });
  const detail::SharedFilePlace place = host.segment ? host.segment->place() : detail::SharedFilePlace{.pid = getpid()};
  const Greeting greeting{place, mine.heap_bytes, mine.round_bytes, "host"};
  const std::vector<std::string> greetings = exchange(args, "hierarchical/memory", greeting.text());
  if (args.rank == lowest) return host;
  const Greeting owner = shm::parse_greeting(args.backend, lowest, greetings[size_t(lowest)]);
  host.problem = failure_of([&] { host.segment.emplace(attach(args, lowest, owner)); });
  return host;
}

/// Who could not map the memory of its neighbours is a host of its own.
Topology shown_topology(const ConnectArgs& args, const std::vector<std::string>& names, Host& host) {
  if (!host.problem.empty()) log::line(log::Topic::comm, "rank ", args.rank, " shares no memory: ", host.problem);
  std::vector<std::string> shown = exchange(args, "hierarchical/shown", host.problem.empty() ? "shares" : "alone");
  for (int rank = 0; rank < args.world_size; ++rank) {
    std::string& text = shown[size_t(rank)];
    text = text == "shares" ? names[size_t(rank)] : c10::str("rank ", rank, " alone, ", names[size_t(rank)]);
  }
  Topology topology(shown);
  host.members = topology.neighbours(args.rank);
  return topology;
}

std::unique_ptr<shm::Engine> make_local(const ConnectArgs& args, Host host, const std::vector<std::string>& pids) {
  const bool one_process = std::all_of(host.members.begin(), host.members.end(),
                                       [&](int member) { return pids[size_t(member)] == pids[size_t(args.rank)]; });
  // One file of a process is enough for those who look from outside (serried top).
  if (args.rank != host.members.front() && one_process) host.segment->close_file();
  const auto policy = shm::WaitPolicy::for_ranks(int(host.members.size()));
  return std::make_unique<shm::Engine>(std::move(*host.segment), args.rank, policy, one_process && !args.always_stage,
                                       host.members);
}

/// The one in which all ranks add; with another one a rank would get other bits.
Order agree_on_order(const ConnectArgs& args, const Options& options, const Topology& topology) {
  const Order mine = options.order.value_or(default_order(topology.num_hosts()));
  const std::vector<std::string> orders = exchange(args, "hierarchical/order", order_name(mine));
  for (int rank = 1; rank < args.world_size; ++rank) {
    if (orders[size_t(rank)] == orders[0]) continue;
    raise<c10::ValueError>(
        {args.backend,
         c10::str("rank 0 adds in the order of ", orders[0], ", rank ", rank, " in that of ", orders[size_t(rank)]),
         "pass the same \"order\" to new_group on all ranks, or set SERRIED_ORDER alike for all"});
  }
  return mine;
}

std::unique_ptr<net::Wire> connect_wire(const ConnectArgs& args, const Options& options) {
  std::unique_ptr<net::Wire> wire;
  const std::string failure = failure_of([&] { wire = options.make_wire(args); });
  raise_failures(args, "hierarchical/wire", failure);
  return wire;
}

}  // namespace

std::unique_ptr<shm::Runner> connect(const ConnectArgs& args, const Options& options) {
  if (args.world_size > kMostHierarchicalRanks) {
    raise<c10::ValueError>({args.backend, c10::str(args.world_size, " ranks; at most ", kMostHierarchicalRanks),
                            "use new_group(\"gloo\"), or \"fake\" to plan a large run"});
  }
  const std::vector<std::string> names =
      exchange(args, "hierarchical/host", detail::host_identity() + " " + options.pretended_host);
  Host host = try_to_share(args, Topology(names));
  const Topology topology = shown_topology(args, names, host);
  if (!host.segment) {
    const SegmentShape shape = shape_of(args, args.heap_bytes, SegmentShape::kStageBytes);
    host.problem = failure_of([&] { host.segment.emplace(Segment::create(shape)); });
  }
  raise_failures(args, "hierarchical/segment", host.segment ? "" : host.problem);
  const std::vector<std::string> pids =
      exchange(args, "hierarchical/pid", c10::str(getpid(), " on ", names[size_t(args.rank)]));
  std::unique_ptr<shm::Engine> local = make_local(args, std::move(host), pids);
  local->meet(args.timeout, detail::place_of(args.store));
  log::line(log::Topic::comm, args.backend, ": hosts of ", topology.text());
  if (topology.num_hosts() == 1) return local;
  const Order order = agree_on_order(args, options, topology);
  std::unique_ptr<net::Wire> wire = connect_wire(args, options);
  log::line(log::Topic::comm, args.backend, ": between hosts by ", wire->name(), ", adding in the order of ",
            order_name(order));
  return std::make_unique<HierarchicalEngine>(std::move(local), topology, order, std::move(wire));
}

}  // namespace serried::hierarchical
