// Adaptive pools of images that are cut along their space. Regions differ in size, so they are pooled one by one.
#include <ATen/ATen.h>

#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/images/local_call.h"
#include "serried/tensor/images/max_indices.h"

namespace serried {
namespace {

using detail::ImageCut;
using detail::LocalOnly;
using detail::OpCall;
using detail::run_local;
using detail::Space;
using torch::jit::Stack;

// None for calls that the op itself would refuse: then it does, as it refuses whole tensors.
std::optional<Space> adaptive_space(const OpCall& call) {
  const size_t ndim = detail::space_ndim_of(call.name());
  const at::Tensor input = call.tensor_value("self"), gradient = call.tensor_value("grad_output");
  if (!detail::is_real(input) || input.dim() < int64_t(ndim) + 1 || input.dim() > int64_t(ndim) + 2) return {};
  if (input.numel() == 0) return std::nullopt;
  if (gradient.defined() && !detail::same_but_space(gradient, input, ndim)) return std::nullopt;
  const std::optional<Sizes> outputs =
      gradient.defined() ? detail::last_sizes(gradient.sizes(), ndim) : detail::per_dim(call, "output_size", ndim);
  if (!outputs) return std::nullopt;
  for (const int64_t size : *outputs) {
    if (size < 1) return std::nullopt;
  }
  Space space{detail::last_sizes(input.sizes(), ndim), *outputs, {}};
  space.rows = [inputs = space.inputs, outputs = space.outputs](size_t d, const Span& some) {
    return spmd::adaptive_rows(inputs[d], outputs[d], some);
  };
  return space;
}

// Outputs that one local call gives, and what it reads, of the image: one output along dims that are cut into regions
// of several sizes, all of this rank's along others.
struct Region {
  std::vector<Span> outputs, rows;
};

std::vector<Region> regions_of(const ImageCut& cut) {
  std::vector<Region> regions{{}};
  const Space& space = cut.space();
  for (size_t d = 0; d < space.ndim(); ++d) {
    const Span all = cut.outputs(d);
    const bool at_once = !cut.is_cut(d) || space.inputs[d] % space.outputs[d] == 0;
    std::vector<Region> finer;
    for (const Region& region : regions) {
      for (int64_t i = 0; i < (at_once ? 1 : all.size); ++i) {
        Region next = region;
        next.outputs.push_back(at_once ? all : Span{all.begin + i, 1});
        next.rows.push_back(space.rows(d, next.outputs.back()));
        finer.push_back(std::move(next));
      }
    }
    regions = std::move(finer);
  }
  return regions;
}

// The place of `part` in `t`, whose last dims are `all`.
at::Tensor place_of(const at::Tensor& t, const std::vector<Span>& part, const std::vector<Span>& all) {
  at::Tensor place = t;
  const int64_t first = t.dim() - int64_t(all.size());
  for (size_t d = 0; d < all.size(); ++d) {
    place = place.narrow(first + int64_t(d), part[d].begin - all[d].begin, part[d].size);
  }
  return place;
}

std::vector<Span> outputs_made(const ImageCut& cut) {
  std::vector<Span> outputs;
  for (size_t d = 0; d < cut.space().ndim(); ++d) outputs.push_back(cut.outputs(d));
  return outputs;
}

Sizes counts_of_outputs(const Region& region) {
  Sizes counts;
  for (const Span& span : region.outputs) counts.push_back(span.size);
  return counts;
}

// One result of an average, two of a maximum.
std::vector<at::Tensor> adaptive_part(const c10::OperatorHandle& op, const OpCall& call, const ImageCut& cut) {
  const at::Tensor x = cut.local("self");
  const at::Tensor rows = cut.borders().fetch(x, 0);
  const Sizes sizes = cut.output_sizes(x.sizes());
  std::vector<at::Tensor> results{at::empty(sizes, x.options())};
  const bool has_indices = op.schema().returns().size() == 2;
  if (has_indices) results.push_back(at::empty(sizes, x.options().dtype(at::kLong)));
  if (rows.numel() == 0 || results[0].numel() == 0) return results;
  const std::vector<Span> outputs = outputs_made(cut), read = detail::rows_read(cut);
  const std::vector<int64_t> no_dilations(outputs.size(), 1);
  for (const Region& region : regions_of(cut)) {
    const Stack of_region = run_local(
        op, call,
        {{"self", place_of(rows, region.rows, read).contiguous()}, {"output_size", counts_of_outputs(region)}});
    place_of(results[0], region.outputs, outputs).copy_(of_region[0].toTensor());
    if (!has_indices) continue;
    place_of(results[1], region.outputs, outputs)
        .copy_(detail::of_whole_image(of_region[1].toTensor(), region.rows, cut.space().inputs, no_dilations));
  }
  return results;
}

bool run_adaptive(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  if (!detail::is_cut_in_space(call, detail::space_ndim_of(call.name()))) return false;
  const std::optional<Space> space = adaptive_space(call);
  if (!space) return false;
  const std::optional<ImageCut> cut = ImageCut::of(op, stack, *space, {.fetch = true, .give_back = false});
  if (!cut) return false;
  std::vector<at::Tensor> results;
  {
    const LocalOnly guard;
    results = adaptive_part(op, call, *cut);
    for (size_t r = 0; r < results.size(); ++r) results[r] = cut->wrap(r, results[r]);
  }
  return results.size() == 1 ? detail::finish(op, stack, {results[0]})
                             : detail::finish(op, stack, {results[0], results[1]});
}

// Regions overlap: gradients of rows add up.
at::Tensor adaptive_gradient(const c10::OperatorHandle& op, const OpCall& call, const ImageCut& cut) {
  const at::Tensor gradient = cut.local("grad_output"), x = cut.local("self"), indices = cut.local("indices");
  const at::Tensor rows = at::zeros(cut.borders().wanted_sizes(x.sizes()), x.options());
  if (rows.numel() == 0 || gradient.numel() == 0) return rows;
  const std::vector<Span> outputs = outputs_made(cut), read = detail::rows_read(cut);
  for (const Region& region : regions_of(cut)) {
    const at::Tensor place = place_of(rows, region.rows, read);
    detail::Replaced arguments{{"grad_output", place_of(gradient, region.outputs, outputs).contiguous()},
                               {"self", at::zeros(place.sizes(), x.options())}};
    if (indices.defined()) {
      const at::Tensor of_region = place_of(indices, region.outputs, outputs);
      arguments.emplace_back("indices", detail::of_rows(of_region, region.rows, cut.space().inputs).contiguous());
    }
    place.add_(run_local(op, call, arguments)[0].toTensor());
  }
  return rows;
}

bool run_adaptive_backward(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  if (!detail::is_cut_in_space(call, detail::space_ndim_of(call.name()))) return false;
  const std::optional<Space> space = adaptive_space(call);
  if (!space) return false;
  const std::optional<ImageCut> cut = ImageCut::of(op, stack, *space, {.fetch = false, .give_back = true});
  if (!cut) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    result = cut->wrap(0, cut->borders().give_back(adaptive_gradient(op, call, *cut)));
  }
  return detail::finish(op, stack, {result});
}

}  // namespace

std::vector<HandlerEntry> image_adaptive_pool_handlers() {
  return {
      {"aten::_adaptive_avg_pool2d", run_adaptive}, {"aten::_adaptive_avg_pool2d_backward", run_adaptive_backward},
      {"aten::_adaptive_avg_pool3d", run_adaptive}, {"aten::_adaptive_avg_pool3d_backward", run_adaptive_backward},
      {"aten::adaptive_max_pool2d", run_adaptive},  {"aten::adaptive_max_pool2d_backward", run_adaptive_backward},
      {"aten::adaptive_max_pool3d", run_adaptive},  {"aten::adaptive_max_pool3d_backward", run_adaptive_backward},
  };
}

}  // namespace serried
