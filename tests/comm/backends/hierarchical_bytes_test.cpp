// The steps that `serried plan --simulate` counts on, beside the bytes that the backend sends between hosts.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>

#include "serried/comm/backends/hierarchical/tags.h"
#include "serried/comm/collectives/collectives.h"
#include "tests/support/on_ranks.h"
#include "tests/support/wire_around.h"
#include "tools/serried/simulate/collective.h"

namespace serried {
namespace {

using hierarchical::Purpose;
using simulation::Kind;

constexpr int kMostRanks = 4;
std::array<std::atomic<int64_t>, kMostRanks> bytes_sent_by;

/// Counts what collectives send: what ranks call, and data.
class CountedWire final : public testing::WireAround {
 public:
  CountedWire(std::unique_ptr<net::Wire> wire, int rank) : WireAround(std::move(wire)), rank_(rank) {}

  void send(net::Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) override {
    const Purpose purpose = Purpose(tag >> hierarchical::kPurposeShift);
    if (purpose == Purpose::arrival || purpose == Purpose::data) bytes_sent_by[size_t(rank_)] += int64_t(bytes);
    WireAround::send(transfer, peer, tag, data, bytes);
  }

 private:
  const int rank_;
};

Group make_counted_group(const FactoryArgs& args, const std::vector<int>& host_of, const char* order) {
  FactoryArgs placed = args;
  placed.options["order"] = order;
  placed.options["host"] = std::to_string(host_of[size_t(args.rank)]);
  return hierarchical::make_group_over(placed, {.make_wire = [](const shm::ConnectArgs& connecting) {
                                         return std::make_unique<CountedWire>(
                                             testing::connected_thread_wire(connecting), connecting.rank);
                                       }});
}

/// What the ranks of each host have sent in `call`.
std::vector<int64_t> sent_in(const std::vector<int>& host_of, const std::function<void(const Group&)>& call,
                             const char* order = "") {
  for (auto& bytes : bytes_sent_by) bytes = 0;
  register_backend("counted", [&](const FactoryArgs& args) { return make_counted_group(args, host_of, order); });
  run_ranks(int(host_of.size()), [&](const Group& group) { call(testing::sibling(group, "counted")); });
  unregister_backend("counted");
  std::vector<int64_t> sent(size_t(host_of.back()) + 1);
  for (size_t rank = 0; rank < host_of.size(); ++rank) sent[size_t(host_of[rank])] += bytes_sent_by[rank];
  return sent;
}

std::vector<int64_t> simulated(const std::vector<int>& host_of, const simulation::Call& call) {
  simulation::HostSizes hosts(size_t(host_of.back()) + 1);
  for (const int host : host_of) ++hosts[size_t(host)];
  std::vector<int64_t> sent(hosts.size());
  for (const simulation::Step& step : steps_of(call, hosts)) {
    for (size_t host = 0; host < hosts.size(); ++host) sent[host] += step.out_of(host);
  }
  return sent;
}

void make_call(Kind kind, int64_t bytes, const Group& group) {
  const int64_t ranks = group->getSize();
  const at::Tensor x = at::ones({bytes / 4});
  switch (kind) {
    case Kind::all_reduce: return all_reduce_(x, group);
    case Kind::all_gather: return all_gather_into(at::empty({bytes / 4 * ranks}), x, group);
    case Kind::reduce_scatter: return reduce_scatter_into(at::empty({bytes / 4 / ranks}), x, group);
    case Kind::all_to_all: return all_to_all_into(at::empty_like(x), x, group);
    case Kind::broadcast: return broadcast_(x, group);
    case Kind::reduce: reduce(x, group); return;
    default: return barrier(group);
  }
}

TEST(HierarchicalBytes, AreThoseOfTheSimulatedSteps) {
  // Small enough to travel with what ranks tell each other; in one piece; in several.
  for (const int64_t bytes : {960, 96000, 3840000}) {
    for (const std::vector<int>& host_of : std::vector<std::vector<int>>{
             {0, 1}, {0, 1, 2}, {0, 1, 2, 3}, {0, 0, 1}, {0, 0, 1, 1}, {0, 0, 0, 1}, {0, 1, 1, 2}}) {
      for (const Kind kind : {Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter, Kind::all_to_all,
                              Kind::broadcast, Kind::reduce, Kind::barrier}) {
        const std::vector<int64_t> sent = sent_in(host_of, [&](const Group& group) { make_call(kind, bytes, group); });
        EXPECT_EQ(sent, simulated(host_of, {kind, kind == Kind::barrier ? 0 : bytes}))
            << simulation::name_of(kind) << " of " << bytes << " bytes on " << host_of.size()
            << " ranks, the last on host " << host_of.back();
      }
    }
  }
}

TEST(HierarchicalBytes, AreThoseOfTheSimulatedStepsInEitherOrder) {
  const std::pair<const char*, simulation::Order> orders[] = {{"ranks", simulation::Order::ranks},
                                                              {"hosts", simulation::Order::hosts}};
  for (const auto& [name, order] : orders) {
    for (const std::vector<int>& host_of : std::vector<std::vector<int>>{{0, 1}, {0, 0, 1, 1}, {0, 1, 1, 2}}) {
      for (const Kind kind : {Kind::all_reduce, Kind::reduce_scatter, Kind::reduce}) {
        constexpr int64_t kBytes = 960000;
        const std::vector<int64_t> sent = sent_in(
            host_of, [&](const Group& group) { make_call(kind, kBytes, group); }, name);
        EXPECT_EQ(sent, simulated(host_of, {kind, kBytes, 4, order})) << simulation::name_of(kind) << " " << name;
      }
    }
  }
}

TEST(HierarchicalBytes, OfHalfPrecisionGoUpTheChainInSingle) {
  const std::vector<int> host_of = {0, 0, 1, 1};
  const std::vector<int64_t> sent =
      sent_in(host_of, [](const Group& group) { all_reduce_(at::ones({1 << 18}, at::kHalf), group); });
  EXPECT_EQ(sent, simulated(host_of, {Kind::all_reduce, 1 << 19, 2}));
}

}  // namespace
}  // namespace serried
