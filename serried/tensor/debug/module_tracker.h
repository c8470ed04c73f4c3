// Whose parameters a collective is for: the module of the op that runs, or of the forward whose backward runs.
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch::nn {
class Module;
}

namespace serried::detail {

/// Follows the ops of its thread that take parameters of one net. Modules are numbered depth first, the net is 0.
///
/// C++ modules have no hooks, but their ops have parameters: such an op, with all that it calls, belongs to the module
/// that owns them. Autograd numbers the nodes that a thread makes, so the backward of an op is an interval of numbers.
class ModuleTracker {
 public:
  static constexpr int kNone = -1;

  explicit ModuleTracker(const torch::nn::Module& net);

  const std::vector<std::string>& paths() const { return paths_; }
  const std::string& type() const { return type_; }

  /// An op begins. True: it has parameters of the net, and end() has to follow.
  bool begin(c10::ArrayRef<const c10::IValue> inputs);
  /// What follows is for these parameters, whichever op runs; unknown ones do not count.
  void begin_for(c10::ArrayRef<const c10::TensorImpl*> parameters);
  void end();

  struct Found {
    int module = kNone;
    bool is_after = false;  // no op of the module's own: one between it and the next
  };
  Found current() const;

 private:
  struct Open {
    int module;
    uint64_t first_node;
    const torch::autograd::Node* inside;  // the node whose backward it is called in; null: forward
    bool is_op;
  };
  struct Interval {
    uint64_t begin;
    uint64_t end;
    int module;
  };

  void add(const torch::nn::Module& module, const std::string& path);
  void add_tensor(const at::Tensor& t, int module);
  void meet(const c10::IValue& value, int& module) const;
  int of_tensor(const at::Tensor& t) const;
  int of_parameter(const c10::TensorImpl* parameter) const;
  int common(int a, int b) const;
  Found of_node(const torch::autograd::Node& node) const;
  void remember(const Open& open);

  std::vector<std::string> paths_;
  std::string type_;
  std::map<std::string, int> numbers_;
  std::unordered_map<const c10::TensorImpl*, int> owners_;
  std::vector<Open> open_;
  std::vector<Interval> closed_;  // apart from each other, in order
  int last_ = kNone;              // whose op ended last in forward; none since a backward
};

}  // namespace serried::detail
