// The gloo backend by itself: every call, its options, and groups made of groups.
#include "tests/comm/backends/gloo_ranks.h"
#include "tests/support/two_hosts.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <csignal>

namespace serried {
namespace {

using namespace gloo_test;

/// On one host a page that ranks share compares their calls; over two hosts, messages do.
class GlooSizes : public ::testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int num_ranks() const { return std::get<0>(GetParam()); }
  std::vector<std::string> on_ranks(const RankFn& fn) const {
    const bool two_hosts = std::get<1>(GetParam());
    const Store store =
        two_hosts ? Store(c10::make_intrusive<testing::TwoHosts>()) : Store(c10::make_intrusive<c10d::HashStore>());
    return gloo_test::on_ranks(num_ranks(), fn, 120s, store);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooSizes, ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Bool()),
                         [](const auto& test) {
                           return std::to_string(std::get<0>(test.param)) +
                                  (std::get<1>(test.param) ? "OverHosts" : "");
                         });

TEST_P(GlooSizes, ReductionsAndBroadcast) {
  const int n = num_ranks();
  const double total = n * (n + 1) / 2.0;
  expect_quiet(on_ranks([&](int rank, const Group& group) {
    auto x = filled({3, 2}, rank + 1);
    all_reduce(group, x);
    expect_equal(x, filled({3, 2}, total));
    auto y = filled({5}, rank + 1);
    all_reduce(group, y, c10d::ReduceOp::AVG);
    expect_equal(y, filled({5}, total / n));
    Tensors many{filled({2}, rank + 1), filled({3}, 10 * (rank + 1))};
    group->allreduce_coalesced(many)->wait();
    expect_equal(many[1], filled({3}, 10 * total));
    Tensors one{filled({4}, rank + 1)};
    c10d::ReduceOptions to_last;
    to_last.rootRank = n - 1;
    group->reduce(one, to_last)->wait();
    if (rank == n - 1) expect_equal(one[0], filled({4}, total));
    Tensors sent{filled({4}, rank)};
    c10d::BroadcastOptions from_last;
    from_last.rootRank = n - 1;
    group->broadcast(sent, from_last)->wait();
    expect_equal(sent[0], filled({4}, n - 1));
    group->barrier()->wait();
  }));
}

TEST_P(GlooSizes, SparseAllReduce) {
  const int n = num_ranks();
  expect_quiet(on_ranks([&](int rank, const Group& group) {
    auto dense = torch::zeros({4, 2});
    dense[rank] = rank + 1;
    Tensors tensors{dense.to_sparse()};
    const auto work = group->allreduce(tensors);
    work->wait();
    auto wanted = torch::zeros({4, 2});
    for (int r = 0; r < n; ++r) wanted[r] = r + 1;
    expect_equal(tensors[0].to_dense(), wanted);
  }));
}

TEST_P(GlooSizes, GathersAndScatters) {
  const int n = num_ranks();
  expect_quiet(on_ranks([&](int rank, const Group& group) {
    std::vector<Tensors> lists(1);
    for (int r = 0; r < n; ++r) lists[0].push_back(torch::empty({2}));
    Tensors mine{filled({2}, rank)};
    group->allgather(lists, mine)->wait();
    for (int r = 0; r < n; ++r) expect_equal(lists[0][r], filled({2}, r));
    auto flat = torch::empty({n, 2});
    group->all_gather_single(flat, mine[0])->wait();
    expect_equal(flat, torch::arange(n, at::kFloat).unsqueeze(1).expand({n, 2}));
    Tensors flats{torch::empty({n, 2})};
    group->all_gather_single_coalesced(flats, mine)->wait();
    expect_equal(flats[0], flat);
    std::vector<Tensors> coalesced(n);
    for (auto& list : coalesced) list = {torch::empty({2}), torch::empty({3})};
    Tensors two{filled({2}, rank), filled({3}, 5 + rank)};
    group->allgather_coalesced(coalesced, two)->wait();
    for (int r = 0; r < n; ++r) expect_equal(coalesced[r][1], filled({3}, 5 + r));
    std::vector<Tensors> gathered(rank == 0 ? 1 : 0);
    if (rank == 0) gathered[0] = Tensors(lists[0].begin(), lists[0].end());
    if (rank == 0) {
      for (auto& t : gathered[0]) t = torch::empty({2});
    }
    group->gather(gathered, mine)->wait();
    if (rank == 0) expect_equal(gathered[0][n - 1], filled({2}, n - 1));
    std::vector<Tensors> parts(rank == 0 ? 1 : 0);
    for (int r = 0; rank == 0 && r < n; ++r) parts[0].push_back(filled({2}, 7 + r));
    Tensors part{torch::empty({2})};
    group->scatter(part, parts)->wait();
    expect_equal(part[0], filled({2}, 7 + rank));
  }));
}

TEST_P(GlooSizes, ReduceScatters) {
  const int n = num_ranks();
  const double total = n * (n + 1) / 2.0;
  expect_quiet(on_ranks([&](int rank, const Group& group) {
    const auto rows = torch::arange(n, at::kFloat).unsqueeze(1).expand({n, 2}).contiguous();
    auto input = rows * (rank + 1);
    auto output = torch::empty({1, 2});
    group->reduce_scatter_single(output, input)->wait();
    expect_equal(output, filled({1, 2}, rank * total));
    Tensors outputs{torch::empty({2})};
    std::vector<Tensors> lists(1);
    for (int r = 0; r < n; ++r) lists[0].push_back(input[r].clone());
    group->reduce_scatter(outputs, lists)->wait();
    expect_equal(outputs[0], filled({2}, rank * total));
    Tensors inputs{input.clone()};
    outputs = {torch::empty({1, 2})};
    group->reduce_scatter_single_coalesced(outputs, inputs)->wait();
    expect_equal(outputs[0], filled({1, 2}, rank * total));
  }));
}

TEST_P(GlooSizes, AllToAll) {
  const int n = num_ranks();
  expect_quiet(on_ranks([&](int rank, const Group& group) {
    auto input = torch::arange(n, at::kFloat) + 10 * rank;
    auto output = torch::empty({n});
    std::vector<int64_t> none;
    group->all_to_all_single(output, input, none, none)->wait();
    expect_equal(output, 10 * torch::arange(n, at::kFloat) + rank);
    Tensors pieces;
    Tensors got;
    for (int r = 0; r < n; ++r) pieces.push_back(filled({2}, 10 * rank + r));
    for (int r = 0; r < n; ++r) got.push_back(torch::empty({2}));
    group->alltoall(got, pieces)->wait();
    for (int r = 0; r < n; ++r) expect_equal(got[r], filled({2}, 10 * r + rank));
    // Rank r sends r + 1 rows to everybody.
    std::vector<int64_t> in_sizes(n, rank + 1);
    std::vector<int64_t> out_sizes(n);
    for (int r = 0; r < n; ++r) out_sizes[r] = r + 1;
    auto uneven_in = filled({n * (rank + 1)}, rank);
    auto uneven_out = torch::empty({n * (n + 1) / 2});
    group->all_to_all_single(uneven_out, uneven_in, out_sizes, in_sizes)->wait();
    EXPECT_EQ(uneven_out[-1].item<float>(), n - 1);
    EXPECT_EQ(uneven_out[0].item<float>(), 0);
  }));
}

TEST(Gloo, SendsAndReceives) {
  expect_quiet(on_ranks(3, [](int rank, const Group& group) {
    Tensors x{filled({5}, rank)};
    if (rank == 0) {
      Tensors y{torch::empty({5})};
      group->recv(y, 1, 3)->wait();
      expect_equal(y[0], filled({5}, 1));
      const auto any = group->recvAnysource(y, 4);
      any->wait();
      EXPECT_EQ(any->sourceRank(), 2);
      expect_equal(y[0], filled({5}, 2));
    } else {
      group->send(x, 0, rank + 2)->wait();
    }
  }));
}

TEST(Gloo, SendsAndReceivesDoNotCountAsCollectives) {
  expect_quiet(on_ranks(3, [](int rank, const Group& group) {
    Tensors x{filled({5}, rank)};
    if (rank == 0) group->send(x, 1, 0)->wait();
    if (rank == 1) group->recv(x, 0, 0)->wait();
    all_reduce(group, filled({2}, 1));
  }));
}

TEST(Gloo, WorkGivesFutureResultAndState) {
  expect_quiet(on_ranks(2, [](int rank, const Group& group) {
    Tensors x{filled({5}, rank + 1)};
    const auto work = group->allreduce(x);
    work->getFuture()->wait();
    work->wait();
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
    EXPECT_EQ(work->exception(), nullptr);
    EXPECT_EQ(work->retrieveOpType(), c10d::OpType::ALLREDUCE);
    ASSERT_EQ(work->result().size(), 1u);
    expect_equal(work->result()[0], filled({5}, 3));
  }));
}

TEST(Gloo, ManyCollectivesInFlightAreWaitedForInAnyOrder) {
  expect_quiet(on_ranks(2, [](int rank, const Group& group) {
    std::vector<Tensors> tensors;
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (int i = 0; i < 100; ++i) tensors.push_back({filled({i % 7 + 1}, i + rank)});
    for (auto& t : tensors) works.push_back(group->allreduce(t));
    for (int i = 99; i >= 0; --i) {
      works[i]->wait();
      expect_equal(tensors[i][0], filled({i % 7 + 1}, 2 * i + 1));
    }
  }));
}

TEST(Gloo, KeepsItsNameAndKind) {
  expect_quiet(on_ranks(2, [](int, const Group& group) {
    EXPECT_EQ(group->getBackendName(), "gloo");
    EXPECT_EQ(group->getBackendType(), c10d::ProcessGroup::BackendType::GLOO);
    const auto backend = group->getBackend(c10::DeviceType::CPU);
    EXPECT_EQ(backend->getBackendName(), "gloo");
    EXPECT_TRUE(backend->supportsSplitting());
    EXPECT_EQ(backend->getBackendOptions()->timeout, 120s);
    backend->setTimeout(7s);
    EXPECT_EQ(backend->getBackendOptions()->timeout, 7s);
    EXPECT_EQ(backend->getError(), c10d::ErrorType::SUCCESS);
  }));
}

TEST(Gloo, RefusesOptionsItDoesNotKnow) {
  const auto error_of = [](const BackendOptions& options) {
    return on_threads(1,
                      [&](int) { make(c10::make_intrusive<c10d::HashStore>(), 0, 1, unique_name(), 5s, options); })[0];
  };
  EXPECT_THAT(error_of({{"colour", 1}}), HasSubstr("unknown backend option \"colour\""));
  EXPECT_THAT(error_of({{"threads", 0}}),
              HasSubstr("backend option \"threads\" of gloo is 0\n  fix: pass a whole number from 1 to 1024"));
  EXPECT_THAT(error_of({{"interface", 3}}), HasSubstr("backend option \"interface\" of gloo is 3"));
  EXPECT_THAT(error_of({{"interface", "nosuchif0"}}), HasSubstr("gloo cannot listen on interface nosuchif0"));
  EXPECT_EQ(error_of({{"threads", 3}, {"interface", "lo"}}), "");
  EXPECT_EQ(error_of({{"hostname", "127.0.0.1"}}), "");
}

TEST(Gloo, ReduceScatterRefusesListsThatDoNotFit) {
  expect_quiet(on_ranks(2, [](int, const Group& group) {
    auto input = torch::ones({5});
    auto output = torch::ones({2});
    EXPECT_THROW(group->reduce_scatter_single(output, input), c10::ValueError);
    auto even = torch::ones({6});
    EXPECT_THROW(group->reduce_scatter_single(output, even), c10::ValueError);
    all_reduce(group, torch::ones({2}));
  }));
}

TEST(Gloo, ReduceScatterTakesPiecesOfDifferentSizes) {
  expect_quiet(on_ranks(3, [](int rank, const Group& group) {
    std::vector<Tensors> lists{{filled({1}, 1), filled({2, 2}, 2), filled({0}, 3)}};
    Tensors output{torch::empty_like(lists[0][rank])};
    const auto work = group->reduce_scatter(output, lists);
    work->wait();
    expect_equal(output[0], lists[0][rank] * 3);
    expect_equal(work->result()[0], output[0]);
  }));
}

TEST(Gloo, ReduceScatterIsDoneWhenItsFutureIs) {
  expect_quiet(on_ranks(2, [](int rank, const Group& group) {
    auto input = filled({4}, rank + 1);
    auto output = torch::zeros({2});
    group->reduce_scatter_single(output, input)->getFuture()->wait();
    expect_equal(output, filled({2}, 3));
    expect_equal(input, filled({4}, rank + 1));
  }));
}

TEST(Gloo, TenGroupsAtOnceWithSkew) {
  constexpr int kGroups = 10;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  expect_quiet(on_threads(3, [&](int rank) {
    std::vector<Group> groups;
    for (int i = 0; i < kGroups; ++i) {
      const std::string name = "skew/" + std::to_string(i);
      groups.push_back(make(c10::make_intrusive<c10d::PrefixStore>(name, store), rank, 3, name, 20s));
    }
    for (int round = 0; round < 20; ++round) {
      std::vector<Tensors> tensors(kGroups);
      std::vector<c10::intrusive_ptr<c10d::Work>> works;
      // Every rank walks the groups in an order of its own.
      for (int i = 0; i < kGroups; ++i) {
        const int g = (i * 3 + rank * 5 + round) % kGroups;
        tensors[g] = {filled({g + 1}, rank + round)};
        works.push_back(groups[g]->allreduce(tensors[g]));
      }
      for (const auto& work : works) work->wait();
      for (int g = 0; g < kGroups; ++g) expect_equal(tensors[g][0], filled({g + 1}, 3 + 3 * round));
    }
  }));
}

TEST(Gloo, StockSplitGroupWorks) {
  expect_quiet(on_ranks(3, [](int rank, const Group& group) {
    const auto part = group->c10d::ProcessGroup::splitGroup(rank == 1 ? std::vector<int>{1} : std::vector<int>{0, 2},
                                                            15s, {}, rank == 1 ? "split/1" : "split/02", {}, {});
    ASSERT_TRUE(part);
    EXPECT_EQ(part->getSize(), rank == 1 ? 1 : 2);
    EXPECT_EQ(part->getRank(), rank == 2 ? 1 : 0);
    EXPECT_EQ(part->getBackendName(), "gloo");
    auto x = filled({3}, rank + 1);
    all_reduce(part, x);
    expect_equal(x, filled({3}, rank == 1 ? 2 : 4));
  }));
}

TEST(Gloo, MergeMakesALargerGroup) {
  const auto meeting = c10::make_intrusive<c10d::HashStore>();
  expect_quiet(on_threads(2, [&](int rank) {
    const auto alone = make(c10::make_intrusive<c10d::HashStore>(), 0, 1, unique_name(), 15s);
    const auto backend = alone->getBackend(c10::DeviceType::CPU);
    const auto both = backend->merge(meeting, backend->getBackendOptions(), rank, 2);
    EXPECT_EQ(both->getSize(), 2);
    Tensors x{filled({3}, rank + 1)};
    both->allreduce(x)->wait();
    expect_equal(x[0], filled({3}, 3));
  }));
}

TEST(Gloo, DestructionLetsCollectivesUnderWayFinish) {
  Tensors x[2] = {{filled({100}, 1)}, {filled({100}, 2)}};
  expect_quiet(on_ranks(2, [&](int rank, const Group& group) { group->allreduce(x[rank]); }));
  for (const auto& tensors : x) expect_equal(tensors[0], filled({100}, 3));
}

TEST(Gloo, AClosedPeerIsAnErrorNotTheEndOfTheProcess) {
  const auto handler_after = [](void (*before)(int)) {
    std::signal(SIGPIPE, before);
    expect_quiet(on_ranks(1, [](int, const Group&) {}));
    return std::signal(SIGPIPE, SIG_IGN);
  };
  EXPECT_EQ(handler_after(SIG_DFL), SIG_IGN);
  void (*own)(int) = [](int) {};
  EXPECT_EQ(handler_after(own), own);
}

TEST(Gloo, AGroupMayBeDroppedAsSoonAsItIsMade) {
  const Store store = c10::make_intrusive<c10d::HashStore>();
  expect_quiet(on_threads(4, [&](int rank) {
    for (int i = 0; i < 50; ++i) {
      make(c10::make_intrusive<c10d::PrefixStore>(std::to_string(i), store), rank, 4, unique_name(), 20s);
    }
  }));
}

TEST(Gloo, WhatItCannotTakeIsRefusedAndTheGroupGoesOn) {
  expect_quiet(on_ranks(2, [](int, const Group& group) {
    const auto text = [&](const at::Tensor& x, c10d::ReduceOp op) {
      try {
        all_reduce(group, x, op);
      } catch (const c10::ValueError& error) {
        return std::string(error.what_without_backtrace());
      }
      return std::string("no ValueError");
    };
    using c10d::ReduceOp;
    EXPECT_EQ(text(torch::ones({3, 4}).t(), ReduceOp::SUM),
              "[all_reduce] f32[4,3] is not contiguous, and gloo takes memory as it lies\n"
              "  fix: pass x.contiguous(), and copy back what the call writes into it");
    EXPECT_EQ(text(torch::ones({3}, at::kBool), ReduceOp::AVG),
              "[all_reduce] gloo has no avg of bool[3]\n  fix: reduce bool with bor, band or bxor");
    EXPECT_EQ(text(torch::ones({3}, at::kShort), ReduceOp::SUM),
              "[all_reduce] gloo has no sum of i16[3]\n  fix: convert it to i32 or f32, or use \"shm\"");
    EXPECT_EQ(text(torch::ones({3}), ReduceOp::BAND),
              "[all_reduce] gloo has no band of f32[3]\n  fix: use bitwise reductions on integers and bool");
    EXPECT_EQ(text(torch::ones({3}), c10d::makePreMulSum(2.0)),
              "[all_reduce] gloo has no premul_sum of f32[3]\n"
              "  fix: multiply the tensor first, then reduce with sum");
    Tensors shorts{torch::ones({3}, at::kShort)};
    EXPECT_THROW(group->broadcast(shorts), c10::ValueError);
    Tensors strided{torch::ones({3, 4}).t()};
    EXPECT_THROW(group->broadcast(strided), c10::ValueError);
    EXPECT_THROW(group->reduce(strided), c10::ValueError);
    EXPECT_THROW(group->send(strided, 0, 0), c10::ValueError);
    EXPECT_THROW(group->recv(strided, 0, 0), c10::ValueError);
    auto x = filled({3}, 1);
    all_reduce(group, x);
    expect_equal(x, filled({3}, 2));
  }));
}

}  // namespace
}  // namespace serried
