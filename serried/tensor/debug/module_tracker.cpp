// Whose parameters a collective is for: the module of the op that runs, or of the forward whose backward runs.
#include "serried/tensor/debug/module_tracker.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "serried/tensor/meta.h"

namespace serried::detail {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// A mode that lives for a whole training run must not remember every step of it.
constexpr size_t kMaxOps = 1 << 16;

// Where the path that both are in ends.
std::string common_path(const std::string& a, const std::string& b) {
  const auto ends_name = [](const std::string& path, size_t at) { return at == path.size() || path[at] == '.'; };
  size_t same = 0;
  const size_t shorter = std::min(a.size(), b.size());
  for (size_t i = 0; i <= shorter; ++i) {
    if (ends_name(a, i) && ends_name(b, i)) same = i;
    if (i == shorter || a[i] != b[i]) break;
  }
  return a.substr(0, same);
}

}  // namespace

ModuleTracker::ModuleTracker(const torch::nn::Module& net) : type_(net.name()) {
  add(net, "");
}

void ModuleTracker::add(const torch::nn::Module& module, const std::string& path) {
  const int number = int(paths_.size());
  paths_.push_back(path);
  numbers_.emplace(path, number);
  for (const at::Tensor& t : module.parameters(/*recurse=*/false)) add_tensor(t, number);
  for (const at::Tensor& t : module.buffers(/*recurse=*/false)) add_tensor(t, number);
  for (const auto& child : module.named_children()) {
    add(*child.value(), path.empty() ? child.key() : path + "." + child.key());
  }
}

// Data parallel training knows a DTensor by its part.
void ModuleTracker::add_tensor(const at::Tensor& t, int module) {
  if (!t.defined()) return;
  owners_.emplace(t.unsafeGetTensorImpl(), module);
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta != nullptr) owners_.emplace(meta->local.unsafeGetTensorImpl(), module);
}

int ModuleTracker::of_parameter(const c10::TensorImpl* parameter) const {
  const auto found = owners_.find(parameter);
  return found != owners_.end() ? found->second : kNone;
}

int ModuleTracker::of_tensor(const at::Tensor& t) const {
  if (!t.defined()) return kNone;
  const int owner = of_parameter(t.unsafeGetTensorImpl());
  if (owner != kNone || !t.is_view()) return owner;
  return of_parameter(t._base().unsafeGetTensorImpl());
}

int ModuleTracker::common(int a, int b) const {
  if (a == kNone || b == kNone) return std::max(a, b);
  return a == b ? a : numbers_.at(common_path(paths_[size_t(a)], paths_[size_t(b)]));
}

void ModuleTracker::meet(const c10::IValue& value, int& module) const {
  if (value.isTensor()) module = common(module, of_tensor(value.toTensor()));
  if (!value.isList()) return;
  for (const c10::IValue& item : value.toListRef()) {
    if (!item.isTensor()) return;
    module = common(module, of_tensor(item.toTensor()));
  }
}

bool ModuleTracker::begin(c10::ArrayRef<const c10::IValue> inputs) {
  const auto node = torch::autograd::get_current_node();
  if (node) last_ = kNone;
  // An op inside of one that is known already.
  if (!open_.empty() && open_.back().inside == node.get()) return false;
  int module = kNone;
  for (const c10::IValue& value : inputs) meet(value, module);
  if (module == kNone) return false;
  open_.push_back({module, at::sequence_number::peek(), node.get(), /*is_op=*/true});
  return true;
}

void ModuleTracker::begin_for(c10::ArrayRef<const c10::TensorImpl*> parameters) {
  int module = kNone;
  for (const c10::TensorImpl* parameter : parameters) module = common(module, of_parameter(parameter));
  open_.push_back({module, 0, torch::autograd::get_current_node().get(), /*is_op=*/false});
}

void ModuleTracker::end() {
  if (open_.empty()) return;
  if (open_.back().is_op) remember(open_.back());
  open_.pop_back();
}

void ModuleTracker::remember(const Open& open) {
  if (open.inside == nullptr) last_ = open.module;
  const uint64_t end = at::sequence_number::peek();
  if (end == open.first_node) return;  // no nodes were made
  if (closed_.size() >= kMaxOps) closed_.erase(closed_.begin(), closed_.begin() + kMaxOps / 2);
  closed_.push_back({open.first_node, end, open.module});
}

ModuleTracker::Found ModuleTracker::of_node(const Node& node) const {
  if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(&node)) {
    return {of_parameter(leaf->variable.unsafeGetTensorImpl())};
  }
  const auto next = std::upper_bound(closed_.begin(), closed_.end(), node.sequence_nr(),
                                     [](uint64_t number, const Interval& each) { return number < each.begin; });
  if (next == closed_.begin()) return {};
  const Interval& before = *std::prev(next);
  return {before.module, node.sequence_nr() >= before.end};
}

ModuleTracker::Found ModuleTracker::current() const {
  const auto node = torch::autograd::get_current_node();
  if (!open_.empty() && open_.back().inside == node.get()) return {open_.back().module};
  if (node) return of_node(*node);
  if (torch::autograd::get_current_graph_task_id() >= 0) return {};
  return {last_, last_ != kNone};
}

}  // namespace serried::detail
