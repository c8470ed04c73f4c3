// What the watch says when the ranks of a gloo group disagree, are missing or give up.
#include "tests/comm/backends/gloo_ranks.h"

#include <limits>

#include "serried/comm/collectives/watch.h"
#include "tests/support/two_hosts.h"

namespace serried {
namespace {

using namespace gloo_test;
using testing::TwoHosts;

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

TEST(GlooWatch, AMismatchRaisesOnEveryRankAndNamesBoth) {
  for (const Mismatch& mismatch : kMismatches) {
    for (int size : {2, 3}) {
      const auto begin = Clock::now();
      // With three ranks the last does as rank 1 does.
      const auto errors = on_ranks(size, [&](int rank, const Group& g) { mismatch.fn(std::min(rank, 1), g); });
      EXPECT_LT(Clock::now() - begin, 60s) << mismatch.name;
      for (const auto& error : errors) {
        EXPECT_THAT(error, HasSubstr("ranks called different collectives: rank 0 ")) << mismatch.name;
        EXPECT_THAT(error, HasSubstr(mismatch.texts[0])) << mismatch.name;
        if (size == 2) EXPECT_THAT(error, HasSubstr(mismatch.texts[1])) << mismatch.name;
      }
    }
  }
}

// gloo would end the process.
TEST(GlooWatch, AcrossHostsAMismatchRaisesOnEveryRankBeforeAnythingIsSent) {
  for (const Mismatch& mismatch : kMismatches) {
    for (int size : {2, 3}) {
      const auto errors = on_ranks(
          size, [&](int rank, const Group& g) { mismatch.fn(std::min(rank, 1), g); }, 120s,
          c10::make_intrusive<TwoHosts>());
      for (const auto& error : errors) {
        EXPECT_THAT(error, AllOf(HasSubstr(mismatch.texts[0]), HasSubstr(mismatch.texts[1]))) << mismatch.name;
      }
    }
  }
}

TEST(GlooWatch, AcrossHostsCallsUnderWayAtAMismatchRaiseAsWell) {
  const auto errors = on_ranks(
      2,
      [](int rank, const Group& group) {
        Tensors good{filled({2}, 1)}, bad{filled({3 + rank}, 1)}, after{filled({2}, 1)};
        const auto first = group->allreduce(good), second = group->allreduce(bad), third = group->allreduce(after);
        first->wait();
        expect_equal(good[0], filled({2}, 2));
        EXPECT_THROW(third->wait(), c10::DistBackendError);
        expect_equal(after[0], filled({2}, 1));
        second->wait();
      },
      120s, c10::make_intrusive<TwoHosts>());
  for (const auto& error : errors) {
    EXPECT_THAT(error, HasSubstr("ranks called different collectives: rank 0 #2 all_reduce f32[3] sum, rank 1 #2 "
                                 "all_reduce f32[4] sum"));
  }
}

// Asynchronous calls do not make their caller wait for ranks that come later.
TEST(GlooWatch, AcrossHostsACallReturnsBeforeTheOthersCome) {
  std::atomic<bool> issued{false};
  expect_quiet(on_ranks(
      2,
      [&](int rank, const Group& group) {
        Tensors x{filled({2}, rank)};
        while (rank == 1 && !issued) std::this_thread::yield();
        const auto work = group->allreduce(x);
        issued = true;
        work->wait();
        expect_equal(x[0], filled({2}, 1));
      },
      120s, c10::make_intrusive<TwoHosts>()));
}

TEST(GlooWatch, AcrossHostsAMonitoredBarrierKeepsItsPlaceAmongTheCalls) {
  expect_quiet(on_ranks(
      3,
      [&](int rank, const Group& group) {
        for (int i = 0; i < 5; ++i) {
          Tensors x{filled({2}, rank)};
          const auto work = group->allreduce(x);
          group->monitoredBarrier({}, true);
          work->wait();
          expect_equal(x[0], filled({2}, 3));
        }
      },
      120s, c10::make_intrusive<TwoHosts>()));
}

TEST(GlooWatch, ARankThatAlreadyWaitsRaisesSoon) {
  std::atomic<bool> waiting{false};
  std::atomic<bool> woken{false};
  Clock::time_point mismatched;
  Clock::time_point raised;
  const auto errors = on_ranks(2, [&](int rank, const Group& group) {
    Tensors x{torch::ones({3 + rank})};
    if (rank == 0) {
      const auto work = group->allreduce(x);
      waiting = true;
      EXPECT_THROW(work->wait(), c10::DistBackendError);
      raised = Clock::now();
      woken = true;
      return;
    }
    while (!waiting) std::this_thread::yield();
    mismatched = Clock::now();
    EXPECT_THROW(group->allreduce(x), c10::DistBackendError);
    // This rank keeps its group: a connection that closes would wake the other one as well.
    while (!woken) std::this_thread::yield();
  });
  expect_quiet(errors);
  EXPECT_LT(raised - mismatched, 60s) << "the timeout is 120 s";
}

TEST(GlooWatch, ATimeoutSaysWhoIsMissingAndWhereEachRankIs) {
  std::atomic<int> done{0};
  const auto errors = on_ranks(3, [&](int rank, const Group& group) {
    all_reduce(group, torch::ones({2}));
    if (rank == 2) {
      while (done < 2) std::this_thread::yield();
      return;
    }
    struct Count {
      std::atomic<int>& n;
      ~Count() { ++n; }
    } count{done};
    group->setTimeout(1s);
    all_reduce(group, torch::ones({512}));
  });
  for (int rank : {0, 1}) {
    EXPECT_THAT(errors[rank],
                AllOf(HasSubstr("[all_reduce] timed out after "),
                      HasSubstr(" ms in #2 all_reduce f32[512] sum: rank 2 is at #1 all_reduce f32[2] sum, the others "
                                "at #2\n  fix: find out what the missing ranks are doing")));
  }
  EXPECT_EQ(errors[2], "");
}

TEST(GlooWatch, AfterAFailureEveryCallNamesIt) {
  std::atomic<bool> late{false};
  const auto errors = on_ranks(2, [&](int rank, const Group& group) {
    group->setTimeout(200ms);
    if (rank == 0) EXPECT_THROW(all_reduce(group, torch::ones({2})), c10::DistBackendError);
    if (rank == 0) late = true;
    while (!late) std::this_thread::yield();
    EXPECT_EQ(group->getBackend(c10::DeviceType::CPU)->getError(), c10d::ErrorType::COMM_ERROR);
    Tensors x{torch::ones({2})};
    EXPECT_THROW(group->send(x, 1 - rank, 0), c10::DistBackendError);
    group->barrier();
  });
  for (const auto& error : errors) {
    EXPECT_THAT(error, AllOf(HasSubstr("[barrier] this group is unusable since: timed out after "),
                             HasSubstr("rank 1 has not made any call"), HasSubstr("\n  fix: make a new group")));
  }
}

TEST(GlooWatch, AShortWaitRaisesButTheCollectiveGoesOn) {
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

TEST(GlooWatch, RefusedArgumentsLeaveTheGroupUsable) {
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

TEST(GlooWatch, AbortWakesWhoWaitsInACollective) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    if (rank == 1) return group->abort();
    all_reduce(group, torch::ones({2}));
  });
  EXPECT_THAT(errors[0], HasSubstr("rank 1 aborted the group"));
}

TEST(GlooWatch, AbortWakesWhoWaitsInAReceive) {
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

TEST(GlooWatch, APeerThatFailsWakesWhoWaitsInAReceive) {
  const auto begin = Clock::now();
  const auto errors = on_ranks(3, [&](int rank, const Group& group) {
    Tensors x{torch::ones({2 + rank})};
    if (rank == 0) {
      group->recv(x, 1, 0)->wait();
      return;
    }
    group->allreduce(x)->wait();
  });
  EXPECT_LT(Clock::now() - begin, 60s);
  EXPECT_THAT(errors[0], HasSubstr("rank 1 #1 all_reduce f32[3] sum, rank 2 #1 all_reduce f32[4] sum"));
}

TEST(GlooWatch, ARankThatLeavesIsNamed) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    all_reduce(group, torch::ones({2}));
    if (rank == 0) all_reduce(group, torch::ones({3}));
  });
  EXPECT_THAT(errors[0],
              AllOf(HasSubstr("#2 all_reduce f32[3] sum failed: "), HasSubstr("; rank 1 has left the group")));
}

// gloo finds a broken connection when a send starts, and says so in an exception of its own.
TEST(GlooWatch, ASendToARankThatHasLeftRaises) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    all_reduce(group, torch::ones({2}));
    while (rank == 0) {
      Tensors x{torch::ones({2})};
      group->send(x, 1, 0)->wait();
    }
  });
  EXPECT_THAT(errors[0],
              AllOf(HasSubstr("[send] send f32[2] to rank 1 failed: "), HasSubstr("; rank 1 has left the group")));
}

TEST(GlooWatch, AFailedGroupIsDestroyedLongBeforeItsTimeout) {
  const auto begin = Clock::now();
  expect_quiet(on_ranks(
      2,
      [](int rank, const Group& group) {
        EXPECT_THROW(all_reduce(group, torch::ones({3 + rank})), c10::DistBackendError);
      },
      120s));
  // The threads have ended, and with them the destructors, though gloo still holds the collective of one rank.
  EXPECT_LT(Clock::now() - begin, 60s);
}

TEST(GlooWatch, MonitoredBarrierPassesAndNamesWhoIsMissing) {
  std::atomic<bool> failed{false};
  const auto errors = on_ranks(3, [&](int rank, const Group& group) {
    group->monitoredBarrier({}, true);
    if (rank == 2) {
      while (!failed) std::this_thread::yield();
      return;
    }
    c10d::BarrierOptions options;
    options.timeout = 2s;
    try {
      group->monitoredBarrier(options, true);
    } catch (...) {
      failed = true;
      throw;
    }
  });
  EXPECT_THAT(errors[0], HasSubstr("in #2 barrier: rank 2 is at #1 barrier, the others at #2"));
}

TEST(GlooWatch, NanInWhatIsSentRaisesHereAndThere) {
  const auto errors = on_ranks(2, [](int rank, const Group& group) {
    watch::set_nan_check(group, watch::NanCheck::raise);
    auto x = torch::ones({2, 3});
    if (rank == 1) x[1][2] = std::numeric_limits<float>::quiet_NaN();
    all_reduce(group, x);
  });
  for (const auto& error : errors) EXPECT_THAT(error, HasSubstr("rank 1 sends 1 NaN in f32[2,3], the first at [1,2]"));
}

TEST(GlooWatch, NanInWhatIsReceivedIsNobodysBusiness) {
  expect_quiet(on_ranks(2, [](int rank, const Group& group) {
    watch::set_nan_check(group, watch::NanCheck::raise);
    Tensors x{filled({3}, rank == 0 ? 1.0 : std::numeric_limits<double>::quiet_NaN())};
    group->broadcast(x)->wait();
    expect_equal(x[0], filled({3}, 1));
    watch::set_nan_check(group, watch::NanCheck::off);
    all_reduce(group, filled({3}, std::numeric_limits<double>::quiet_NaN()));
  }));
}

TEST(GlooWatch, AcrossHostsATimeoutNamesWhoDidNotReport) {
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
        group->setTimeout(300ms);
        try {
          all_reduce(group, x);
        } catch (...) {
          failed = true;
          throw;
        }
      },
      120s, c10::make_intrusive<TwoHosts>());
  EXPECT_THAT(errors[0], HasSubstr("in #2 all_reduce f32[2] sum: rank 1 did not report"));
}

TEST(GlooWatch, ARankThatNeverComesToTheGroupIsNamed) {
  const auto errors = on_threads(1, [](int) { make(c10::make_intrusive<c10d::HashStore>(), 0, 2, "alone", 100ms); });
  EXPECT_THAT(errors[0], HasSubstr("[new_group] rank 1 of 2 did not come within 100 ms"));
}

}  // namespace
}  // namespace serried
