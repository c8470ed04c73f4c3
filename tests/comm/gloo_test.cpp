// The gloo backend by itself: every call, and what the watch says when ranks disagree, are missing or give up.
#include "serried/comm/backends/gloo/gloo.h"

#include <atomic>
#include <functional>
#include <limits>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/comm/watch.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using Store = c10::intrusive_ptr<c10d::Store>;
using Tensors = std::vector<at::Tensor>;

std::string unique_name() {
  static std::atomic<int> count{0};
  return "gloo_test/" + std::to_string(count.fetch_add(1));
}

Group make(const Store& store, int rank, int size, const std::string& name, std::chrono::milliseconds timeout,
           const BackendOptions& options = {}) {
  FactoryArgs args;
  args.store = store;
  args.rank = rank;
  args.world_size = size;
  args.timeout = timeout;
  args.options = options;
  args.name = name;
  return make_gloo_group(args);
}

// Runs `fn` on a thread per rank and returns what each raised, "" for nothing.
std::vector<std::string> on_threads(int size, const std::function<void(int)>& fn) {
  std::vector<std::string> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        fn(rank);
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

using RankFn = std::function<void(int rank, const Group& group)>;

std::vector<std::string> on_ranks(int size, const RankFn& fn, std::chrono::milliseconds timeout = 20s,
                                  const Store& store = c10::make_intrusive<c10d::HashStore>()) {
  const std::string name = unique_name();
  return on_threads(size, [&](int rank) { fn(rank, make(store, rank, size, name, timeout)); });
}

void expect_quiet(const std::vector<std::string>& errors) {
  for (const auto& error : errors) EXPECT_EQ(error, "");
}

void all_reduce(const Group& group, at::Tensor x, c10d::ReduceOp op = c10d::ReduceOp::SUM) {
  Tensors tensors{std::move(x)};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  group->allreduce(tensors, options)->wait();
}

at::Tensor filled(at::IntArrayRef sizes, double value) {
  return torch::full(sizes, value, at::kFloat);
}

void expect_equal(const at::Tensor& got, const at::Tensor& wanted) {
  EXPECT_TRUE(torch::equal(got, wanted)) << got << "\n" << wanted;
}

class GlooSizes : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GlooSizes, testing::Values(1, 2, 3));

TEST_P(GlooSizes, ReductionsAndBroadcast) {
  const int n = GetParam();
  const double total = n * (n + 1) / 2.0;
  expect_quiet(on_ranks(n, [&](int rank, const Group& group) {
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
  const int n = GetParam();
  expect_quiet(on_ranks(n, [&](int rank, const Group& group) {
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
  const int n = GetParam();
  expect_quiet(on_ranks(n, [&](int rank, const Group& group) {
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
  const int n = GetParam();
  const double total = n * (n + 1) / 2.0;
  expect_quiet(on_ranks(n, [&](int rank, const Group& group) {
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
  const int n = GetParam();
  expect_quiet(on_ranks(n, [&](int rank, const Group& group) {
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
    EXPECT_EQ(backend->getBackendOptions()->timeout, 20s);
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

struct Mismatch {
  const char* name;
  RankFn fn;
  std::string texts[2];  // the calls of rank 0 and rank 1
};

const Mismatch kMismatches[] = {
    {"shape",
     [](int rank, const Group& group) { all_reduce(group, torch::ones({3 + rank})); },
     {"rank 0 #1 all_reduce f32[3] sum", "rank 1 #1 all_reduce f32[4] sum"}},
    {"dtype",
     [](int rank, const Group& group) { all_reduce(group, torch::ones({3}, rank == 0 ? at::kFloat : at::kInt)); },
     {"rank 0 #1 all_reduce f32[3] sum", "rank 1 #1 all_reduce i32[3] sum"}},
    {"reduce_op",
     [](int rank, const Group& group) {
       all_reduce(group, torch::ones({3}), rank == 0 ? c10d::ReduceOp::SUM : c10d::ReduceOp::MAX);
     },
     {"rank 0 #1 all_reduce f32[3] sum", "rank 1 #1 all_reduce f32[3] max"}},
    {"order",
     [](int rank, const Group& group) {
       if (rank == 0) group->barrier()->wait();
       all_reduce(group, torch::ones({3}));
       if (rank == 1) group->barrier()->wait();
     },
     {"rank 0 #1 barrier", "rank 1 #1 all_reduce f32[3] sum"}},
    {"all_gather_size",
     [](int rank, const Group& group) {
       auto input = torch::ones({3 + rank});
       auto output = torch::empty({(3 + rank) * group->getSize()});
       group->all_gather_single(output, input)->wait();
     },
     {"rank 0 #1 all_gather f32[3]", "rank 1 #1 all_gather f32[4]"}},
};

TEST(Gloo, AMismatchRaisesOnEveryRankAndNamesBoth) {
  for (const Mismatch& mismatch : kMismatches) {
    for (int size : {2, 3}) {
      const auto begin = Clock::now();
      // With three ranks the last does as rank 1 does.
      const auto errors = on_ranks(size, [&](int rank, const Group& g) { mismatch.fn(std::min(rank, 1), g); });
      EXPECT_LT(Clock::now() - begin, 3s) << mismatch.name;
      for (const auto& error : errors) {
        EXPECT_THAT(error, HasSubstr("ranks called different collectives: rank 0 ")) << mismatch.name;
        EXPECT_THAT(error, HasSubstr(mismatch.texts[0])) << mismatch.name;
        if (size == 2) EXPECT_THAT(error, HasSubstr(mismatch.texts[1])) << mismatch.name;
      }
    }
  }
}

TEST(Gloo, ARankThatAlreadyWaitsRaisesWithin100Ms) {
  std::atomic<bool> waiting{false};
  Clock::time_point mismatched;
  Clock::time_point raised;
  const auto errors = on_ranks(2, [&](int rank, const Group& group) {
    Tensors x{torch::ones({3 + rank})};
    if (rank == 0) {
      const auto work = group->allreduce(x);
      waiting = true;
      EXPECT_THROW(work->wait(), c10::DistBackendError);
      raised = Clock::now();
      return;
    }
    while (!waiting) std::this_thread::yield();
    mismatched = Clock::now();
    EXPECT_THROW(group->allreduce(x), c10::DistBackendError);
  });
  expect_quiet(errors);
  EXPECT_LT(raised - mismatched, 300ms) << "50 ms slices, on a quiet machine";
}

TEST(Gloo, ATimeoutSaysWhoIsMissingAndWhereEachRankIs) {
  std::atomic<int> done{0};
  const auto errors = on_ranks(
      3,
      [&](int rank, const Group& group) {
        all_reduce(group, torch::ones({2}));
        if (rank == 2) {
          while (done < 2) std::this_thread::yield();
          return;
        }
        struct Count {
          std::atomic<int>& n;
          ~Count() { ++n; }
        } count{done};
        all_reduce(group, torch::ones({512}));
      },
      400ms);
  for (int rank : {0, 1}) {
    EXPECT_THAT(errors[rank],
                AllOf(HasSubstr("[all_reduce] timed out after 4"),
                      HasSubstr(" ms in #2 all_reduce f32[512] sum: rank 2 is at #1 all_reduce f32[2] sum, the others "
                                "at #2\n  fix: find out what the missing ranks are doing")));
  }
  EXPECT_EQ(errors[2], "");
}

TEST(Gloo, AfterAFailureEveryCallNamesIt) {
  std::atomic<bool> late{false};
  const auto errors = on_ranks(
      2,
      [&](int rank, const Group& group) {
        if (rank == 0) EXPECT_THROW(all_reduce(group, torch::ones({2})), c10::DistBackendError);
        if (rank == 0) late = true;
        while (!late) std::this_thread::yield();
        EXPECT_EQ(group->getBackend(c10::DeviceType::CPU)->getError(), c10d::ErrorType::COMM_ERROR);
        Tensors x{torch::ones({2})};
        EXPECT_THROW(group->send(x, 1 - rank, 0), c10::DistBackendError);
        group->barrier();
      },
      200ms);
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("[barrier] this group is unusable since: timed out after 2"),
                             HasSubstr("rank 1 has not made any call"), HasSubstr("\n  fix: make a new group")));
  }
}

TEST(Gloo, AShortWaitRaisesButTheCollectiveGoesOn) {
  std::atomic<bool> tried{false};
  expect_quiet(on_ranks(2, [&](int rank, const Group& group) {
    Tensors x{filled({2}, rank + 1)};
    if (rank == 1) {
      while (!tried) std::this_thread::yield();
      group->allreduce(x)->wait();
      return;
    }
    const auto work = group->allreduce(x);
    EXPECT_THROW(work->wait(20ms), c10::DistBackendError);
    tried = true;
    work->wait();
    expect_equal(x[0], filled({2}, 3));
  }));
}

TEST(Gloo, RefusedArgumentsLeaveTheGroupUsable) {
  std::atomic<bool> refused{false};
  expect_quiet(on_ranks(2, [&](int rank, const Group& group) {
    Tensors x{filled({2}, 1)};
    c10d::BroadcastOptions nowhere;
    nowhere.rootRank = 9;
    EXPECT_THROW(group->broadcast(x, nowhere), c10::ValueError);
    std::vector<Tensors> too_few{{torch::ones({2})}};
    if (rank == 0) EXPECT_ANY_THROW(group->allgather(too_few, x));
    if (rank == 0) refused = true;
    while (!refused) std::this_thread::yield();
    all_reduce(group, x[0]);
    expect_equal(x[0], filled({2}, 2));
  }));
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

TEST(Gloo, AbortWakesWhoWaitsInACollective) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    if (rank == 1) return group->abort();
    all_reduce(group, torch::ones({2}));
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 aborted the group"));
}

TEST(Gloo, AbortWakesWhoWaitsInAReceive) {
  std::atomic<bool> posted{false};
  const auto errors = on_ranks(2, [&](int rank, const Group& group) {
    if (rank == 1) {
      group->barrier()->wait();
      while (!posted) std::this_thread::yield();
      return;
    }
    group->barrier()->wait();
    Tensors x{torch::ones({2})};
    const auto work = group->recv(x, 1, 0);
    std::thread other([&] { group->abort(); });
    try {
      work->wait();
    } catch (...) {
      other.join();
      posted = true;
      throw;
    }
    other.join();
    posted = true;
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 0 aborted the group"));
}

TEST(Gloo, APeerThatFailsWakesWhoWaitsInAReceive) {
  const auto begin = Clock::now();
  const auto errors = on_ranks(3, [&](int rank, const Group& group) {
    Tensors x{torch::ones({2 + rank})};
    if (rank == 0) {
      group->recv(x, 1, 0)->wait();
      return;
    }
    group->allreduce(x)->wait();
  });
  EXPECT_LT(Clock::now() - begin, 3s);
  EXPECT_THAT(errors[0], HasSubstr("rank 1 #1 all_reduce f32[3] sum, rank 2 #1 all_reduce f32[4] sum"));
}

TEST(Gloo, ARankThatLeavesIsNamed) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    all_reduce(group, torch::ones({2}));
    if (rank == 0) all_reduce(group, torch::ones({3}));
  });
  EXPECT_THAT(errors[0],
              AllOf(HasSubstr("#2 all_reduce f32[3] sum failed: "), HasSubstr("; rank 1 has left the group")));
}

TEST(Gloo, AFailedGroupIsDestroyedAtOnce) {
  const auto errors = on_ranks(
      2,
      [](int rank, const Group& group) {
        const auto begin = Clock::now();
        EXPECT_THROW(all_reduce(group, torch::ones({3 + rank})), c10::DistBackendError);
        EXPECT_LT(Clock::now() - begin, 2s);
      },
      60s);
  expect_quiet(errors);  // the threads ended, so the destructors did
}

TEST(Gloo, DestructionLetsCollectivesUnderWayFinish) {
  Tensors x[2] = {{filled({100}, 1)}, {filled({100}, 2)}};
  expect_quiet(on_ranks(2, [&](int rank, const Group& group) { group->allreduce(x[rank]); }));
  for (const auto& tensors : x) expect_equal(tensors[0], filled({100}, 3));
}

TEST(Gloo, MonitoredBarrierPassesAndNamesWhoIsMissing) {
  std::atomic<bool> failed{false};
  const auto errors = on_ranks(
      3,
      [&](int rank, const Group& group) {
        group->monitoredBarrier({}, true);
        if (rank == 2) {
          while (!failed) std::this_thread::yield();
          return;
        }
        c10d::BarrierOptions options;
        options.timeout = 300ms;
        try {
          group->monitoredBarrier(options, true);
        } catch (...) {
          failed = true;
          throw;
        }
      },
      3s);
  EXPECT_THAT(errors[0], HasSubstr("in #2 barrier: rank 2 is at #1 barrier, the others at #2"));
}

TEST(Gloo, NanInWhatIsSentRaisesHereAndThere) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    watch::set_nan_check(group, watch::NanCheck::raise);
    auto x = torch::ones({2, 3});
    if (rank == 1) x[1][2] = std::numeric_limits<float>::quiet_NaN();
    all_reduce(group, x);
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("rank 1 sends 1 NaN in f32[2,3], the first at [1,2]"));
}

TEST(Gloo, NanInWhatIsReceivedIsNobodysBusiness) {
  expect_quiet(on_ranks(2, [](int rank, const Group& group) {
    watch::set_nan_check(group, watch::NanCheck::raise);
    Tensors x{filled({3}, rank == 0 ? 1.0 : std::numeric_limits<double>::quiet_NaN())};
    group->broadcast(x)->wait();
    expect_equal(x[0], filled({3}, 1));
    watch::set_nan_check(group, watch::NanCheck::off);
    all_reduce(group, filled({3}, std::numeric_limits<double>::quiet_NaN()));
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

// Makes rank 1 look as if it ran on another host.
class TwoHosts : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    auto changed = value;
    if (key.ends_with("host/1")) changed.push_back('x');
    HashStore::set(key, changed);
  }
};

TEST(Gloo, AcrossHostsATimeoutNamesWhoDidNotReport) {
  std::atomic<bool> failed{false};
  const auto errors = on_ranks(
      2,
      [&](int rank, const Group& group) {
        auto x = filled({2}, 1);
        all_reduce(group, x);
        expect_equal(x, filled({2}, 2));
        if (rank == 1) {
          while (!failed) std::this_thread::yield();
          return;
        }
        try {
          all_reduce(group, x);
        } catch (...) {
          failed = true;
          throw;
        }
      },
      300ms, c10::make_intrusive<TwoHosts>());
  EXPECT_THAT(errors[0], HasSubstr("in #2 all_reduce f32[2] sum: rank 1 did not report"));
}

TEST(Gloo, ARankThatNeverComesToTheGroupIsNamed) {
  const auto errors = on_threads(1, [](int) { make(c10::make_intrusive<c10d::HashStore>(), 0, 2, "alone", 100ms); });
  EXPECT_THAT(errors[0], HasSubstr("[new_group] timed out after 100 ms: rank 1 of 2 did not come to this group"));
}

}  // namespace
}  // namespace serried
