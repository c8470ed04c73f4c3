// Attention of DTensors whose queries, keys and values are cut along the sequence by one mesh axis alike. Along other
// axes the call goes by its rule.
#include <ATen/ATen.h>

#include <algorithm>

#include "serried/spmd/plan.h"
#include "serried/spmd/registry.h"
#include "serried/tensor/attention/sequence_attention.h"
#include "serried/tensor/attention/sequence_scope.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/dispatch/arguments.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

using detail::AttentionResult;
using detail::kLengthDim;
using detail::LocalOnly;
using detail::OpCall;
using detail::SequenceAttention;
using detail::SequenceCut;
using torch::jit::Stack;

// The axis that cuts the sequence; none where there is not just one, or tensors differ on it.
std::optional<int64_t> sequence_axis(const OpCall& call) {
  std::optional<int64_t> found;
  const DTensorMeta* query = dtensor_meta(call.tensor_value("query"));
  if (query == nullptr) return std::nullopt;
  const DeviceMesh& mesh = query->spec->mesh;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
    if (mesh.size(axis) == 1) continue;
    const Placement& placement = query->spec->placements[size_t(axis)];
    bool is_cut = false, is_alike = true;
    for (const char* name : {"query", "key", "value"}) {
      const DTensorMeta* meta = dtensor_meta(call.tensor_value(name));
      if (meta == nullptr) return std::nullopt;
      is_cut = is_cut || meta->spec->placements[size_t(axis)].is_shard(kLengthDim);
      is_alike = is_alike && meta->spec->placements[size_t(axis)] == placement;
    }
    if (!is_cut) continue;
    const bool in_known_order = placement.is_balanced() || !placement.is_strided();
    if (found.has_value() || !is_alike || !in_known_order) return std::nullopt;
    found = axis;
  }
  return found;
}

bool mask_fits(const at::Tensor& mask, const at::Tensor& query, const at::Tensor& key) {
  if (mask.dim() != 2 && mask.dim() != 4) return false;
  const bool rows_fit = mask.size(-2) == 1 || mask.size(-2) == query.size(kLengthDim);
  return rows_fit && (mask.size(-1) == 1 || mask.size(-1) == key.size(kLengthDim));
}

// What the kernel takes, and what ranges of it can stand for. All else goes by the rule, or is refused by the op.
bool is_supported(const OpCall& call) {
  const at::Tensor query = call.tensor_value("query"), key = call.tensor_value("key"),
                   value = call.tensor_value("value");
  if (query.dim() != 4 || key.dim() != 4 || value.sizes() != key.sizes() || !query.is_floating_point()) return false;
  if (query.size(0) != key.size(0) || query.size(3) != key.size(3) || query.numel() == 0 || key.numel() == 0) {
    return false;
  }
  if (query.size(1) % key.size(1) != 0 || call.number("dropout_p") != 0) return false;
  const at::Tensor mask = call.tensor_value("attn_mask");
  if (mask.defined() && !mask_fits(mask, query, key)) return false;
  return !call.flag("is_causal") || (!mask.defined() && query.size(kLengthDim) == key.size(kLengthDim));
}

Placements without_axis(Placements placements, int64_t axis) {
  placements.erase(placements.begin() + axis);
  return placements;
}

class CutAttentionCall {
 public:
  static std::optional<CutAttentionCall> of(const c10::OperatorHandle& op, const Stack& stack) {
    const OpCall given(op, stack);
    const std::optional<int64_t> axis = sequence_axis(given);
    if (!axis.has_value() || !is_supported(given)) return std::nullopt;
    CutAttentionCall call(op, stack, *axis);
    if (!call.plan_other_axes(stack) || call.is_forbidden()) return std::nullopt;
    return call;
  }

  /// This rank's part of an argument, brought where the call needs it; undefined where it is absent. All ranks call it.
  at::Tensor local(const std::string& name) const {
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (name_of(i) != name) continue;
      if (current_[i] == targets_[i]) return detail::local_of(slots_[i]).contiguous();
      const SpecPtr from = detail::spec_of(slots_[i], leader_->mesh);
      comm_debug::note_redistribution(schema_->name(), *from, targets_[i], /*implicit=*/true);
      return redistribute_local(detail::local_of(slots_[i]), *from, targets_[i]).contiguous();
    }
    return {};
  }

  /// As ranks go about it, with the parts that they have of queries and keys.
  SequenceAttention attention(const OpCall& call, const at::Tensor& query, const at::Tensor& key) const {
    const int64_t ranks = leader_->mesh.size(axis_);
    const Placement& cut = leader_->placements[size_t(axis_)];
    SequenceAttention attention{
        .group = leader_->mesh.get_group(axis_),
        .queries = SequenceCut(call.tensor_value("query").size(kLengthDim), cut, ranks),
        .keys = SequenceCut(call.tensor_value("key").size(kLengthDim), cut, ranks),
        .causal = call.flag("is_causal"),
        .scale = call.optional<double>("scale"),
        .mask = local("attn_mask"),
    };
    const detail::SequenceScopePtr& scope = detail::sequence_scope();
    detail::rely_on_sequence_scope();
    attention.way = chosen_way(scope != nullptr ? scope->way : AttentionWay::automatic,
                               detail::attention_sizes(query, key, attention.mask.defined()), attention,
                               spmd::cost_models(leader_->mesh)[size_t(axis_)]);
    return attention;
  }

  /// Result `index`, a tensor of global `sizes`.
  at::Tensor wrap(size_t index, const at::Tensor& local, c10::IntArrayRef sizes) const {
    const at::Tensor dense = local.contiguous();
    return serried::wrap(dense, spec_of_result(dense, leader_->mesh, results_[index], sizes));
  }

 private:
  CutAttentionCall(const c10::OperatorHandle& op, const Stack& stack, int64_t axis) : axis_(axis) {
    const detail::OpInfo& info = detail::op_info(op);
    detail::Arguments arguments;
    collect(info, stack, arguments);
    schema_ = info.schema;
    info_ = &info;
    slots_.assign(arguments.tensors.begin(), arguments.tensors.end());
    current_ = current_placements(arguments);
    leader_ = dtensor_meta(OpCall(op, stack).tensor_value("query"))->spec;
  }

  const std::string& name_of(size_t slot) const { return schema_->arguments()[size_t(slots_[slot].argument)].name(); }

  // Of a mask the rows are those of the queries; one row serves them all.
  Placement on_axis(size_t slot, const OpCall& call) const {
    const Placement& cut = leader_->placements[size_t(axis_)];
    if (name_of(slot) != "attn_mask") return cut;
    const at::Tensor mask = call.tensor_value("attn_mask");
    return mask.size(-2) == 1 ? Replicate() : cut.along(mask.dim() - 2);
  }

  // Grouped heads, of which some ranks would have queries and no keys.
  bool leaves_ranks_without_keys(const OpCall& call) const {
    const int64_t heads = call.tensor_value("key").size(kHeadsDim);
    if (heads == call.tensor_value("query").size(kHeadsDim)) return false;
    int64_t parts = 1;
    for (size_t i = 0; i < slots_.size(); ++i) {
      if (name_of(i) != "key") continue;
      for (size_t a = 0; a < targets_[i].size(); ++a) {
        if (targets_[i][a].is_shard() && targets_[i][a].dim() == kHeadsDim) parts *= leader_->mesh.size(int64_t(a));
      }
    }
    return (heads + parts - 1) / parts * (parts - 1) >= heads && parts > 1;
  }

  // The rule knows nothing of the sequence's axis then, and must leave the sequence to it.
  bool plan_other_axes(const Stack& stack) {
    detail::Arguments arguments;
    collect(*info_, stack, arguments);
    const OpCall call = describe(*info_, arguments, torch::jit::last(stack, size_t(info_->num_arguments)));
    const std::optional<spmd::Rule> rule = spmd::find_rule(call);
    if (!rule.has_value()) return false;
    Sizes shape = leader_->mesh.shape();
    shape.erase(shape.begin() + axis_);
    std::vector<spmd::CostModel> costs = spmd::cost_models(leader_->mesh);
    costs.erase(costs.begin() + axis_);
    spmd::PlanRequest request{{}, shape, {}, costs};
    for (const Placements& placements : current_) request.current.push_back(without_axis(placements, axis_));
    spmd::Bound bound = spmd::bind(*rule, call);
    for (spmd::Factor& factor : bound.factors) factor.can_cut = factor.can_cut && factor.letter != 'l';
    const spmd::Plan plan = spmd::make_plan(bound, call, request);
    for (size_t i = 0; i < slots_.size(); ++i) {
      targets_.push_back(plan.inputs[i]);
      targets_.back().insert(targets_.back().begin() + axis_, on_axis(i, call));
    }
    for (const spmd::OutputPlan& output : plan.outputs) {
      results_.push_back(output.placements);
      results_.back().insert(results_.back().begin() + axis_, leader_->placements[size_t(axis_)]);
    }
    return !leaves_ranks_without_keys(call);
  }

  // The rule's error says what would move.
  bool is_forbidden() const {
    return ExplicitRedistribution::current().mode == HiddenCommunication::forbid && current_ != targets_;
  }

  int64_t axis_;
  SpecPtr leader_;  // of the queries
  const c10::FunctionSchema* schema_ = nullptr;
  const detail::OpInfo* info_ = nullptr;
  std::vector<detail::TensorSlot> slots_;
  std::vector<Placements> current_, targets_;  // per slot
  std::vector<Placements> results_;
};

bool run_attention(const c10::OperatorHandle& op, Stack& stack) {
  const std::optional<CutAttentionCall> cut = CutAttentionCall::of(op, stack);
  if (!cut.has_value()) return false;
  const OpCall call(op, stack);
  const at::Tensor whole = call.tensor_value("query");
  at::Tensor out, lse;
  {
    const LocalOnly guard;
    const at::Tensor query = cut->local("query"), key = cut->local("key"), value = cut->local("value");
    const AttentionResult result = attend(cut->attention(call, query, key), query, key, value);
    out = cut->wrap(0, result.out, whole.sizes());
    lse = cut->wrap(1, result.lse, whole.sizes().slice(0, 3));
  }
  return detail::finish(op, stack, {out, lse});
}

bool run_attention_backward(const c10::OperatorHandle& op, Stack& stack) {
  const std::optional<CutAttentionCall> cut = CutAttentionCall::of(op, stack);
  if (!cut.has_value()) return false;
  const OpCall call(op, stack);
  at::Tensor of_query, of_key, of_value;
  {
    const LocalOnly guard;
    const at::Tensor query = cut->local("query"), key = cut->local("key"), value = cut->local("value");
    const at::Tensor grad_out = cut->local("grad_out");
    const AttentionResult forward{cut->local("out"), cut->local("logsumexp")};
    const detail::AttentionGradients gradients =
        attend_backward(cut->attention(call, query, key), grad_out, query, key, value, forward);
    of_query = cut->wrap(0, gradients.query, call.tensor_value("query").sizes());
    of_key = cut->wrap(1, gradients.key, call.tensor_value("key").sizes());
    of_value = cut->wrap(2, gradients.value, call.tensor_value("value").sizes());
  }
  return detail::finish(op, stack, {of_query, of_key, of_value});
}

}  // namespace

std::vector<HandlerEntry> attention_handlers() {
  return {
      {"aten::_scaled_dot_product_flash_attention_for_cpu", run_attention},
      {"aten::_scaled_dot_product_flash_attention_for_cpu_backward", run_attention_backward},
  };
}

}  // namespace serried
