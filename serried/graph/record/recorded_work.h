// Stands in for the Work of a collective while recording, so that waiting becomes a node.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <memory>

#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// The recorder may be gone when somebody waits.
struct Recorder::Link {
  std::function<void(ValueId)> wait;
};

/// Ops that a backend runs while somebody waits are its own: a replay waits too.
class Recorder::RecordedWork final : public c10d::Work {
 public:
  RecordedWork(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<Link> link, ValueId id)
      : inner_(std::move(inner)), link_(std::move(link)), id_(id) {}

  /// There as long as this is. No weak pointer to this: it would keep `inner`, with its tensors.
  std::weak_ptr<const void> life() const { return life_; }

  bool wait(std::chrono::milliseconds timeout) override {
    const tape::Pause pause;
    const bool done = inner_->wait(timeout);
    note();
    return done;
  }
  /// Who was told so goes on as after a wait.
  bool isCompleted() override {
    const tape::Pause pause;
    const bool done = inner_->isCompleted();
    if (done) note();
    return done;
  }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override {
    const tape::Pause pause;
    return inner_->result();
  }
  void synchronize() override { wait(kNoTimeout); }
  void abort() override { inner_->abort(); }

  /// Callbacks of a pending future would run on another thread, unseen; those of a completed one run where they are
  /// added.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    const tape::Pause pause;
    auto future = inner_->getFuture();
    future->wait();
    return future;
  }

 private:
  void note() {
    if (!std::exchange(is_noted_, true) && link_->wait) link_->wait(id_);
  }

  c10::intrusive_ptr<c10d::Work> inner_;
  std::shared_ptr<Link> link_;
  ValueId id_;
  bool is_noted_ = false;
  std::shared_ptr<const void> life_ = std::make_shared<char>();
};

}  // namespace serried::graph
