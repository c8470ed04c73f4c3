// The fix-ups that change sizes, offsets, layouts and weights, and the table of all.
#include "serried/spmd/fixups.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

namespace serried::spmd {
namespace {

using torch::jit::Stack;

// Arguments that say how large the result is, by the names ATen gives them; unfold_backward's `size` says otherwise.
constexpr std::array<std::string_view, 6> kSizeArguments = {"input_sizes", "self_sizes", "input_size",
                                                            "sizes",       "shape",      "size"};

void set_sizes(const LocalCall& local, const FixupPattern&, Stack& arguments) {
  for (const std::string_view name : kSizeArguments) {
    const auto asked = local.call.integers(name);
    if (!asked) continue;
    const c10::DimVector known = local.output_sizes(0);
    Sizes sizes = *asked;
    for (size_t d = 0; d < sizes.size() && d < known.size(); ++d) {
      if (known[d] >= 0) sizes[d] = known[d];
    }
    if (sizes == *asked) return;
    arguments.at(size_t(local.call.index(name))) = sizes;
    if (const auto strides = local.call.integers("stride")) {
      const c10::DimVector dense = dense_strides(sizes, *strides);
      arguments.at(size_t(local.call.index("stride"))) = Sizes(dense.begin(), dense.end());
    }
    return;
  }
}

// tril and triu count from the global main diagonal.
void shift_diagonal(const LocalCall& local, const FixupPattern&, Stack& arguments) {
  const c10::DimVector offsets = local.input_offsets(0);
  const size_t ndim = offsets.size();
  if (ndim < 2) return;
  const int64_t shift = offsets[ndim - 2] - offsets[ndim - 1];
  arguments.at(size_t(local.call.index("diagonal"))) = local.call.integer("diagonal") + shift;
}

// squeeze drops every dim of size 1, also one that has size 1 only because it is cut: gives those back.
void unsqueeze_cut(const LocalCall& local, const FixupPattern&, const Stack&, Stack& results) {
  const c10::DimVector& global = local.call.tensor(0).sizes;
  const c10::DimVector part = local.input_sizes(0);
  const auto named = local.call.integers("dim");
  Sizes wanted;
  for (size_t d = 0; d < global.size(); ++d) {
    bool asked = !local.call.has("dim");
    for (const int64_t dim : named.value_or(Sizes()))
      asked = asked || from_front(dim, int64_t(global.size())) == int64_t(d);
    if (global[d] != 1 || !asked) wanted.push_back(part[d]);
  }
  const at::Tensor& result = results.at(0).toTensor();
  if (result.sizes() != c10::IntArrayRef(wanted)) results[0] = result.view(wanted);
}

void make_dense(const LocalCall&, const FixupPattern&, Stack& arguments) {
  for (c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      if (argument.toTensor().defined()) argument = argument.toTensor().contiguous();
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> dense;
      for (const at::Tensor& tensor : argument.toTensorVector()) dense.push_back(tensor.contiguous());
      argument = dense;
    }
  }
}

// The kernel reads past the data where lengths add up to more than there is; what it finds there must not look like
// data, or results would change from run to run.
void fence_data(const LocalCall& local, const FixupPattern&, Stack& arguments) {
  c10::IValue& argument = arguments.at(size_t(local.call.index("data")));
  const at::Tensor data = argument.toTensor();
  constexpr double kNoData = 3.3e4;  // a number of every floating type: NaN would count as an extremum
  const at::Tensor fenced = at::full({2 * data.numel()}, kNoData, data.options());
  argument = fenced.narrow(0, 0, data.numel()).view(data.sizes()).copy_(data);
}

// A mean over a part counts for as much as the part has of the whole, so that the parts' sum is the mean.
void weigh_mean(const LocalCall& local, const FixupPattern&, const Stack&, Stack& results) {
  const TensorArg& input = local.call.tensor(0);
  if (input.dim() == 0) return;
  const c10::DimVector sizes = local.input_sizes(0);
  int64_t part = 1;
  int64_t whole = 1;
  for (const int64_t dim : local.call.dims("dim", input.dim())) {
    part *= sizes[size_t(dim)];
    whole *= input.sizes[size_t(dim)];
  }
  if (part == whole) return;
  results.at(0).toTensor().mul_(double(part) / double(whole));
}

// Group norm is told its sizes as numbers: N becomes the local batch size. Static.
void set_group_norm_batch(const LocalCall& local, const FixupPattern&, Stack& arguments) {
  const int input = local.call.index("input");
  for (size_t i = 0; i < local.call.tensors().size(); ++i) {
    if (local.call.tensor(i).argument != input) continue;
    arguments.at(size_t(local.call.index("N"))) = local.input_sizes(i).at(0);
  }
}

// The first result, divided by the local count of `self`, becomes one divided by the global count. Only that is a mean,
// or a gradient of one; a second one (targets that were found) is not.
void weigh_share(const LocalCall& local, const FixupPattern&, const Stack&, Stack& results) {
  const int self = local.call.index("self");
  for (size_t i = 0; i < local.call.tensors().size(); ++i) {
    if (local.call.tensor(i).argument != self) continue;
    const int64_t whole = local.call.tensor(i).numel();
    const int64_t part = c10::multiply_integers(local.input_sizes(i));
    if (part != whole) results.at(0).toTensor().mul_(double(part) / double(whole));
  }
}

// Of a dim made of equal pieces, all cut alike, a rank has the same share of each: places in the dim shrink with it.
void shrink_pieces(const LocalCall& local, const FixupPattern&, Stack& arguments) {
  const int64_t ndim = local.call.tensor(0).dim();
  const size_t dim = size_t(from_front(local.call.integer("dim"), ndim));
  const int64_t whole = local.call.tensor(0).sizes.at(dim);
  const int64_t part = local.input_sizes(0).at(dim);
  if (part == whole) return;
  // The dim that places count in: that of the result for a gradient, which takes one piece.
  const auto asked = local.call.integers("input_sizes");
  const int64_t extent = asked ? asked->at(dim) : whole;
  for (const std::string_view name : {"start", "end"}) {
    if (local.call.value(name) == nullptr) continue;
    const int64_t given = local.call.integer(name);
    const int64_t place = std::clamp<int64_t>(given < 0 ? given + extent : given, 0, extent);
    arguments.at(size_t(local.call.index(name))) = place * part / whole;
  }
  for (const std::string_view name : {"split_size", "split_sizes"}) {
    auto sizes = local.call.integers(name);
    if (!sizes) continue;
    for (int64_t& size : *sizes) size = size * part / whole;
    c10::IValue& argument = arguments.at(size_t(local.call.index(name)));
    argument = argument.isInt() ? c10::IValue(sizes->front()) : c10::IValue(*sizes);
  }
}

const std::vector<Fixup>& all_fixups() {
  static const std::vector<Fixup> fixups = {
      {"dense", make_dense, nullptr, false},
      {"diagonal", shift_diagonal, nullptr, true},
      {"fence", fence_data, nullptr, false},
      {"group_norm", set_group_norm_batch, nullptr, true},
      {"mean", nullptr, weigh_mean, false},
      {"mean_share", nullptr, weigh_share, false},
      {"pieces", shrink_pieces, nullptr, true},
      {"pick", detail::shift_indices, detail::mask_results, false},
      {"size", set_sizes, nullptr, true},
      {"squeeze", nullptr, unsqueeze_cut, false},
      {"target", detail::localize_targets, nullptr, false},
      // Marks that planner and handlers read, and that change nothing in the local call.
      {"even", nullptr, nullptr, true},
      {"eye", nullptr, nullptr, true},
      {"ones", nullptr, nullptr, true},
      {"random", nullptr, nullptr, true},
      {"shape", nullptr, nullptr, true},
  };
  return fixups;
}

}  // namespace

c10::DimVector LocalCall::input_sizes(size_t i) const {
  return local_sizes(call.tensor(i).sizes, plan.inputs.at(i), at);
}

c10::DimVector LocalCall::input_offsets(size_t i) const {
  return local_offsets(call.tensor(i).sizes, plan.inputs.at(i), at);
}

c10::DimVector LocalCall::output_sizes(size_t o) const {
  const OutputPlan& output = plan.outputs.at(o);
  c10::DimVector sizes = output.sizes;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] >= 0) sizes[d] = local_size(sizes[d], int64_t(d), output.placements, at);
  }
  return sizes;
}

bool LocalCall::input_cut(size_t i, int64_t dim) const {
  for (const Placement& placement : plan.inputs.at(i)) {
    if (placement.is_shard(dim)) return true;
  }
  return false;
}

const Fixup* find_fixup(std::string_view name) {
  for (const Fixup& fixup : all_fixups()) {
    if (fixup.name == name) return &fixup;
  }
  return nullptr;
}

std::vector<std::string_view> fixup_names() {
  std::vector<std::string_view> names;
  for (const Fixup& fixup : all_fixups()) names.push_back(fixup.name);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace serried::spmd
