// What is particular to the shm backend: its heap, its kernels, its point to point, its ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <latch>
#include <limits>

#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/backends/shm/connect.h"
#include "serried/comm/backends/shm/heap.h"
#include "serried/comm/backends/shm/reduce_kernels.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using ::testing::AnyOf;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::sample;

const RunRanksOptions kShm{.backend = "shm", .timeout = 20s};

at::Tensor in_heap(const Group& group, const at::Tensor& values) {
  const at::Tensor tensor = group->getBackend(at::kCPU)->allocateTensor(values.numel(), values.options());
  tensor.copy_(values.view({-1}));
  return tensor.view(values.sizes());
}

at::Tensor sum_of_samples(at::IntArrayRef sizes, int num_ranks) {
  at::Tensor sum = sample(sizes, 0);
  for (int rank = 1; rank < num_ranks; ++rank) sum = sum + sample(sizes, rank);
  return sum;
}

TEST(ShmHeap, BlocksAreAlignedAndMergedWhenFree) {
  shm::Heap heap(1024);
  const int64_t a = heap.allocate(1);
  const int64_t b = heap.allocate(100);
  const int64_t c = heap.allocate(64);
  EXPECT_EQ(a % 64, 0);
  EXPECT_EQ(b % 64, 0);
  EXPECT_EQ(heap.bytes_in_use(), 64 + 128 + 64);
  EXPECT_EQ(heap.allocate(1024), -1);
  heap.release(a);
  heap.release(c);
  heap.release(b);
  EXPECT_EQ(heap.bytes_in_use(), 0);
  EXPECT_EQ(heap.allocate(1024), 0);
}

TEST(ShmHeap, TensorsOfTheHeapAreReducedInPlace) {
  for (const int n : {1, 2, 3, 4}) {
    run_ranks(
        n,
        [&](const Group& g) {
          for (const int64_t size : {0, 1, 17, 4097, 300'001}) {
            const at::Tensor x = in_heap(g, sample({size}, g->getRank()));
            EXPECT_EQ(reinterpret_cast<uintptr_t>(x.data_ptr()) % 64, 0);
            all_reduce_(x, g);
            expect_equal(x, sum_of_samples({size}, n));
          }
        },
        kShm);
  }
}

TEST(ShmHeap, RanksMayMixHeapAndPrivateTensors) {
  // "always_stage" as between processes: there a private tensor cannot be reached.
  run_ranks(3, [](const Group& g) {
    const Group staged = new_group(
        "shm",
        {.store = g->getStore(), .rank = g->getRank(), .world_size = 3, .backend_options = {{"always_stage", true}}});
    for (const int64_t size : {1000, 300'001}) {
      const at::Tensor mine = sample({size}, g->getRank());
      const at::Tensor x = g->getRank() == 1 ? mine.clone() : in_heap(staged, mine);
      all_reduce_(x, staged);
      expect_equal(x, sum_of_samples({size}, 3));
      const at::Tensor y = g->getRank() == 1 ? mine : in_heap(staged, mine);
      expect_equal(all_gather(y, staged).narrow(0, size, size), sample({size}, 1));
      expect_equal(reduce_scatter(y, staged), sum_of_samples({size}, 3).chunk(3)[g->getRank()]);
    }
  });
}

TEST(ShmHeap, TensorsOutliveTheirGroup) {
  at::Tensor kept;
  run_ranks(
      2,
      [&](const Group& g) {
        if (g->getRank() == 0) kept = in_heap(g, sample({100}, 7));
        barrier(g);
      },
      kShm);
  expect_equal(kept, sample({100}, 7));
}

TEST(ShmHeap, NoRoomIsSaidWithTheNumbers) {
  run_ranks(1, [](const Group& g) {
    const Group small =
        new_group("shm", {.store = g->getStore(), .rank = 0, .world_size = 1, .backend_options = {{"heap_mb", 1}}});
    const auto backend = small->getBackend(at::kCPU);
    const at::Tensor first = backend->allocateTensor(1000, at::kFloat);
    EXPECT_THAT(testing::error_text<c10::OutOfMemoryError>([&] { backend->allocateTensor(1 << 20, at::kFloat); }),
                HasSubstr("[allocateTensor] no room for 4194304 bytes in the symmetric heap: 4032 of 1048576 bytes are "
                          "in use\n  fix: raise SERRIED_SHM_HEAP_MB, or release tensors of this group"));
  });
}

TEST(ShmKernels, BothInstructionSetsGiveTheSameBits) {
#if defined(__x86_64__)
  using c10d::ReduceOp;
  ASSERT_TRUE(__builtin_cpu_supports("avx2"));
  torch::manual_seed(1);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat, at::kInt, at::kChar}) {
    for (const auto op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::PRODUCT, ReduceOp::MIN, ReduceOp::BXOR}) {
      const auto baseline = shm::baseline::find(dtype, op);
      const auto avx2 = shm::avx2::find(dtype, op);
      ASSERT_EQ(baseline == nullptr, avx2 == nullptr);
      if (baseline == nullptr) continue;
      for (const int n : {1, 2, 3, 5}) {
        std::vector<at::Tensor> inputs;
        std::vector<const void*> sources;
        for (int k = 0; k < n; ++k) {
          inputs.push_back((at::randn({1029}) * 20).to(dtype));
          sources.push_back(inputs.back().data_ptr());
        }
        const at::Tensor a = at::empty({1029}, dtype);
        const at::Tensor b = at::empty({1029}, dtype);
        baseline(a.data_ptr(), sources.data(), n, 1029);
        avx2(b.data_ptr(), sources.data(), n, 1029);
        EXPECT_EQ(std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()), 0) << dtype << " op " << int(op) << " n " << n;
      }
    }
  }
#endif
}

TEST(ShmPeers, ALongMessageFlowsThroughAShortStream) {
  run_ranks(
      2,
      [](const Group& g) {
        at::Tensor x = sample({1'000'003}, 0);
        if (g->getRank() == 0) return send(x, g, {.peer = 1});
        at::Tensor y = at::zeros({1'000'003});
        recv(y, g, {.peer = 0});
        expect_equal(y, x);
      },
      kShm);
}

TEST(ShmPeers, SizesThatDisagreeNameBothRanksAndLaterMessagesStillCome) {
  run_ranks(
      2,
      [](const Group& g) {
        if (g->getRank() == 0) {
          send(at::ones({5}), g, {.peer = 1});
          return send(at::full({3}, 7.), g, {.peer = 1});
        }
        at::Tensor x = at::zeros({3});
        EXPECT_THAT(
            testing::error_text<c10::DistBackendError>([&] { recv(x, g, {.peer = 0}); }),
            HasSubstr("rank 0 sent 20 bytes of f32 where rank 1 expects 12 bytes in recv f32[3] from rank 0, tag 0\n"
                      "  fix: let both sides use the same shape and dtype"));
        recv(x, g, {.peer = 0});
        expect_equal(x, at::full({3}, 7.));
      },
      kShm);
}

TEST(ShmPeers, AReceiveFromARankThatLeftFails) {
  std::latch left(1);
  run_ranks(
      2,
      [&](const Group& g) {
        const Group pair = split_group(g, {{0, 1}});
        barrier(pair);
        if (g->getRank() == 1) {
          pair->shutdown();
          left.count_down();
          return;
        }
        left.wait();
        at::Tensor x = at::zeros({3});
        EXPECT_THAT(
            testing::error_text<c10::DistBackendError>([&] { recv(x, pair, {.peer = 1}); }),
            HasSubstr("rank 1 is gone (it died or left the group) while rank 0 was in recv f32[3] from rank 1"));
      },
      kShm);
}

TEST(ShmEnds, ARankThatLeavesIsNamed) {
  run_ranks(
      3,
      [](const Group& g) {
        const Group other = split_group(g, {{0, 1, 2}});
        barrier(other);
        if (g->getRank() == 2) return other->shutdown();
        EXPECT_THAT(
            testing::error_text<c10::DistBackendError>([&] { barrier(other); }),
            AnyOf(HasSubstr("[barrier] the group is unusable since: rank 2 has left the group while rank "),
                  AllOf(HasSubstr("[barrier] rank 2 has left the group while rank "),
                        HasSubstr("\n  fix: make the same calls on every rank (join() where ranks have different "
                                  "numbers of batches), or a new group with the ranks that are left"))));
        EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { barrier(other); }),
                    AllOf(HasSubstr("[barrier] the group is unusable since: rank 2 has left the group while rank "),
                          HasSubstr("\n  fix: make a new group with the ranks that are left")));
      },
      kShm);
}

TEST(ShmEnds, AbortWakesTheOthersAndIsNamed) {
  run_ranks(
      2,
      [](const Group& g) {
        const Group other = split_group(g, {{0, 1}});
        barrier(other);
        if (g->getRank() == 1) return other->abort();
        EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { barrier(other); }),
                    HasSubstr("[barrier] the group is unusable since: rank 1 called abort()\n"
                              "  fix: make a new group; the failure above came first"));
      },
      kShm);
}

TEST(ShmEnds, AMismatchIsRaisedOnEveryRankAndNamesBothCalls) {
  run_ranks(
      2,
      [](const Group& g) {
        const Group other = split_group(g, {{0, 1}});
        const at::Tensor x = at::ones({g->getRank() == 0 ? 3 : 5});
        EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { all_reduce_(x, other); }),
                    HasSubstr("rank 0 #1 all_reduce f32[3] sum, rank 1 #1 all_reduce f32[5] sum"));
        EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { barrier(other); }),
                    HasSubstr("the group is unusable since: "));
      },
      kShm);
}

TEST(ShmEnds, SparseEntriesBesideTheTensorAreRefused) {
  run_ranks(
      2,
      [](const Group& g) {
        const Group other = split_group(g, {{0, 1}});
        std::vector<at::Tensor> tensors{at::eye(g->getRank() == 0 ? 3 : 5).to_sparse()};
        const auto call = [&] { other->getBackend(at::kCPU)->allreduce_sparse(tensors)->wait(); };
        if (g->getRank() == 1) return call();  // all of rank 0's entries fit into it
        EXPECT_EQ(testing::error_text<c10::DistBackendError>(call),
                  "[all_reduce] entries of another rank do not fit into the sparse f32[3,3]: size is inconsistent with "
                  "indices: for dim 0, size is 3 but found index 4\n"
                  "  fix: pass sparse tensors of the same size on every rank\n"
                  "  at:  rank 0/2");
      },
      kShm);
}

TEST(ShmEnds, ATimeoutSaysWhoIsMissing) {
  std::latch raised(2);
  run_ranks(
      3,
      [&](const Group& g) {
        const Group other =
            new_group("shm", {.timeout = 60s, .store = g->getStore(), .rank = g->getRank(), .world_size = 3});
        barrier(other);
        other->setTimeout(1s);
        if (g->getRank() == 1) return raised.wait();
        const at::Tensor x = at::ones({4});
        EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { all_reduce_(x, other); }),
                    HasSubstr("rank 1 is at #1 barrier, the others at #2"));
        raised.count_down();
      },
      kShm);
}

TEST(ShmEnds, ANanInASparseTensorRaises) {
  run_ranks(
      2,
      [](const Group& g) {
        const Group other = split_group(g, {{0, 1}});
        watch::set_nan_check(other, watch::NanCheck::raise);
        at::Tensor x = at::zeros({3});
        if (g->getRank() == 1) x[2] = std::numeric_limits<float>::quiet_NaN();
        std::vector<at::Tensor> sparse{x.to_sparse()};
        EXPECT_THAT(
            testing::error_text<c10::Error>([&] { other->getBackend(at::kCPU)->allreduce_sparse(sparse)->wait(); }),
            HasSubstr("rank 1 sends 1 NaN in f32[3]"));
      },
      kShm);
}

// A tensor without data cannot be searched, as any where memory is short.
TEST(ShmEnds, ASearchForNanThatFailsWakesTheOthers) {
  run_ranks(
      2,
      [](const Group& g) {
        const Group other = split_group(g, {{0, 1}});
        watch::set_nan_check(other, watch::NanCheck::raise);
        if (g->getRank() == 1) {
          detail::OwnBackend* own = detail::as_own(*other->getBackend(at::kCPU));
          const at::Tensor no_data = at::empty({3}, at::kMeta);
          EXPECT_THROW(own->check_sent("all_reduce_", no_data), c10::Error);
        } else {
          EXPECT_THAT(testing::error_text<c10::DistBackendError>([&] { all_reduce_(at::ones({3}), other); }),
                      HasSubstr("rank 1 could not look for NaN in f32[3]"));
        }
      },
      kShm);
}

TEST(ShmEnds, ANanRaisesHereAndWakesTheOthers) {
  run_ranks(
      2,
      [](const Group& g) {
        const Group other = split_group(g, {{0, 1}});
        watch::set_nan_check(other, watch::NanCheck::raise);
        at::Tensor x = at::ones({2, 3});
        if (g->getRank() == 1) x[1][2] = std::nan("");
        const auto call = [&] { all_reduce_(x, other); };
        if (g->getRank() == 1) {
          EXPECT_THAT(testing::error_text<c10::ValueError>(call), HasSubstr("the first at [1,2]"));
        } else {
          EXPECT_EQ(testing::error_text<c10::DistBackendError>(call),
                    "[all_reduce] the group is unusable since: rank 1 sends 1 NaN in f32[2,3], the first at [1,2]\n"
                    "  fix: make a new group; the failure above came first\n"
                    "  at:  rank 0/2");
        }
      },
      kShm);
}

TEST(ShmOptions, UnknownOnesAndBadValuesAreNamed) {
  const auto make = [](BackendOptions options) {
    run_ranks(1, [&](const Group& g) {
      new_group("shm", {.store = g->getStore(), .rank = 0, .world_size = 1, .backend_options = options});
    });
  };
  EXPECT_THAT(testing::error_text<c10::ValueError>([&] { make({{"heep_mb", 1}}); }), HasSubstr("heep_mb"));
  EXPECT_THAT(testing::error_text<c10::ValueError>([&] {
                make({{"heap_mb", -1}});
              }),
              HasSubstr("[shm] heap_mb is -1\n  fix: pass 0 to 16777216; memory is taken on use"));
  EXPECT_THAT(testing::error_text<c10::ValueError>([&] {
                make({{"heap_mb", std::numeric_limits<int64_t>::max()}});
              }),
              HasSubstr("[shm] heap_mb is 9223372036854775807\n  fix: pass 0 to 16777216; memory is taken on use"));
}

TEST(ShmCard, ComesBackFromItsText) {
  const shm::Greeting greeting{.memory = {7, -1}, .heap_bytes = 1 << 20, .round_bytes = 4096, .host = "a host pid:[1]"};
  EXPECT_EQ(greeting.text(), "7 -1 1048576 4096 a host pid:[1]");
  EXPECT_EQ(shm::parse_greeting("shm", 0, greeting.text()), greeting);
}

TEST(ShmCard, AnyOtherTextIsRefused) {
  EXPECT_EQ(testing::error_text<c10::DistBackendError>([] { shm::parse_greeting("shm", 3, "hello"); }),
            "[shm] rank 3 says \"hello\" where its process and memory should be\n"
            "  fix: find out who else writes to the store of this job");
  for (const char* text :
       {"", "7 3 0 4096", "7 3 0 4096 ", "0 3 0 4096 h", "7 -2 0 4096 h", "7 3 -1 4096 h", "7 3 0 0 h",
        "7 3 9223372036854775807 4096 h", "7 3 0 9223372036854775807 h", "7  3 0 4096 h", "99999999999 3 0 4096 h"}) {
    EXPECT_THROW(shm::parse_greeting("shm", 0, text), c10::DistBackendError) << text;
  }
}

}  // namespace
}  // namespace serried
