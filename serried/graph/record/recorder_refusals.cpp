// What a recorder meets and cannot put into a graph.
#include "serried/graph/record/recorder.h"

namespace serried::graph {
namespace {

// What a reader calls a tensor that a graph cannot hold; empty for one in plain memory.
std::string odd_form(const at::Tensor& t) {
  if (t.is_nested()) return "a nested tensor";
  if (t.is_quantized()) return c10::str("a quantized tensor ", t.sizes());
  if (t.layout() != at::kStrided) return c10::str("a tensor ", t.sizes(), " of layout ", t.layout());
  return t.has_storage() ? "" : c10::str("a tensor ", t.sizes(), " without storage");
}

// index() with masks has a shape that depends on data, with numbers it has not.
bool has_mask(const Node& node, const Graph& graph) {
  bool found = false;
  for (ValueId id : node.arguments.at(1).ids) {
    if (id == kNoValue) continue;
    const at::ScalarType dtype = graph.value(id).meta.dtype;
    found |= dtype == at::kBool || dtype == at::kByte;
  }
  return found;
}

}  // namespace

void Recorder::refuse(CaptureError::Report report) {
  if (!refusal_) refusal_ = CaptureError(std::move(report));
}

bool Recorder::refuse_odd(const at::Tensor& t, const std::string& what) {
  const std::string form = odd_form(t);
  if (form.empty()) return false;
  const std::string op = running_ ? c10::toString(running_->operator_name()) : "";
  refuse({CaptureErrorKind::unsupported,
          op,
          "",
          c10::str(what, op.empty() ? "" : " of " + op, " is ", form, "; a graph holds tensors in strided memory only"),
          {"use a dense form: t.to_dense(), t.dequantize(), an Embedding without sparse gradients",
           "keep this part out of the captured function"}});
  return true;
}

// A flag on the tensor and no op: a replay would not see whether the next argument has it.
bool Recorder::refuse_lazy(const at::Tensor& t) {
  if (!t.is_conj() && !t.is_neg()) return false;
  refuse({CaptureErrorKind::unsupported,
          "",
          "",
          c10::str("the argument ", meta_of(t).to_string(), " is a ", t.is_conj() ? "conjugate" : "negative",
                   " view: its memory holds other numbers than it shows"),
          {t.is_conj() ? "pass t.resolve_conj()" : "pass t.resolve_neg()"}});
  return true;
}

// Two storages, one memory: no pass would see that they are in each other's way.
void Recorder::refuse_overlap(const at::Tensor& t) {
  const c10::StorageImpl& storage = *storage_of(t);
  all_allocated_ &= is_allocated(storage);
  if (all_allocated_) return;
  for (const auto& weak : storages_) {
    const auto other = weak.lock();
    if (!other || !overlap(storage, *other)) continue;
    refuse(
        {CaptureErrorKind::unsupported,
         running_ ? c10::toString(running_->operator_name()) : "",
         "",
         c10::str("the tensor ", meta_of(t).to_string(),
                  " lies in memory that another one of the function has too, and torch does not know it (from_blob)"),
         {"make one of them a view of the other", "copy one of them"}});
  }
}

// A replay works on the memory that the tensors had: it would not follow one that moves on its way.
void Recorder::refuse_moved() {
  for (const OuterTensor& outer : recording_.outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (!t.defined() || !outer.is_of_surroundings() || outer.place.holds(t)) continue;
    refuse({CaptureErrorKind::unsupported,
            "",
            "",
            c10::str("the function gives the tensor ", outer.place.meta.to_string(),
                     " of its surroundings other memory, sizes or strides (set_data, set_, t_, resize_ and the like)"),
            {"copy_ into it", "make a view by an op that returns one, such as t() or unsqueeze()"}});
  }
}

void Recorder::refuse_other_history() {
  for (const OuterTensor& outer : recording_.outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (!t.defined() || !outer.is_of_surroundings()) continue;
    if (t.requires_grad() == outer.required_grad && has_history(t, outer.history)) continue;
    refuse({CaptureErrorKind::unsupported,
            "",
            "",
            c10::str("the function changes whether the tensor ", outer.place.meta.to_string(),
                     " of its surroundings requires gradients, or its history (requires_grad_, detach_, an in-place op "
                     "with a tensor that requires gradients); a replay would not"),
            {"write into it under torch::NoGradGuard, or what detach() gives",
             "change requires_grad outside of the captured function"}});
  }
}

void Recorder::refuse_generator(const std::string& change) {
  if (change.empty()) return;
  refuse({CaptureErrorKind::unsupported,
          running_ ? c10::toString(running_->operator_name()) : "",
          "",
          "a generator " + change + " inside of the function, and a replay would not do that again",
          {"seed before the call of the captured function, and draw by ops only",
           "draw numbers that shall stay the same once, and pass them to the function"}});
}

void Recorder::check_supported(const c10::OperatorHandle& op, const Node& node) {
  if (!op.hasTag(at::Tag::dynamic_output_shape)) return;
  const std::string name = op.operator_name().name;
  if (name.starts_with("aten::index") && !has_mask(node, recording_.graph)) return;
  refuse({CaptureErrorKind::data_dependent_shape,
          c10::toString(op.operator_name()),
          "",
          "the shape of its result depends on the data, and a replay runs with fixed shapes",
          {"use a form of fixed shape: torch::where, a mask that is multiplied in, index with a list of fixed length",
           "keep this part out of the captured function"}});
}

void Recorder::raise_refusal() const {
  if (refusal_) throw *refusal_;
}

// Another tensor comes with the next call, with hooks of its own.
void Recorder::check_hooks_of_inputs() const {
  if (hooked_input_.empty()) return;
  throw CaptureError({CaptureErrorKind::unsupported,
                      "",
                      "",
                      "the argument " + hooked_input_ + " came with a hook on its gradient; the next may have another",
                      {"register the hook inside of the captured function"}});
}

}  // namespace serried::graph
