// One autograd node whose backward is a closure.
#include "serried/tensor/making/gradient.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "serried/base/error.h"
#include "serried/tensor/gather_on_use.h"

namespace serried::detail {
namespace {

using torch::autograd::variable_list;

class ClosureNode final : public torch::autograd::Node {
 public:
  ClosureNode(const char* name, Backward backward) : name_(name), backward_(std::move(backward)) {}
  std::string name() const override { return name_; }

 private:
  variable_list apply(variable_list&& grads) override {
    if (!grads[0].defined()) return {at::Tensor()};
    return {backward_(grads[0])};
  }

  const char* name_;
  Backward backward_;
};

// Of a parameter that is gathered on use its own also under another name, which data() gives: the gathered value is
// valid while that stays.
c10::VariableVersion version_of(const at::Tensor& local, const at::Tensor& whole) {
  const GatherOnUse* gather = gather_of(whole);
  const at::Tensor parameter = gather != nullptr ? gather->parameter() : at::Tensor();
  if (parameter.defined()) return parameter.unsafeGetTensorImpl()->version_counter();
  return whole.is_inference() ? local.unsafeGetTensorImpl()->version_counter()
                              : whole.unsafeGetTensorImpl()->version_counter();
}

bool is_gathered_parameter(const at::Tensor& t) {
  const GatherOnUse* gather = gather_of(t);
  return gather != nullptr && gather->is_parameter();
}

// Ranks compute different gradients, of which this way knows one: the average would be lost.
at::Tensor refuse_gradient(const at::Tensor&) {
  raise<c10::NotImplementedError>(
      {"backward", "goes through to_local(), redistribute() or full_tensor() of a fully sharded parameter",
       "compute with the parameter itself, which is gathered on use; to read it: DTensor(parameter.detach())"});
}

}  // namespace

bool wants_gradient(const at::Tensor& input) {
  return at::GradMode::is_enabled() && input.requires_grad();
}

void record_gradient(const char* name, const at::Tensor& input, const at::Tensor& output, Backward backward,
                     std::optional<uint64_t> order) {
  if (is_gathered_parameter(input)) backward = refuse_gradient;
  auto node = c10::make_intrusive<ClosureNode>(name, std::move(backward));
  if (order.has_value()) node->set_sequence_nr(*order);
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(output, c10::intrusive_ptr<torch::autograd::Node>(node));
}

uint64_t place_in_order() {
  return at::sequence_number::get_and_increment();
}

at::Tensor alias_of_local(const at::Tensor& local, const at::Tensor& whole) {
  const c10::intrusive_ptr<c10::TensorImpl> copy =
      local.unsafeGetTensorImpl()->shallow_copy_and_detach(version_of(local, whole), true);
  at::Tensor alias(copy);
  if (!wants_gradient(whole)) return alias;
  const at::Tensor base = whole.is_view() ? at::Tensor(whole._base()) : whole;
  return torch::autograd::make_variable_differentiable_view(alias, torch::autograd::ViewInfo(base, nullptr, nullptr),
                                                            std::nullopt, /*shared_view_info=*/true,
                                                            torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
}

}  // namespace serried::detail
