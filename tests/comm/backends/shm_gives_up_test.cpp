// A rank that gives up takes its tensors back: a peer that is a thread of the same process must not be in them.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>

#include <ATen/ATen.h>

#include "serried/comm/backends/shm/engine.h"
#include "serried/comm/backends/shm/ops.h"
#include "tests/support/errors.h"

namespace serried::shm {
namespace {

using namespace std::chrono_literals;
using serried::testing::error_text;

constexpr int64_t kSize = 50'000;  // elements of a piece: more than a slot holds
constexpr int64_t kMappedBytes = 1 << 20;

/// Memory whose use after `take_back` ends the process.
class Lent {
 public:
  Lent() : memory_(::mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    EXPECT_NE(memory_, MAP_FAILED);
  }
  ~Lent() { ::munmap(memory_, kMappedBytes); }
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;

  at::Tensor tensor(at::IntArrayRef sizes) { return at::from_blob(memory_, sizes, at::kFloat); }
  void take_back() { EXPECT_EQ(::mprotect(memory_, kMappedBytes, PROT_NONE), 0); }

 private:
  void* memory_;
};

/// Two ranks of one process, each for the thread of its own that the test gives it, or both for one.
class TwoThreads {
 public:
  TwoThreads() {
    const SegmentShape shape{.world_size = 2};
    Segment first = Segment::create(shape);
    Segment second = Segment::attach(shape, first.place());
    ranks_[0] = std::make_unique<Engine>(std::move(first), 0, WaitPolicy::for_ranks(2), true);
    ranks_[1] = std::make_unique<Engine>(std::move(second), 1, WaitPolicy::for_ranks(2), true);
    std::thread other([this] { ranks_[1]->meet(5s, ""); });
    ranks_[0]->meet(5s, "");
    other.join();
  }

  Engine& operator[](int rank) { return *ranks_[rank]; }

 private:
  std::unique_ptr<Engine> ranks_[2];
};

/// A collective of `rank` on tensors of its own: `lent` in its role as what peers reach, and `own`.
using MakeOp = std::function<Op(int rank, const at::Tensor& lent, const at::Tensor& own)>;

Op all_reduce_of(int, const at::Tensor& lent, const at::Tensor&) {
  return all_reduce_op(lent, lent, c10d::ReduceOp::SUM);
}

Op all_gather_of(int, const at::Tensor& lent, const at::Tensor& own) {
  return all_gather_flat_op(own, lent);
}

Op all_to_all_of(int rank, const at::Tensor& lent, const at::Tensor& own) {
  return all_to_all_flat_op(own, lent, {.rank = rank, .world_size = 2});
}

Op reduce_scatter_of(int rank, const at::Tensor& lent, const at::Tensor& own) {
  return reduce_scatter_flat_op(own, lent, c10d::ReduceOp::SUM, {.rank = rank, .world_size = 2});
}

/// Rank 1 has arrived when rank 0 gives up, and goes on only after rank 0 has its memory back.
void expect_a_late_peer_stays_out(const MakeOp& make, at::IntArrayRef lent_sizes, at::IntArrayRef own_sizes) {
  TwoThreads ranks;
  Lent lent;
  const at::Tensor own = at::zeros(own_sizes);
  const at::Tensor peers = at::ones(lent_sizes);
  const at::Tensor peers_own = at::zeros(own_sizes);
  Op op = make(0, lent.tensor(lent_sizes), own);
  Op late = make(1, peers, peers_own);
  op.timeout = late.timeout = 50ms;
  ranks[0].arrive(op);
  ranks[1].arrive(late);
  EXPECT_NE(error_text<c10::DistBackendError>([&] { ranks[0].complete(op); }), "no error");
  lent.take_back();
  EXPECT_NE(error_text<c10::DistBackendError>([&] { ranks[1].complete(late); }), "no error");
}

TEST(ShmGivesUp, ALatePeerStaysOutOfAnAllReduce) {
  expect_a_late_peer_stays_out(all_reduce_of, {kSize}, {1});
}

TEST(ShmGivesUp, ALatePeerStaysOutOfAnAllGather) {
  expect_a_late_peer_stays_out(all_gather_of, {kSize}, {2, kSize});
}

TEST(ShmGivesUp, ALatePeerStaysOutOfAnAllToAll) {
  expect_a_late_peer_stays_out(all_to_all_of, {2, kSize}, {2, kSize});
}

TEST(ShmGivesUp, ALatePeerStaysOutOfAReduceScatter) {
  expect_a_late_peer_stays_out(reduce_scatter_of, {2, kSize}, {kSize});
}

// What the kernel of rank 1 sees of rank 0; a kernel is a function without a state of its own.
PhaseSync* lingering_sync = nullptr;
std::atomic<bool> took_back{false};
std::atomic<bool> took_back_too_early{false};

/// Goes on until rank 0 has given up, and looks whether it has its memory back meanwhile.
void linger(void*, const void* const*, int, int64_t) {
  while (!lingering_sync->aborted()) sched_yield();
  const auto deadline = std::chrono::steady_clock::now() + 200ms;
  while (!took_back && std::chrono::steady_clock::now() < deadline) sched_yield();
  if (took_back) took_back_too_early = true;
}

/// Rank 1 is in rank 0's memory when rank 0 gives up.
void expect_the_visit_ends_first(const MakeOp& make, at::IntArrayRef lent_sizes, at::IntArrayRef own_sizes) {
  TwoThreads ranks;
  lingering_sync = &ranks[1].sync();
  took_back = took_back_too_early = false;
  std::thread visitor([&] {
    const at::Tensor lent = at::ones(lent_sizes);
    const at::Tensor own = at::zeros(own_sizes);
    Op op = make(1, lent, own);
    op.kernel = linger;
    op.timeout = 20s;
    ranks[1].arrive(op);
    EXPECT_NE(error_text<c10::DistBackendError>([&] { ranks[1].complete(op); }), "no error");
  });
  {
    const at::Tensor lent = at::ones(lent_sizes);
    const at::Tensor own = at::zeros(own_sizes);
    Op op = make(0, lent, own);
    op.timeout = 50ms;
    ranks[0].arrive(op);
    while (!ranks[0].all_have_arrived(op)) sched_yield();
    EXPECT_NE(error_text<c10::DistBackendError>([&] { ranks[0].complete(op); }), "no error");
    took_back = true;
  }
  visitor.join();
  EXPECT_FALSE(took_back_too_early);
}

TEST(ShmGivesUp, WaitsForAPeerThatReduces) {
  expect_the_visit_ends_first(all_reduce_of, {kSize}, {1});
}

TEST(ShmGivesUp, WaitsForAPeerThatReducesPieces) {
  expect_the_visit_ends_first(reduce_scatter_of, {2, kSize}, {kSize});
}

}  // namespace
}  // namespace serried::shm
