// What is particular to ranks on several hosts: pieces of any size, parts, and failures that all hosts hear of.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "serried/comm/backends/hierarchical/topology.h"
#include "serried/comm/backends/hierarchical/wire_mail.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/unknown_place.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"
#include "tests/support/wire_around.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using hierarchical::Topology;
using ::testing::AnyOf;
using testing::error_text_of_any_rank;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::HostLayoutBackends;
using testing::sample;
using testing::sibling;
using Tensors = std::vector<at::Tensor>;

TEST(HostTopology, KnowsRanksOfHostsOfAnySize) {
  const Topology topology({"a", "a", "b", "a", "c"});
  EXPECT_EQ(topology.num_hosts(), 3);
  EXPECT_EQ(topology.neighbours(3), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(topology.host_of(4), 2);
  EXPECT_EQ(topology.text(), "ranks 0, 1, 3 | rank 2 | rank 4");
}

TEST(HostTopology, EveryLaneHasARankOfEachHost) {
  const Topology topology({"a", "a", "a", "b", "c", "c"});
  EXPECT_EQ(topology.num_lanes(), 3);
  const auto ranks_at = [&](int host) {
    return std::vector<int>{topology.rank_at(host, 0), topology.rank_at(host, 1), topology.rank_at(host, 2)};
  };
  EXPECT_EQ(ranks_at(0), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(ranks_at(1), (std::vector<int>{3, 3, 3}));
  EXPECT_EQ(ranks_at(2), (std::vector<int>{4, 4, 5}));
  for (int rank = 0; rank < topology.num_ranks(); ++rank) {
    const Topology::Lanes lanes = topology.lanes_of(rank);
    for (int lane = 0; lane < 3; ++lane) {
      const bool has = topology.rank_at(topology.host_of(rank), lane) == rank;
      EXPECT_EQ(has, lane >= lanes.begin && lane < lanes.end) << rank << " " << lane;
    }
  }
}

TEST(HostTopology, EachHostHearsEachRankOnce) {
  for (const std::vector<std::string>& hosts : std::vector<std::vector<std::string>>{{"a", "b"},
                                                                                     {"a", "a", "b", "b"},
                                                                                     {"a", "b", "a", "b"},
                                                                                     {"a", "a", "a", "b"},
                                                                                     {"a", "b", "b", "c", "a", "b"}}) {
    const Topology topology(hosts);
    for (int rank = 0; rank < topology.num_ranks(); ++rank) {
      EXPECT_EQ(int(topology.receivers(rank).size()), topology.num_hosts() - 1);
      for (int host = 0; host < topology.num_hosts(); ++host) {
        std::vector<int> heard;
        for (const int member : topology.ranks_of(host)) {
          for (const int teller : topology.tellers(member)) heard.push_back(teller);
        }
        EXPECT_EQ(std::count(heard.begin(), heard.end(), rank), host == topology.host_of(rank) ? 0 : 1);
      }
    }
  }
}

TEST(HostTopology, RunsFollowTheOrderOfRanks) {
  const auto runs = Topology({"a", "a", "b", "a"}).runs();
  ASSERT_EQ(runs.size(), 3u);
  EXPECT_EQ(runs[1].host, 1);
  EXPECT_EQ(runs[2].begin, 3);
  EXPECT_EQ(runs[2].end, 4);
}

class Hierarchical : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, Hierarchical, ::testing::ValuesIn(testing::settings_on_hosts({2, 4, 5})),
                         testing::name_of);

TEST_P(Hierarchical, PiecesOfAnySizesArrive) {
  on_ranks([&](const Group& g) {
    const int n = g->getSize();
    const int me = g->getRank();
    // Some are carried by the arrival, some are nothing, some take several chunks.
    const auto length = [&](int from, int to) {
      return int64_t((from * 5 + to * 3) % 4 == 0 ? 0 : 90'001 * ((from + to) % 3) + from);
    };
    Tensors inputs, outputs;
    for (int peer = 0; peer < n; ++peer) {
      inputs.push_back(sample({length(me, peer)}, me, at::kFloat, peer));
      outputs.push_back(at::full({length(peer, me)}, -7.0f));
    }
    g->alltoall(outputs, inputs)->wait();
    for (int peer = 0; peer < n; ++peer) {
      expect_equal(outputs[size_t(peer)], sample({length(peer, me)}, peer, at::kFloat, me), c10::str("from ", peer));
    }
    Tensors mine{sample({length(me, 1)}, me)};
    std::vector<Tensors> gathered(1);
    for (int peer = 0; peer < n; ++peer) gathered[0].push_back(at::full({length(peer, 1)}, -7.0f));
    g->allgather(gathered, mine)->wait();
    for (int peer = 0; peer < n; ++peer) expect_equal(gathered[0][size_t(peer)], sample({length(peer, 1)}, peer));
  });
}

TEST_P(Hierarchical, BroadcastsOfAnySizeComeFromAnyRank) {
  on_ranks([&](const Group& g) {
    for (int root = 0; root < g->getSize(); ++root) {
      for (const int64_t size : {0, 5, 9001, 400'003}) {
        at::Tensor x = g->getRank() == root ? sample({size}, root) : at::full({size}, -7.0f);
        broadcast_(x, g, {.src = root});
        expect_equal(x, sample({size}, root), c10::str(size, " from ", root));
      }
    }
  });
}

TEST_P(Hierarchical, TensorsOfTheHeapAreReduced) {
  on_ranks([&](const Group& g) {
    for (const int64_t size : {17, 300'001}) {
      const at::Tensor x = g->getBackend(at::kCPU)->allocateTensor(size, at::kFloat);
      x.copy_(sample({size}, g->getRank()));
      all_reduce_(x, g);
      expect_equal(x, testing::sum_of(testing::samples({size}, g->getSize())));
    }
  });
}

TEST_P(Hierarchical, ReceivesFromAnyRankOfAnyHost) {
  on_ranks([&](const Group& g) {
    const int64_t large = 100'003;
    if (g->getRank() != 0) {
      Tensors sent{sample({large}, g->getRank())};
      g->send(sent, 0, 5)->wait();
    }
    for (int i = 1; i < g->getSize() && g->getRank() == 0; ++i) {
      Tensors received{at::zeros({large})};
      const auto work = g->recvAnysource(received, 5);
      work->wait();
      expect_equal(received[0], sample({large}, work->sourceRank()));
    }
    barrier(g);
  });
}

TEST_P(Hierarchical, PartsAreGroupsOfTheirOwn) {
  on_ranks([&](const Group& g) {
    std::vector<std::vector<int>> parts(2);
    for (int rank = 0; rank < g->getSize(); ++rank) parts[size_t(rank % 2)].push_back(rank);
    const Group part = split_group(g, parts);
    const std::vector<int>& mine = parts[size_t(g->getRank() % 2)];
    at::Tensor x = at::full({50'000}, double(g->getRank()));
    all_reduce_(x, part);
    EXPECT_EQ(x[7].item<int64_t>(), std::accumulate(mine.begin(), mine.end(), 0));
  });
}

// Ends of groups: what all ranks say.
class HierarchicalEnds : public ::testing::Test {
 protected:
  /// Runs `fn` on four ranks of two hosts, and returns the first line of what each raises.
  std::vector<std::string> first_lines(const std::function<void(const Group&)>& fn,
                                       std::chrono::milliseconds timeout = 20s,
                                       const std::string& backend = "hierarchical_pairs") {
    std::vector<std::string> lines(4);
    run_ranks(4, [&](const Group& g) {
      const Group mine = new_group(
          backend,
          {.timeout = timeout, .store = g->getStore(), .rank = g->getRank(), .world_size = 4, .backend_options = {}});
      barrier(mine);
      const std::string text = error_text_of_any_rank<c10::DistBackendError>([&] { fn(mine); });
      lines[size_t(g->getRank())] = text.substr(0, text.find('\n'));
      barrier(g);
    });
    return lines;
  }

 private:
  HostLayoutBackends layouts_;
};

TEST_F(HierarchicalEnds, AMismatchIsNamedByAllRanksAlike) {
  for (const char* backend :
       {"hierarchical_pairs", "hierarchical_alone", "hierarchical_uneven", "hierarchical_mixed"}) {
    for (const int odd : {0, 3}) {
      const auto lines = first_lines(
          [&](const Group& g) {
            at::Tensor x = at::ones({g->getRank() == odd ? 1000 : 300});
            all_reduce_(x, g);
          },
          20s, backend);
      const std::string sentence = odd == 0 ? "ranks called different collectives: rank 0 #2 all_reduce f32[1000] sum, "
                                              "rank 1 #2 all_reduce f32[300] sum"
                                            : "ranks called different collectives: rank 0 #2 all_reduce f32[300] sum, "
                                              "rank 3 #2 all_reduce f32[1000] sum";
      for (const std::string& line : lines) EXPECT_THAT(line, HasSubstr(sentence)) << backend << " " << odd;
    }
  }
}

TEST_F(HierarchicalEnds, SizesThatDoNotFitAreNamed) {
  const auto lines = first_lines([](const Group& g) {
    Tensors mine{at::ones({g->getRank() == 3 ? 5 : 4})};
    std::vector<Tensors> gathered{Tensors(4)};
    for (at::Tensor& each : gathered[0]) each = at::zeros({4});
    if (g->getRank() == 3) gathered[0][3] = at::zeros({5});
    g->allgather(gathered, mine)->wait();
  });
  for (int rank : {0, 1, 2}) EXPECT_THAT(lines[size_t(rank)], HasSubstr("rank 3 gives 20 bytes where rank ")) << rank;
}

TEST_F(HierarchicalEnds, AMissingRankIsNamedByAllHosts) {
  const auto lines = first_lines(
      [](const Group& g) {
        if (g->getRank() == 2) {  // until the others have given up
          while (g->getBackend(at::kCPU)->getError() == c10d::ErrorType::SUCCESS) std::this_thread::yield();
          return;
        }
        at::Tensor x = at::ones({300});
        all_reduce_(x, g);
      },
      300ms);
  for (int rank : {0, 1, 3}) {
    EXPECT_THAT(lines[size_t(rank)], HasSubstr("timed out after")) << rank;
    EXPECT_THAT(lines[size_t(rank)], HasSubstr("rank 2 is at #1 barrier")) << rank;
  }
}

TEST_F(HierarchicalEnds, AnAbortWakesAllHosts) {
  const auto begin = std::chrono::steady_clock::now();
  const auto lines = first_lines([](const Group& g) {
    if (g->getRank() == 3) return g->getBackend(at::kCPU)->abort();
    at::Tensor x = at::ones({300});
    all_reduce_(x, g);
  });
  for (int rank : {0, 1, 2}) EXPECT_THAT(lines[size_t(rank)], HasSubstr("rank 3 called abort()")) << rank;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 10s);
}

TEST_F(HierarchicalEnds, ARankThatLeavesIsNamed) {
  const auto lines = first_lines([](const Group& g) {
    if (g->getRank() == 0) return g->getBackend(at::kCPU)->shutdown();
    at::Tensor x = at::ones({300});
    all_reduce_(x, g);
  });
  for (int rank : {1, 2, 3}) EXPECT_THAT(lines[size_t(rank)], HasSubstr("rank 0 has left the group")) << rank;
}

TEST_F(HierarchicalEnds, AReceiveFromAnotherHostTimesOut) {
  const auto lines = first_lines(
      [](const Group& g) {
        if (g->getRank() != 0) return;
        at::Tensor x = at::ones({300});
        recv(x, g, {.peer = 3});
      },
      200ms);
  EXPECT_THAT(lines[0], HasSubstr("in recv f32[300] from rank 3"));
}

TEST_F(HierarchicalEnds, MessagesThatDoNotFitAreNamed) {
  const auto lines = first_lines([](const Group& g) {
    at::Tensor x = at::ones({g->getRank() == 0 ? 5 : 4});
    if (g->getRank() == 0) send(x, g, {.peer = 2});
    if (g->getRank() == 2) recv(x, g, {.peer = 0});
  });
  EXPECT_THAT(lines[2], HasSubstr("rank 0 sent 20 bytes of f32 where rank 2 expects 16 bytes in recv f32[4]"));
}

/// Cuts messages of one purpose short, as an overwritten or foreign peer might.
class CuttingWire final : public testing::WireAround {
 public:
  CuttingWire(std::unique_ptr<net::Wire> wire, hierarchical::Purpose purpose)
      : WireAround(std::move(wire)), purpose_(purpose) {}

  void send(net::Transfer& transfer, int peer, uint64_t tag, const void* data, size_t bytes) override {
    const bool cuts = tag >> hierarchical::kPurposeShift == uint64_t(purpose_);
    WireAround::send(transfer, peer, tag, data, cuts ? 10 : bytes);
  }

 private:
  const hierarchical::Purpose purpose_;
};

using MakeWire = std::function<std::unique_ptr<net::Wire>(const shm::ConnectArgs&)>;

/// A group of four ranks on two hosts.
Group group_over(const Group& g, const MakeWire& make_wire) {
  const FactoryArgs args{.store = c10::make_intrusive<c10d::PrefixStore>("over", g->getStore()),
                         .rank = g->getRank(),
                         .world_size = g->getSize(),
                         .timeout = 20s,
                         .device = at::kCPU,
                         .options = {{"host", std::to_string(g->getRank() / 2)}},
                         .name = c10::str("over@", g->getRank()),
                         .desc = "over"};
  return hierarchical::make_group_over(args, {.make_wire = make_wire});
}

/// The first line of what each of four ranks raises.
std::vector<std::string> lines_of_four(const std::function<void(const Group&)>& fn) {
  std::vector<std::string> lines(4);
  run_ranks(4, [&](const Group& g) {
    const std::string text = error_text_of_any_rank<c10::DistBackendError>([&] { fn(g); });
    lines[size_t(g->getRank())] = text.substr(0, text.find('\n'));
    barrier(g);
  });
  return lines;
}

Group group_that_cuts(const Group& g, hierarchical::Purpose purpose) {
  return group_over(g, [&](const shm::ConnectArgs& args) -> std::unique_ptr<net::Wire> {
    std::unique_ptr<net::Wire> wire = testing::connected_thread_wire(args);
    if (args.rank != 3) return wire;
    return std::make_unique<CuttingWire>(std::move(wire), purpose);
  });
}

TEST(HierarchicalStrangers, AnArrivalThatMakesNoSenseEndsTheGroup) {
  const auto lines = lines_of_four([](const Group& g) {
    const Group mine = group_that_cuts(g, hierarchical::Purpose::arrival);
    barrier(mine);
  });
  const std::string sentence = "rank 3 sends a message of 10 bytes as its part of #1 barrier";
  // Nothing was cut on the host of rank 3.
  for (const int rank : {0, 1}) EXPECT_THAT(lines[size_t(rank)], HasSubstr(sentence));
}

TEST(HierarchicalStrangers, AnEnvelopeThatMakesNoSenseEndsTheGroup) {
  const auto lines = lines_of_four([](const Group& g) {
    const Group mine = group_that_cuts(g, hierarchical::Purpose::envelope);
    at::Tensor x = at::ones({300});
    if (g->getRank() == 3) send(x, mine, {.peer = 0});
    if (g->getRank() == 0) recv(x, mine, {.peer = 3});
  });
  EXPECT_THAT(lines[0], HasSubstr("rank 3 is gone"));
}

TEST(HierarchicalStart, ARankWithoutAWireIsNamedByAll) {
  const auto lines = lines_of_four([](const Group& g) {
    group_over(g, [](const shm::ConnectArgs& args) -> std::unique_ptr<net::Wire> {
      TORCH_CHECK(args.rank != 2, "no wire today");
      return std::make_unique<testing::ThreadWire>(args.rank);
    });
  });
  for (const std::string& line : lines) EXPECT_THAT(line, HasSubstr("rank 2 cannot take part: no wire today"));
}

TEST(HierarchicalStart, MoreRanksThanMemoryHasRoomForAreRefused) {
  const shm::ConnectArgs args{.store = nullptr, .rank = 0, .world_size = 513, .timeout = 1s, .backend = "hierarchical"};
  EXPECT_EQ(error_text_of_any_rank<c10::ValueError>([&] { hierarchical::connect(args, {}); }),
            "[hierarchical] 513 ranks; at most 512\n"
            "  fix: use new_group(\"gloo\"), or \"fake\" to plan a large run");
}

TEST(HierarchicalTimeouts, SayOfWhomNothingIsKnown) {
  watch::Record waiting = watch::make_record(watch::Kind::barrier, {});
  waiting.sequence = 5;
  watch::Record behind = waiting;
  behind.sequence = 4;
  watch::Record unknown;
  unknown.sequence = watch::kUnknownPlace;
  EXPECT_EQ(watch::missing_text(waiting, 20, {waiting, behind, waiting, unknown}),
            "timed out after 20 ms in #5 barrier: rank 1 is at #4 barrier, the others at #5; where rank 3 is is not "
            "known here");
}

TEST_F(HierarchicalEnds, ALostWireEndsTheGroup) {
  std::vector<std::string> lines(4);
  std::array<std::atomic<testing::ThreadWire*>, 4> wires{};
  run_ranks(4, [&](const Group& g) {
    const int rank = g->getRank();
    const Group mine = group_over(g, [&](const shm::ConnectArgs& args) {
      auto wire = testing::connected_thread_wire(args);
      wires[size_t(rank)] = wire.get();
      return wire;
    });
    at::Tensor x = at::ones({300'000});
    all_reduce_(x, mine);
    barrier(g);
    if (rank == 3) wires[3].load()->die();
    const std::string text = error_text_of_any_rank<c10::DistBackendError>([&] {
      Tensors tensors{x};
      mine->allreduce(tensors)->wait();
    });
    lines[size_t(rank)] = text.substr(0, text.find('\n'));
    barrier(g);
  });
  for (const int rank : {0, 1}) EXPECT_THAT(lines[size_t(rank)], HasSubstr("rank 3 is lost")) << rank;
}

}  // namespace
}  // namespace serried
