// The Work of a call: the steps that MPI takes for it, and how whoever waits is told of the end.
#pragma once

#include "serried/base/fork.h"
#include "serried/comm/agree/group_status.h"
#include "serried/comm/backends/gloo/work.h"
#include "serried/comm/backends/mpi/posted.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>
#include <vector>

namespace serried::mpi {

class Lane;

/// One round of MPI. All that `post` hands to MPI by address stays where it is as long as the step lives.
struct Step {
  std::function<void(MPI_Comm, Posted&)> post;
  std::function<detail::Failure(const Posted&)> check = nullptr;  // once it is done; `what` is empty where all is well
};

/// What a call does, before it is issued.
struct Plan {
  watch::Record record;
  std::vector<Step> steps;
  std::function<void()> after = nullptr;  // once MPI is done, on its thread
  std::vector<at::Tensor> outputs = {};
  std::vector<at::Tensor> kept = {};  // alive until the end
};

/// Made by a call, moved by its lane, told of its end by the driver's thread.
class CallWork final : public c10d::Work {
 public:
  CallWork(Plan plan, const gloo::Call& call, std::shared_ptr<Lane> lane);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(); }
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return call_.record.sequence; }
  int sourceRank() const override { return source_; }

  bool is_peer_call() const { return call_.record.kind == watch::Kind::send || call_.record.kind == watch::Kind::recv; }
  const gloo::Call& call() const { return call_; }

  /// The lane's, under its lock.
  struct Progress {
    size_t step = 0;
    bool is_posted = false;
    bool is_cancelled = false;
    std::chrono::steady_clock::time_point first_seen{};  // as the oldest of its lane
    Posted posted;
  };
  Progress progress;
  const std::vector<Step>& steps() const { return plan_.steps; }

  /// Ends the call; `error` is null where MPI is done with it. Once.
  void end(std::exception_ptr error);

 private:
  bool wait_for(std::chrono::milliseconds slice);
  void raise_late(std::chrono::milliseconds limit, bool to_the_end);

  const HomeProcess home_;
  Plan plan_;
  const gloo::Call call_;
  const std::shared_ptr<Lane> lane_;
  const std::chrono::steady_clock::time_point issued_ = std::chrono::steady_clock::now();
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  int source_ = -1;
};

using CallPtr = c10::intrusive_ptr<CallWork>;

}  // namespace serried::mpi
