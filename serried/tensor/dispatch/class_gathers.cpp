// Finds the class dim of a call by its arguments and its rule.
#include "serried/tensor/dispatch/class_gathers.h"

#include "serried/base/error.h"
#include "serried/base/text.h"

namespace serried::detail {
namespace {

bool contains_text(std::string_view text, std::string_view part) {
  return text.find(part) != text.npos;
}

// Rules write the classes of a loss as the letter C: whole, or with the fix-up that lets them be cut.
bool is_loss_by_class(const spmd::Call& call, std::string_view rule) {
  return call.has("reduction") && (contains_text(rule, "C") || contains_text(rule, "target c"));
}

std::vector<int64_t> class_dims(const spmd::Call& call, const spmd::TensorArg& tensor, std::string_view rule) {
  if (is_loss_by_class(call, rule)) {
    return tensor.argument == call.index("self") ? std::vector<int64_t>{tensor.dim() == 1 ? 0 : 1}
                                                 : std::vector<int64_t>{};
  }
  const bool computes = !contains_text(rule, "=>");
  if (!computes || !contains_text(rule, "@dim") || tensor.dim() == 0) return {};
  return call.dims("dim", tensor.dim());
}

// Bytes that `move` sends to make `dim` whole; 0 where it leaves the dim as it lies.
int64_t bytes_to_gather(const CachedPlan& plan, const InputMove& move, const Placements& from, int64_t dim) {
  bool gathers = false;
  for (size_t axis = 0; axis < from.size(); ++axis) gathers |= from[axis].is_shard(dim) && !move.to[axis].is_shard(dim);
  const spmd::TensorArg& tensor = plan.tensors[size_t(move.slot)];
  int64_t bytes = 0;
  for (const spmd::Step& step : move.steps) {
    if (gathers) bytes += spmd::bytes_sent(step, tensor.sizes, tensor.dtype, plan.mesh_shape);
  }
  return bytes;
}

}  // namespace

void check_class_gathers(const CachedPlan& plan, const spmd::Call& call, const Arguments& arguments,
                         const DeviceMesh& mesh) {
  for (const InputMove& move : plan.moves) {
    const spmd::TensorArg& tensor = plan.tensors[size_t(move.slot)];
    const SpecPtr from = spec_of(arguments.tensors[size_t(move.slot)], mesh);
    for (const int64_t dim : class_dims(call, tensor, plan.plan.rule)) {
      const int64_t bytes = bytes_to_gather(plan, move, from->placements, dim);
      if (bytes == 0) continue;
      raise<c10::ValueError>(
          {c10::toString(call.schema().operator_name()),
           c10::str("argument \"", call.schema().arguments()[size_t(tensor.argument)].name(), "\" ", from->to_string(),
                    " would be gathered along its classes, dim ", dim,
                    ", inside a LossParallel scope: each rank sends ", bytes_text(bytes)),
           c10::str("use an op that takes cut classes (softmax, log_softmax, nll_loss, cross_entropy), or call "
                    "redistribute(parse_placements(\"",
                    to_string(move.to), "\")) where the whole is wanted")});
    }
  }
}

}  // namespace serried::detail
