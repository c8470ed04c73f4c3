// The fix-ups of lookups in a table, or of classes, of which each rank holds a part.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <array>

#include "serried/base/error.h"
#include "serried/spmd/fixups.h"

namespace serried::spmd::detail {
namespace {

using torch::jit::Stack;

// Between the two hooks of one call: which results are this rank's, and the dim of the results the mask begins at.
struct Pending {
  at::Tensor elsewhere;
  int64_t place = 0;
};
Pending& pending() {
  static thread_local Pending value;
  return value;
}

// The table's dim that the letter stands for, counted from the front.
int64_t place_of(const Call& call, std::string_view rule_text, char letter) {
  Rule rule;
  parse(rule_text, rule);
  const int64_t ndim = call.tensor(0).dim();
  const auto& dims = rule.inputs[0].dims;
  bool after_ellipsis = false;
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d].mark == DimPattern::Mark::ellipsis) after_ellipsis = true;
    if (dims[d].letters.empty() || dims[d].letters[0] != letter) continue;
    if (!dims[d].at.empty()) return call.dims(dims[d].at, ndim).at(0);
    return after_ellipsis ? ndim - int64_t(dims.size() - d) : int64_t(d);
  }
  return -1;
}

int index_argument(const Call& call) {
  for (const std::string_view name : std::array<std::string_view, 3>{"index", "indices", "target"}) {
    if (const int found = call.index(name); found >= 0) return found;
  }
  return -1;
}

void check_range(const at::Tensor& index, int64_t size, c10::string_view op) {
  if (index.numel() == 0) return;
  const auto [low, high] = at::aminmax(index);
  const int64_t smallest = low.item<int64_t>();
  const int64_t largest = high.item<int64_t>();
  if (smallest >= -size && largest < size) return;
  const int64_t wrong = largest >= size ? largest : smallest;
  raise<c10::IndexError>(
      {op, "index " + std::to_string(wrong) + " is out of range for a dim of size " + std::to_string(size),
       "pass indices from 0 to " + std::to_string(size - 1)});
}

void check_targets(const at::Tensor& target, int64_t classes, int64_t ignore_index, c10::string_view op) {
  if (target.numel() == 0) return;
  const auto [low, high] = at::aminmax(target.masked_fill(target.eq(ignore_index), 0));
  const int64_t smallest = low.item<int64_t>();
  const int64_t largest = high.item<int64_t>();
  if (smallest >= 0 && largest < std::max<int64_t>(classes, 1)) return;
  raise<c10::IndexError>(
      {op, c10::str("target ", smallest < 0 ? smallest : largest, " is none of the ", classes, " classes"),
       c10::str("pass targets from 0 to ", classes - 1, ", or ", ignore_index, " for one to ignore")});
}

// Ops, since a recorded call has to check the indices of each replay.
TORCH_LIBRARY_FRAGMENT(serried, m) {
  m.def("check_range(Tensor index, int size, str op) -> ()");
  m.def("check_targets(Tensor target, int classes, int ignore_index, str op) -> ()");
}
TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  m.impl("check_range", check_range);
  m.impl("check_targets", check_targets);
}

void call_check_range(const at::Tensor& index, int64_t size, const std::string& op) {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("serried::check_range", "").typed<decltype(check_range)>();
  handle.call(index, size, op);
}

void call_check_targets(const at::Tensor& target, int64_t classes, int64_t ignore_index, const std::string& op) {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("serried::check_targets", "").typed<decltype(check_targets)>();
  handle.call(target, classes, ignore_index, op);
}

// Local indices of what this rank holds, 0 for what others hold.
at::Tensor localized(const at::Tensor& index, int64_t size, const std::vector<Span>& spans, at::Tensor& elsewhere) {
  const at::Tensor global = at::where(index < 0, index + size, index);
  at::Tensor local = at::zeros_like(global);
  elsewhere = at::ones_like(global, at::kBool);
  int64_t before = 0;  // elements of the spans to the left
  for (const Span& span : spans) {
    const at::Tensor here = at::logical_and(global >= span.begin, global < span.end());
    local = at::where(here, global - (span.begin - before), local);
    elsewhere.logical_and_(here.logical_not());
    before += span.size;
  }
  return local;
}

at::Tensor only_tensor(const c10::IValue& argument, size_t& place) {
  if (argument.isTensor()) return argument.toTensor();
  const auto items = argument.toListRef();
  for (place = 0; place < items.size(); ++place) {
    if (items[place].isTensor() && items[place].toTensor().defined()) return items[place].toTensor();
  }
  return {};
}

c10::IValue replaced(const c10::IValue& argument, size_t place, const at::Tensor& index) {
  if (argument.isTensor()) return index;
  const auto items = argument.toListRef();
  if (argument.isTensorList()) {
    std::vector<at::Tensor> tensors = argument.toTensorVector();
    tensors.at(place) = index;
    return tensors;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (size_t k = 0; k < items.size(); ++k) {
    list.push_back(k == place ? std::optional<at::Tensor>(index) : items[k].toOptional<at::Tensor>());
  }
  return list;
}

}  // namespace

void shift_indices(const LocalCall& local, const FixupPattern& pattern, Stack& arguments) {
  pending() = {};
  const Placements& table = local.plan.inputs.at(0);
  if (std::none_of(table.begin(), table.end(), [](const Placement& p) { return p.is_shard(); })) return;
  const int64_t place = place_of(local.call, local.plan.rule, pattern.letters.at(0));
  if (place < 0 || !local.input_cut(0, place)) return;
  const int argument = index_argument(local.call);
  if (argument < 0) return;
  size_t in_list = 0;
  const at::Tensor index = only_tensor(arguments.at(size_t(argument)), in_list);
  if (!index.defined()) return;
  const int64_t size = local.call.tensor(0).sizes[size_t(place)];
  call_check_range(index, size, local.call.schema().name());
  at::Tensor elsewhere;
  const at::Tensor shifted = localized(index, size, owned_spans(size, place, table, local.at), elsewhere);
  arguments[size_t(argument)] = replaced(arguments[size_t(argument)], in_list, shifted);
  pending() = {elsewhere, place};
}

void localize_targets(const LocalCall& local, const FixupPattern&, Stack& arguments) {
  constexpr int64_t kIgnored = -1;  // no class has it, whichever number the caller ignores
  size_t scores = 0;
  while (local.call.tensor(scores).argument != local.call.index("self")) ++scores;
  const c10::DimVector& sizes = local.call.tensor(scores).sizes;
  const int64_t place = sizes.size() == 1 ? 0 : 1;
  if (!local.input_cut(scores, place)) return;
  c10::IValue& argument = arguments.at(size_t(local.call.index("target")));
  const at::Tensor target = argument.toTensor().to(at::kLong);
  const int64_t classes = sizes[size_t(place)];
  const int64_t ignore_index = local.call.integer("ignore_index");
  call_check_targets(target, classes, ignore_index, local.call.name());
  // One run of classes: planners do not take strided cuts here.
  const std::vector<Span> owned = owned_spans(classes, place, local.plan.inputs.at(scores), local.at);
  const Span own = owned.empty() ? Span{0, 0} : owned.front();
  const at::Tensor shifted = target - own.begin;
  const at::Tensor elsewhere = shifted.lt(0).logical_or_(shifted.ge(own.size)).logical_or_(target.eq(ignore_index));
  argument = shifted.masked_fill(elsewhere, kIgnored);
  arguments.at(size_t(local.call.index("ignore_index"))) = kIgnored;
}

void mask_results(const LocalCall&, const FixupPattern&, const Stack&, Stack& results) {
  const Pending mask = std::exchange(pending(), {});
  if (!mask.elsewhere.defined()) return;
  const at::Tensor& result = results.at(0).toTensor();
  const int64_t ndim = mask.elsewhere.dim();
  if (result.dim() == ndim && result.sizes() == mask.elsewhere.sizes()) {  // gather: an index per element
    result.masked_fill_(mask.elsewhere, 0);
    return;
  }
  Sizes sizes(size_t(result.dim()), 1);
  for (int64_t d = 0; d < ndim; ++d) sizes.at(size_t(mask.place + d)) = mask.elsewhere.size(d);
  result.masked_fill_(mask.elsewhere.view(sizes), 0);
}

}  // namespace serried::spmd::detail
