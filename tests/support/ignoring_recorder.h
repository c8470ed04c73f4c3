// A recorder that runs what it sees and ignores what it is told: tests override what they look at.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serried/tape/recorder.h"

namespace serried::testing {

class IgnoringRecorder : public tape::Recorder {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override { tape::run_unrecorded(op, stack); }
  void rely_on(tape::Fact) override {}
  void rely_on_life(const std::string&, std::weak_ptr<const void>) override {}
  void before_replay(std::function<void()>) override {}
  void after_replay(std::function<void()>) override {}
  void meet(c10::TensorImpl*) override {}
};

}  // namespace serried::testing
