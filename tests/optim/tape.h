// The smallest recorder there can be: repeats the ops of one step on the same tensors.
#pragma once

#include <vector>

#include "tests/support/ignoring_recorder.h"

namespace serried::testing {

class Tape final : public IgnoringRecorder {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
    ops_.push_back({op, torch::jit::Stack(arguments.begin(), arguments.end())});
    tape::run_unrecorded(op, stack);
  }
  void rely_on(tape::Fact fact) override { facts_.push_back(std::move(fact)); }
  void before_replay(std::function<void()> action) override { before_.push_back(std::move(action)); }
  void after_replay(std::function<void()> action) override { after_.push_back(std::move(action)); }

  /// Records `fn`, after which the facts have the values that have to stay.
  template <class Fn>
  void record(const Fn& fn) {
    {
      const tape::Scope scope(*this);
      fn();
    }
    for (const tape::Fact& fact : facts_) values_.push_back(fact.value());
  }

  void replay() { replay_first(ops_.size()); }
  /// Fails after `num_ops` ops if there are more.
  void replay_first(size_t num_ops) {
    for (const auto& action : before_) action();
    for (size_t i = 0; i < num_ops; ++i) {
      torch::jit::Stack stack = ops_[i].arguments;
      tape::run_unrecorded(ops_[i].op, stack);
    }
    if (num_ops < ops_.size()) return;
    for (const auto& action : after_) action();
  }

  /// Names of the facts whose value is another now.
  std::vector<std::string> changed() const {
    std::vector<std::string> names;
    for (size_t i = 0; i < facts_.size(); ++i) {
      if (facts_[i].value() != values_[i]) names.push_back(facts_[i].name);
    }
    return names;
  }
  std::vector<std::string> op_names() const {
    std::vector<std::string> names;
    for (const Op& op : ops_) names.push_back(c10::toString(op.op.operator_name()));
    return names;
  }

 private:
  struct Op {
    c10::OperatorHandle op;
    torch::jit::Stack arguments;
  };
  std::vector<Op> ops_;
  std::vector<tape::Fact> facts_;
  std::vector<uint64_t> values_;
  std::vector<std::function<void()>> before_, after_;
};

}  // namespace serried::testing
