// A rank whose only peer is the test, which writes to the memory they share whatever it likes.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include <ATen/ATen.h>

#include "serried/comm/backends/shm/engine.h"
#include "serried/comm/backends/shm/mailbox.h"
#include "serried/comm/backends/shm/ops.h"
#include "tests/support/errors.h"

namespace serried::testing {

inline constexpr uint64_t kHeap = uint64_t(1) << 62;  // marks locations in a heap
inline constexpr int64_t kHeapBytes = 1 << 20;

/// Rank 0 of two; the test is rank 1.
class Victim {
 public:
  Victim() : Victim(shm::SegmentShape{.world_size = 2, .heap_bytes = kHeapBytes}) {}

  shm::Engine& engine() { return *engine_; }
  shm::Segment& shared() { return shared_; }

  /// What rank 0's transfer says, once rank 1 has left the streams as they are; "no error" where it completes.
  std::string say(const std::shared_ptr<shm::Transfer>& transfer, std::chrono::milliseconds patience) {
    const auto mailbox = std::make_shared<shm::Mailbox>(engine_);
    mailbox->post(transfer);
    const std::string said = error_text<c10::DistBackendError>([&] { mailbox->wait(*transfer, patience); });
    mailbox->close();
    return said;
  }

  /// What rank 0 says to `op` if rank 1 makes it this offer; "no error" where it completes.
  std::string say(shm::Op op, const shm::Offer& offer, const shm::Piece& entry = {}) {
    op.timeout = std::chrono::seconds(5);
    return error_text<c10::DistBackendError>([&] {
      engine_->arrive(op);
      shm::Offer& mine = shared_.line(1).offers[op.parity];
      mine = offer;
      mine.fingerprint = shared_.line(0).offers[op.parity].fingerprint;
      shared_.table(1, op.parity)[0] = entry;
      shared_.line(1).phase = 1 << 20;  // so far ahead that every wait is content
      engine_->complete(op);
    });
  }

 private:
  explicit Victim(const shm::SegmentShape& shape) : Victim(shape, shm::Segment::create(shape)) {}

  Victim(const shm::SegmentShape& shape, shm::Segment segment)
      : shared_(shm::Segment::attach(shape, segment.place())),
        engine_(std::make_shared<shm::Engine>(std::move(segment), 0, shm::WaitPolicy::for_ranks(2), false)) {
    shared_.info(1).page.pid = ::getpid();
    shared_.line(1).phase = 1;
    engine_->meet(std::chrono::seconds(5), "");
  }

  shm::Segment shared_;
  std::shared_ptr<shm::Engine> engine_;
};

/// Collectives of the victim, of more bytes than a slot holds.
struct VictimTensors {
  at::Tensor input = at::ones({50'000});
  at::Tensor output = at::zeros({50'000});
  at::Tensor pieces = at::zeros({2, 50'000});
  shm::Place place{.rank = 0, .world_size = 2};
  int64_t bytes = 200'000;

  shm::Op all_reduce() const { return shm::all_reduce_op(input, output, c10d::ReduceOp::SUM); }
  shm::Op all_gather() const { return shm::all_gather_flat_op(pieces, input); }
  shm::Op reduce_scatter() const { return shm::reduce_scatter_flat_op(output, pieces, c10d::ReduceOp::SUM, place); }
};

}  // namespace serried::testing
