// What the host stores into tensors that an op has just made becomes a constant of the recording.
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "serried/graph/record/recorder.h"

namespace serried::graph {
namespace {

// Ops that look at the shape of their operand only, or at its device.
bool reads_no_data(const std::string& name) {
  return name.ends_with("_like") || name.starts_with("aten::new_") || name.starts_with("aten::sym_") ||
         name == "c10d::barrier" || name == "c10d::monitored_barrier_";
}

// add_ and its kin, unlike fill_ and copy_.
bool reads_what_it_writes(const c10::OperatorHandle& op) {
  return op.hasTag(at::Tag::pointwise) && op.operator_name().name.ends_with('_');
}

// More than a mask of 4096 x 4096 floats is not made by hand.
constexpr int64_t kMaxCheckedBytes = int64_t(64) << 20;

// The operand of zeros_like and new_zeros tells dtype and shape; so does the result.
torch::jit::Stack arguments_for(const Node& maker, const at::Tensor& like) {
  torch::jit::Stack stack;
  for (const Argument& argument : maker.arguments) {
    stack.push_back(argument.ids.empty() ? argument.constant : c10::IValue(like));
  }
  return stack;
}

// Whether `whole`, which `maker` has made by constants, is still as it was made. Runs the op once more. True without a
// look for other devices than CPUs, and for what is large.
bool is_as_made(const Node& maker, const at::Tensor& whole) {
  if (!whole.device().is_cpu() || int64_t(whole.nbytes()) > kMaxCheckedBytes) return true;
  torch::jit::Stack stack = arguments_for(maker, whole);
  tape::run_unrecorded(maker.op, stack);
  const at::Tensor made = stack.at(0).toTensor().contiguous(), now = whole.contiguous();
  return made.nbytes() == now.nbytes() && std::memcmp(made.const_data_ptr(), now.const_data_ptr(), now.nbytes()) == 0;
}

}  // namespace

void Recorder::note_makers(const Node& node) {
  if (!makes_unwritten(node.op) && !makes_by_constants(node.op)) return;
  for_each_result(node, [&](ValueId id) { untouched_[graph().value(id).storage] = graph().nodes().size(); });
}

void Recorder::note_writes(const Node& node) {
  if (untouched_.empty()) return;
  for_each_written(node, [&](ValueId id) { untouched_.erase(graph().value(id).storage); });
}

// The host may have filled what the op is about to read.
void Recorder::adopt_operands(const Node& node) {
  if (untouched_.empty() || is_view(node.op.schema()) || reads_no_data(node.op.operator_name().name)) return;
  for (size_t i = 0; i < node.arguments.size(); ++i) {
    for (ValueId id : node.arguments[i].ids) {
      if (id == kNoValue) continue;
      const auto untouched = untouched_.find(graph().value(id).storage);
      if (untouched == untouched_.end()) continue;
      // What fills empty() does not look at what the host has left there.
      const bool is_filled = is_written(node.op.schema(), i) && !reads_what_it_writes(node.op);
      if (is_filled && makes_unwritten(graph().nodes()[untouched->second].op)) continue;
      adopt(id);
    }
  }
}

void Recorder::adopt_results() {
  for (ValueId id : graph().outputs()) {
    if (id != kNoValue) adopt(id);
  }
  for (const Gradient& gradient : graph().gradients()) {
    if (gradient.value != kNoValue) adopt(gradient.value);
  }
}

// What torch::tensor({1, 2}) made: empty() and then plain stores. Its data is a constant, if it stays the same. So is a
// mask that starts as zeros().
void Recorder::adopt(ValueId id) {
  const int32_t storage = graph().value(id).storage;
  const auto untouched = untouched_.find(storage);
  if (untouched == untouched_.end()) return;
  const Node& maker = graph().nodes()[untouched->second];
  untouched_.erase(untouched);
  const auto memory = storages_.at(size_t(storage)).lock();
  const ValueId base = maker.results[0][0];
  Value& value = graph().value(base);
  if (!memory || value.meta.num_bytes() == 0) return;
  const tape::Pause pause;
  at::Tensor whole = at::empty({0}, at::TensorOptions(value.meta.dtype).device(value.meta.device));
  whole.set_(c10::Storage(memory), value.meta.offset, value.meta.sizes, value.meta.strides);
  if (!makes_unwritten(maker.op) && is_as_made(maker, whole)) return;
  value.kind = ValueKind::constant;
  value.tensor = whole.clone();
  recording_.externals.push_back(base);
}

}  // namespace serried::graph
