// Runs a graph: a flat loop over ops, below autograd, without DTensors and hooks.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/graph/graph.h"

namespace serried::graph {

class Program {
 public:
  /// `groups` are those that the graph's collectives name, `generators` those of users that it has numbers of; both are
  /// held weakly.
  Program(const Graph& graph, const std::vector<Group>& groups, std::vector<WeakGenerator> generators = {});

  /// `inputs` in the order of graph.inputs(). Outputs and gradients can be taken afterwards, until `clear`.
  void run(const std::vector<at::Tensor>& inputs);
  at::Tensor value(ValueId id) const { return values_[id].isTensor() ? values_[id].toTensor() : at::Tensor(); }
  /// Drops what the last run has left.
  void clear();

 private:
  void land() noexcept;
  struct Operand {
    Argument::Kind kind;
    bool is_last_use = false;
    ValueId id = kNoValue;
    int group = -1;  // or generator
    c10::IValue constant = {};
    std::vector<ValueId> ids = {};
  };
  struct Step {
    c10::OperatorHandle op;
    bool goes_to_kernel;  // all tensors are dense on the CPU: straight there
    std::vector<Operand> operands;
    std::vector<std::vector<ValueId>> results;  // kNoValue where nobody needs one
    std::vector<ValueId> frees = {};            // members of lists that nobody needs any more
  };

  Operand operand_of(const Graph& graph, const Argument& argument, const std::vector<Group>& groups) const;
  c10::IValue list_of(const Operand& operand) const;
  void mark_last_uses(const Graph& graph);
  void note_changing();
  void bind(const std::vector<at::Tensor>& inputs);
  void execute(Step& step);
  void push(Operand& operand);
  void keep_results(const Step& step);

  std::vector<Step> steps_;
  std::vector<c10::IValue> values_;
  std::vector<bool> is_fixed_;     // persistent, constant, buffer: survives `clear`
  std::vector<ValueId> changing_;  // what a run may leave
  std::vector<ValueId> inputs_;
  std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> groups_;
  std::vector<WeakGenerator> generators_;
  std::vector<c10::IValue> live_groups_;  // while a run lasts
  std::vector<c10::IValue> live_generators_;
  torch::jit::Stack stack_;
};

}  // namespace serried::graph
