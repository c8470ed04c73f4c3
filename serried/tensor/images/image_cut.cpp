// Divides the rows of an op on windows over the ranks that cut its image, and weighs the exchange against the rule.
#include "serried/tensor/images/image_cut.h"

#include <algorithm>

#include "serried/spmd/registry.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {
namespace {

// Whose cut decides: the image, or where the op is not told it, the gradient of its result.
int leading_argument(const OpCall& call) {
  for (const char* name : {"input", "self", "grad_output"}) {
    if (call.has(name)) return call.index(name);
  }
  return -1;
}

bool cuts(const Placement& placement, int64_t ndim, size_t space_ndim) {
  return placement.is_shard() && placement.dim() >= ndim - int64_t(space_ndim);
}

// Cut by one axis after the other, as layouts are.
std::vector<Span> divided(int64_t size, const DeviceMesh& mesh, const std::vector<int64_t>& axes) {
  std::vector<Span> parts{{0, size}};
  for (const int64_t axis : axes) {
    std::vector<Span> finer;
    for (const Span& part : parts) {
      for (int64_t i = 0; i < mesh.size(axis); ++i) {
        const Span piece = chunk(part.size, mesh.size(axis), i);
        finer.push_back({part.begin + piece.begin, piece.size});
      }
    }
    parts = std::move(finer);
  }
  return parts;
}

template <class T>
std::vector<T> without(const std::vector<T>& of_axes, const std::vector<bool>& left_out) {
  std::vector<T> rest;
  for (size_t axis = 0; axis < of_axes.size(); ++axis) {
    if (!left_out[axis]) rest.push_back(of_axes[axis]);
  }
  return rest;
}

int64_t bytes_of(const spmd::TensorArg& tensor) {
  return tensor.numel() * int64_t(c10::elementSize(tensor.dtype));
}

}  // namespace

bool is_cut_in_space(const OpCall& call, size_t space_ndim) {
  const int leader = leading_argument(call);
  if (leader < 0 || call.has_out() || !call.argument(size_t(leader)).isTensor()) return false;
  const DTensorMeta* meta = dtensor_meta(call.argument(size_t(leader)).toTensor());
  if (meta == nullptr) return false;
  const Spec& spec = *meta->spec;
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    if (spec.mesh.size(int64_t(axis)) > 1 && cuts(spec.placements[axis], int64_t(spec.sizes.size()), space_ndim)) {
      return true;
    }
  }
  return false;
}

std::optional<ImageCut> ImageCut::of(const c10::OperatorHandle& op, const torch::jit::Stack& stack, Space space,
                                     Exchanges exchanges) {
  const OpInfo& info = op_info(op);
  Arguments arguments;
  collect(info, stack, arguments);
  const OpCall call = describe(info, arguments, torch::jit::last(stack, size_t(info.num_arguments)));
  ImageCut cut;
  cut.schema_ = info.schema;
  cut.space_ = std::move(space);
  cut.slots_.assign(arguments.tensors.begin(), arguments.tensors.end());
  cut.current_ = current_placements(arguments);
  if (!cut.find_axes(call) || !cut.plan_other_axes(call)) return std::nullopt;
  cut.divide_space();
  if (!cut.costs_less(call, exchanges)) return std::nullopt;
  return cut;
}

bool ImageCut::find_axes(const OpCall& call) {
  leader_ = dtensor_meta(call.argument(size_t(leading_argument(call))).toTensor())->spec;
  for (const Placement& placement : leader_->placements) {
    cuts_space_.push_back(cuts(placement, int64_t(leader_->sizes.size()), space_.ndim()));
    if (cuts_space_.back() && placement.is_strided()) return false;
  }
  return true;
}

ImageCut::Side ImageCut::side_of(int argument) const {
  const std::string& name = schema_->arguments()[size_t(argument)].name();
  if (name == "input" || name == "self") return Side::input;
  return name == "grad_output" || name == "indices" ? Side::output : Side::neither;
}

// Axes that cut space: images as the leader, what has no space whole or, of a result, pending.
Placements ImageCut::overlaid(Placements others, const Placement& no_space, Side side) const {
  Placements all;
  size_t next = 0;
  for (size_t axis = 0; axis < cuts_space_.size(); ++axis) {
    if (!cuts_space_[axis]) {
      all.push_back(others[next++]);
    } else {
      all.push_back(side == Side::neither ? no_space : leader_->placements[axis]);
    }
  }
  return all;
}

// The rule knows nothing of these axes then, and so leaves space alone.
bool ImageCut::plan_other_axes(const OpCall& call) {
  const std::optional<spmd::Rule> rule = spmd::find_rule(call);
  if (!rule) return false;
  const std::vector<spmd::CostModel> costs = spmd::cost_models(leader_->mesh);
  const Sizes shape = without(leader_->mesh.shape(), cuts_space_);
  spmd::PlanRequest request{{}, shape, {}, without(costs, cuts_space_)};
  for (const Placements& placements : current_) request.current.push_back(without(placements, cuts_space_));
  const spmd::Bound bound = spmd::bind(*rule, call);
  const spmd::Plan plan = spmd::make_plan(bound, call, request);
  cost_ = plan.cost;
  for (size_t i = 0; i < slots_.size(); ++i) {
    targets_.push_back(overlaid(plan.inputs[i], Replicate(), side_of(slots_[i].argument)));
  }
  const bool is_backward = call.has("grad_output");
  for (size_t r = 0; r < plan.outputs.size(); ++r) {
    const Side side = !is_backward ? Side::output : r == 0 ? Side::input : Side::neither;
    results_.push_back(overlaid(plan.outputs[r].placements, Partial(ReduceKind::sum), side));
    c10::DimVector sizes = plan.outputs[r].sizes;
    const Sizes& of_space = side == Side::input ? space_.inputs : space_.outputs;
    for (size_t d = 0; side != Side::neither && d < space_.ndim(); ++d) {
      sizes[sizes.size() - space_.ndim() + d] = of_space[d];
    }
    sizes_.push_back(sizes);
  }
  return true;
}

void ImageCut::divide_space() {
  const DeviceMesh& mesh = leader_->mesh;
  const int64_t first = int64_t(leader_->sizes.size() - space_.ndim());
  std::vector<BorderedDim> cut_dims;
  for (size_t d = 0; d < space_.ndim(); ++d) {
    BorderedDim dim{.dim = first + int64_t(d), .axes = {}, .holds = {}, .wants = {}};
    size_t own = 0;
    for (int64_t axis = 0; axis < mesh.ndim(); ++axis) {
      if (!leader_->placements[size_t(axis)].is_shard(dim.dim)) continue;
      dim.axes.push_back(axis);
      own = own * size_t(mesh.size(axis)) + size_t(mesh.position().coordinate[size_t(axis)]);
    }
    if (dim.axes.empty()) {
      parts_.push_back({false, {0, space_.outputs[d]}, {0, space_.inputs[d]}});
      continue;
    }
    dim.holds = divided(space_.inputs[d], mesh, dim.axes);
    const std::vector<Span> outputs = divided(space_.outputs[d], mesh, dim.axes);
    for (const Span& part : outputs) dim.wants.push_back(part.size == 0 ? Span{} : space_.rows(d, part));
    parts_.push_back({true, outputs[own], dim.wants[own]});
    cut_dims.push_back(std::move(dim));
  }
  borders_.emplace(mesh, std::move(cut_dims));
}

// Places along the cut dims times what lies at each of them, on the rank that has most of it.
int64_t ImageCut::bytes_moved(int64_t places) const {
  const DeviceMesh& mesh = leader_->mesh;
  int64_t elements = places;
  for (size_t d = 0; d < leader_->sizes.size(); ++d) {
    const bool in_space = d + space_.ndim() >= leader_->sizes.size();
    if (in_space && is_cut(d + space_.ndim() - leader_->sizes.size())) continue;
    const int64_t parts = num_shards(int64_t(d), leader_->placements, mesh.shape());
    elements *= (leader_->sizes[d] + parts - 1) / parts;
  }
  return elements * int64_t(c10::elementSize(leader_->dtype));
}

// Against the rule alone, which makes space whole. Every rank finds the same.
bool ImageCut::costs_less(const OpCall& call, Exchanges exchanges) const {
  const DeviceMesh& mesh = leader_->mesh;
  const std::vector<spmd::CostModel> costs = spmd::cost_models(mesh);
  double ours = cost_;
  double exchange = 0;
  const auto add = [&](int64_t places, const spmd::CostModel& model, double& cost) {
    if (places > 0) cost += model.latency + double(bytes_moved(places)) / model.bandwidth;
  };
  for (size_t axis = 0; axis < cuts_space_.size(); ++axis) {
    if (!cuts_space_[axis]) continue;
    double on_axis = 0;
    add(exchanges.fetch ? borders_->most_fetched() : 0, costs[axis], on_axis);
    add(exchanges.give_back ? borders_->most_given_back() : 0, costs[axis], on_axis);
    exchange = std::max(exchange, on_axis);
    for (size_t i = 0; i < slots_.size(); ++i) {
      ours += spmd::move_cost(current_[i][axis], targets_[i][axis], bytes_of(call.tensor(i)), mesh.size(int64_t(axis)),
                              costs[axis]);
    }
  }
  const bool forbidden = ExplicitRedistribution::current().mode == HiddenCommunication::forbid;
  if (forbidden && current_ != targets_) return false;  // the rule's error says what would move
  if (exchanges.at_any_cost) return true;
  const spmd::Bound bound = spmd::bind(*spmd::find_rule(call), call);
  return ours + exchange < spmd::make_plan(bound, call, {current_, mesh.shape(), {}, costs}).cost;
}

at::Tensor ImageCut::local(const char* argument) const {
  for (size_t i = 0; i < slots_.size(); ++i) {
    if (schema_->arguments()[size_t(slots_[i].argument)].name() != argument) continue;
    if (current_[i] == targets_[i]) return local_of(slots_[i]).contiguous();
    const SpecPtr from = spec_of(slots_[i], leader_->mesh);
    comm_debug::note_redistribution(schema_->name(), *from, targets_[i], /*implicit=*/true);
    return redistribute_local(local_of(slots_[i]), *from, targets_[i]).contiguous();
  }
  return {};
}

Sizes ImageCut::output_sizes(c10::IntArrayRef sizes) const {
  Sizes changed = sizes.vec();
  for (size_t d = 0; d < space_.ndim(); ++d) changed[changed.size() - space_.ndim() + d] = outputs(d).size;
  return changed;
}

at::Tensor ImageCut::wrap(size_t index, const at::Tensor& local) const {
  if (!local.defined()) return local;
  const at::Tensor dense = local.contiguous();
  return serried::wrap(dense, spec_of_result(dense, leader_->mesh, results_[index], sizes_[index]));
}

}  // namespace serried::detail
