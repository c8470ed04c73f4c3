// The smallest recorder there can be: repeats the ops of one step on the same tensors.
#pragma once

#include <vector>

#include "serried/tensor/dispatch/local_ops.h"

namespace serried::testing {

class Tape final : public LocalOpTap {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const auto arguments = torch::jit::last(stack, op.schema().arguments().size());
    ops_.push_back({op, torch::jit::Stack(arguments.begin(), arguments.end())});
    run_untapped(op, stack);
  }
  void meet(c10::TensorImpl*) override {}
  void rely_on(Witness witness) override { witnesses_.push_back(std::move(witness)); }
  void rely_on_life(const std::string&, std::weak_ptr<const void>) override {}
  void before_replay(std::function<void()> action) override { before_.push_back(std::move(action)); }
  void after_replay(std::function<void()> action) override { after_.push_back(std::move(action)); }

  /// Records `fn`, after which the witnesses have the values that have to stay.
  template <class Fn>
  void record(const Fn& fn) {
    {
      const TapGuard guard(*this);
      fn();
    }
    for (const Witness& witness : witnesses_) values_.push_back(witness.value());
  }

  void replay() { replay_first(ops_.size()); }
  /// Fails after `num_ops` ops if there are more.
  void replay_first(size_t num_ops) {
    for (const auto& action : before_) action();
    for (size_t i = 0; i < num_ops; ++i) {
      torch::jit::Stack stack = ops_[i].arguments;
      run_untapped(ops_[i].op, stack);
    }
    if (num_ops < ops_.size()) return;
    for (const auto& action : after_) action();
  }

  /// Names of the witnesses whose value is another now.
  std::vector<std::string> changed() const {
    std::vector<std::string> names;
    for (size_t i = 0; i < witnesses_.size(); ++i) {
      if (witnesses_[i].value() != values_[i]) names.push_back(witnesses_[i].name);
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
  std::vector<Witness> witnesses_;
  std::vector<uint64_t> values_;
  std::vector<std::function<void()>> before_, after_;
};

}  // namespace serried::testing
