// Makes the plan of a call: rule, rows, moves, localised arguments; for foreach ops element by element.
#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/spmd/registry.h"
#include "serried/tensor/dispatch/cached_plan.h"
#include "serried/tensor/dispatch/view_gathers.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"
#include "serried/tensor/spec.h"

namespace serried::detail {
namespace {

using spmd::Call;
using spmd::Plan;

// Per tensor that `op`, a view op or one that changes sizes in place, gives: its strides on the whole tensor. DTensors
// among `values` count with their global sizes and strides, or with dense ones where the argument is in `moved`: what
// was redistributed is contiguous. Raises what the op raises on a plain tensor of those strides.
//
// A part of one row tells nothing about the order of dims in memory, so ranks would disagree on whether a tensor is
// contiguous, and with that on which ops LibTorch calls next.
std::vector<c10::DimVector> strides_of_views(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> values,
                                             c10::ArrayRef<int> moved) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                 c10::DispatchKeySet(kHomeKey));
  torch::jit::Stack stack(values.begin(), values.end());
  for (size_t i = 0; i < stack.size(); ++i) {
    const DTensorMeta* meta = stack[i].isTensor() ? dtensor_meta(stack[i].toTensor()) : nullptr;
    if (meta == nullptr) continue;
    const Spec& spec = *meta->spec;
    const bool is_moved = std::find(moved.begin(), moved.end(), int(i)) != moved.end();
    stack[i] = at::empty_strided(spec.sizes, is_moved ? serried::contiguous_strides(spec.sizes) : spec.strides,
                                 at::TensorOptions(at::kMeta).dtype(spec.dtype));
  }
  op.callBoxed(stack);
  std::vector<c10::DimVector> strides;
  for (const c10::IValue& result : stack) {
    if (result.isTensor()) strides.emplace_back(result.toTensor().strides());
    if (!result.isTensorList()) continue;
    for (const at::Tensor& t : result.toTensorVector()) strides.emplace_back(t.strides());
  }
  return strides;
}

bool returns_tensor(const c10::Argument& result) {
  return result.type()->kind() == c10::TypeKind::TensorType || result.type()->kind() == c10::TypeKind::ListType;
}

// Which inputs the op writes, with the output that is the same tensor.
std::vector<std::pair<int, int>> written_inputs(const OpInfo& info, const Call& call) {
  std::vector<std::pair<int, int>> written;
  if (!info.has_written || info.is_metadata_change) return written;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const int argument = call.tensor(i).argument;
    if (!info.is_written[argument]) continue;
    int output = -1;
    for (int r = 0; r < info.num_returns; ++r) {
      if (info.return_alias[r] == argument) output = r;
    }
    written.emplace_back(int(i), output);
  }
  return written;
}

// In the kernels only ranks that have something to write would find out, and the others wait for them.
void check_written_sizes(const OpInfo& info, const Call& call, const spmd::Bound& bound,
                         const std::vector<std::pair<int, int>>& written) {
  if (info.is_foreach) return;
  for (const auto& [input, output] : written) {
    if (output < 0 || size_t(output) >= bound.outputs.size()) continue;
    const spmd::TensorArg& tensor = call.tensor(size_t(input));
    c10::DimVector sizes;
    for (size_t d = 0; d < bound.outputs[size_t(output)].dims.size(); ++d) {
      const int64_t size = spmd::output_size(bound, size_t(output), d);
      sizes.push_back(size < 0 && d < tensor.sizes.size() ? tensor.sizes[d] : size);
    }
    if (sizes == tensor.sizes) continue;
    raise<c10::ValueError>({info.name,
                            c10::str("\"", info.schema->arguments()[size_t(tensor.argument)].name(), "\" has sizes ",
                                     sizes_text(tensor.sizes), ", but the arguments broadcast to ", sizes_text(sizes)),
                            "use the form that returns a new tensor, or expand the tensor first"});
  }
}

// Element-wise ops that return nothing still have a rule with an output: that of the first list.
Plan plan_by_rule(const OpInfo& info, const Call& call, const spmd::PlanRequest& request, PlanTrace* trace) {
  const auto rule = spmd::find_rule(call);
  if (!rule) return spmd::default_plan(call, request.mesh_shape.size());
  spmd::Bound bound = spmd::bind(*rule, call);
  check_written_sizes(info, call, bound, request.written);
  Plan plan = spmd::make_plan(bound, call, request, trace != nullptr ? &trace->weighed : nullptr);
  size_t needed = 0;
  for (const c10::Argument& result : info.schema->returns()) needed += returns_tensor(result);
  if (plan.outputs.size() < needed && !info.is_foreach) {
    raise<c10::Error>(
        {info.name,
         c10::str("the rule \"", plan.rule, "\" describes ", plan.outputs.size(), " of ", needed, " results"),
         "write one output per result of the schema"});
  }
  if (trace != nullptr) trace->bound = std::move(bound);
  return plan;
}

Plan plan_call(const OpInfo& info, const Call& call, std::vector<Placements> current, const PlanSite& site,
               PlanTrace* trace) {
  spmd::PlanRequest request{std::move(current), site.mesh_shape, written_inputs(info, call), site.costs};
  for (auto& [input, output] : request.written) {
    if (info.is_foreach && info.num_returns == 0) output = 0;
  }
  return plan_by_rule(info, call, request, trace);
}

CachedReturn describe_return(const Plan& plan, int r) {
  CachedReturn result{.shared = true, .elements = {}};
  if (size_t(r) < plan.outputs.size()) {
    result.elements.push_back({.placements = plan.outputs[r].placements, .sizes = plan.outputs[r].sizes});
  }
  return result;
}

// Element i of every list, and all tensors outside lists, as a call of its own.
struct ElementCall {
  std::vector<int> slots;  // its tensors among those of the whole call
  Call call;
  Plan plan;
};

ElementCall element_call(const OpInfo& info, const Call& call, int element) {
  std::vector<spmd::TensorArg> tensors;
  std::vector<int> slots;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const spmd::TensorArg& tensor = call.tensor(i);
    if (tensor.list_index != -1 && tensor.list_index != element) continue;
    tensors.push_back(tensor);
    tensors.back().list_index = -1;
    slots.push_back(int(i));
  }
  return {std::move(slots), Call(*info.schema, call.arguments(), std::move(tensors)), {}};
}

// A tensor outside the lists is one for all elements: it can lie one way only.
bool agree_on_shared(const Call& call, const std::vector<ElementCall>& elements) {
  std::map<int, const Placements*> wanted;
  for (const ElementCall& element : elements) {
    for (size_t k = 0; k < element.slots.size(); ++k) {
      if (call.tensor(size_t(element.slots[k])).list_index >= 0) continue;
      const auto [known, is_new] = wanted.emplace(element.slots[k], &element.plan.inputs[k]);
      if (!is_new && *known->second != element.plan.inputs[k]) return false;
    }
  }
  return true;
}

std::vector<ElementCall> plan_elements(const OpInfo& info, const Call& call, const std::vector<Placements>& current,
                                       const PlanSite& site, PlanTrace* trace) {
  int num_elements = 0;
  for (const spmd::TensorArg& tensor : call.tensors()) num_elements = std::max(num_elements, tensor.list_index + 1);
  std::vector<ElementCall> elements;
  for (int i = 0; i < num_elements; ++i) {
    ElementCall& element = elements.emplace_back(element_call(info, call, i));
    std::vector<Placements> placements;
    for (int slot : element.slots) placements.push_back(current[slot]);
    element.plan = plan_call(info, element.call, std::move(placements), site, i == 0 ? trace : nullptr);
  }
  if (agree_on_shared(call, elements)) return elements;
  if (trace != nullptr) *trace = {};
  for (ElementCall& element : elements) element.plan = spmd::default_plan(element.call, site.mesh_shape.size());
  return elements;
}

void plan_foreach(const OpInfo& info, const Call& call, const std::vector<Placements>& current, const PlanSite& site,
                  CachedPlan& out, PlanTrace* trace) {
  out.plan.inputs.assign(call.tensors().size(), Placements(site.mesh_shape.size()));
  out.plan.rule = "each";
  out.returns.resize(size_t(info.num_returns));
  const std::vector<ElementCall> elements = plan_elements(info, call, current, site, trace);
  for (const auto& [slots, one, plan] : elements) {
    if (plan.is_default()) out.plan.rule.clear();
    for (size_t k = 0; k < slots.size(); ++k) out.plan.inputs[slots[k]] = plan.inputs[k];
    for (int r = 0; r < info.num_returns && size_t(r) < plan.outputs.size(); ++r) {
      out.returns[r].elements.push_back({.placements = plan.outputs[r].placements, .sizes = plan.outputs[r].sizes});
    }
  }
  if (trace == nullptr || elements.empty()) return;
  trace->slots = elements[0].slots;
  trace->plan = elements[0].plan;
}

bool communicates(const std::vector<spmd::Step>& steps) {
  return std::any_of(steps.begin(), steps.end(), spmd::communicates);
}

void find_moves(const OpInfo& info, const std::vector<Placements>& current, const PlanSite& site, CachedPlan& out) {
  const auto steps = [&](size_t i, const Placements& from, const Placements& to) {
    return spmd::redistribution(out.tensors[i].sizes, from, to, site.mesh_shape, site.costs);
  };
  for (size_t i = 0; i < current.size(); ++i) {
    const Placements& to = out.plan.inputs[i];
    if (current[i] == to) continue;
    const bool is_written = info.is_written[out.tensors[i].argument] && !info.is_metadata_change;
    InputMove move{int(i), to, steps(i, current[i], to), false, {}};
    move.communicates = communicates(move.steps);
    if (is_written) move.back = steps(i, to, current[i]);
    out.moves.push_back(std::move(move));
  }
}

// Views get the strides of a view of the whole: a local one cannot tell them.
void find_view_strides(const OpInfo& info, c10::ArrayRef<c10::IValue> values, CachedPlan& out) {
  if (!info.is_view && !info.is_metadata_change) return;
  c10::SmallVector<int, 2> moved;
  for (const InputMove& move : out.moves) {
    if (!move.steps.empty()) moved.push_back(out.tensors[move.slot].argument);
  }
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(info.schema->name().c_str(), info.schema->overload_name().c_str());
  const std::vector<c10::DimVector> strides = strides_of_views(op, values, moved);
  size_t next = 0;
  for (CachedReturn& result : out.returns) {
    for (CachedOutput& output : result.elements) {
      if (next < strides.size()) output.strides = strides[next++];
    }
  }
}

// A rank with nothing of a cut dim stands in for the first rank of the axes that cut it.
void find_stand_in(CachedPlan& out) {
  const Position here = out.own_position();
  for (size_t i = 0; i < out.tensors.size(); ++i) {
    const c10::DimVector local = local_sizes(out.tensors[i].sizes, out.plan.inputs[i], here);
    for (size_t axis = 0; axis < out.plan.inputs[i].size(); ++axis) {
      const Placement& placement = out.plan.inputs[i][axis];
      if (!placement.is_shard() || local[placement.dim()] > 0 || out.tensors[i].sizes[placement.dim()] == 0) continue;
      if (out.coordinate[axis] == 0) continue;
      out.coordinate[axis] = 0;
      out.stand_in_axes.push_back(int64_t(axis));
    }
  }
  for (const Placements& input : out.plan.inputs) {
    for (int64_t axis : out.stand_in_axes) out.stand_in_counts |= input[axis].is_partial();
  }
}

// Fix-ups that touch no tensor are applied once, here.
void apply_static_fixups(const OpInfo& info, const Call& call, CachedPlan& out) {
  for (const spmd::FixupPattern& pattern : out.plan.fixups) {
    const spmd::Fixup* fixup = spmd::find_fixup(pattern.name);
    if (fixup == nullptr || (fixup->before == nullptr && fixup->after == nullptr)) continue;
    if (!fixup->is_static) {
      out.fixups.emplace_back(fixup, pattern);
      continue;
    }
    torch::jit::Stack copy(call.arguments().begin(), call.arguments().end());
    fixup->before({call, out.plan, out.position()}, pattern, copy);
    for (int i = 0; i < info.num_arguments; ++i) {
      if (!copy[i].is(call.arguments()[i]) && !copy[i].isTensor()) out.replaced.emplace_back(i, copy[i]);
    }
  }
}

}  // namespace

CachedPlan plan_everywhere(const OpInfo& info, const Call& call, const std::vector<Placements>& current,
                           const PlanSite& site, PlanTrace* trace) {
  CachedPlan out;
  out.mesh_shape = site.mesh_shape;
  out.tensors = call.tensors();
  if (info.is_foreach) {
    plan_foreach(info, call, current, site, out, trace);
  } else {
    out.plan = plan_call(info, call, current, site, trace);
    for (int r = 0; r < info.num_returns; ++r) out.returns.push_back(describe_return(out.plan, r));
    if (trace != nullptr) {
      trace->slots.resize(call.tensors().size());
      std::iota(trace->slots.begin(), trace->slots.end(), 0);
      trace->plan = out.plan;
    }
  }
  out.is_default = out.plan.is_default();
  find_moves(info, current, site, out);
  return out;
}

std::unique_ptr<CachedPlan> build_plan(const OpInfo& info, const Arguments& arguments,
                                       c10::ArrayRef<c10::IValue> values) {
  const DeviceMesh& mesh = arguments.first->mesh;
  const Call call = describe(info, arguments, values);
  const std::vector<Placements> current = current_placements(arguments);
  auto out =
      std::make_unique<CachedPlan>(plan_everywhere(info, call, current, {mesh.shape(), spmd::cost_models(mesh)}));
  out->own_coordinate = c10::DimVector(mesh.position().coordinate);
  out->coordinate = out->own_coordinate;
  for (const TensorSlot& slot : arguments.tensors) {
    if (slot.meta != nullptr) out->contents.push_back(slot.meta->spec->content);
  }
  find_view_strides(info, values, *out);
  if (!info.is_foreach) {
    find_stand_in(*out);
    apply_static_fixups(info, call, *out);
  }
  out->is_fast = out->moves.empty() && out->fixups.empty() && out->stand_in_axes.empty() && !info.has_lists &&
                 !info.is_metadata_change && !info.has_out;
  for (const auto& [argument, value] : out->replaced) {
    if (value.isIntList()) out->replaced_integers.emplace_back(argument, value.toIntVector());
  }
  if (!out->moves.empty()) warn_of_split(info, call, *out, current[0], mesh);
  if (log::enabled(log::Topic::plan)) {
    std::string text = c10::str(info.name, ": ", out->is_default ? "no rule" : out->plan.rule, ";");
    for (size_t i = 0; i < current.size(); ++i)
      text += c10::str(" ", to_string(current[i]), " => ", to_string(out->plan.inputs[i]), ",");
    log::write(log::Topic::plan, text);
  }
  return out;
}

}  // namespace serried::detail
