// The text of explain: the plan that a call would run by, and what it was chosen from.
#include "serried/tensor/dispatch/explain.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "serried/base/error.h"
#include "serried/base/text.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/dispatch/arguments.h"
#include "serried/tensor/dispatch/cached_plan.h"
#include "serried/tensor/dispatch/composite_parts.h"
#include "serried/tensor/dispatch/op_by_name.h"
#include "serried/tensor/spec.h"

namespace serried {
namespace {

using detail::bytes_text;

std::string tensor_text(const spmd::TensorArg& tensor) {
  return watch::dtype_name(tensor.dtype) + detail::sizes_text(tensor.sizes);
}

std::string axis_text(const MeshAxes& mesh, size_t axis) {
  const std::string name = axis < mesh.names.size() ? " \"" + mesh.names[axis] + "\"" : "";
  return c10::str("axis ", axis, name, " (", mesh.shape[axis], mesh.shape[axis] == 1 ? " rank)" : " ranks)");
}

std::string mesh_text(const MeshAxes& mesh) {
  std::string text;
  for (size_t axis = 0; axis < mesh.shape.size(); ++axis) {
    text += axis > 0 ? " " : "";
    text += axis < mesh.names.size() ? mesh.names[axis] + "=" : "";
    text += std::to_string(mesh.shape[axis]);
  }
  return text;
}

std::string factors_text(const spmd::Bound& bound) {
  std::string text;
  for (const spmd::Factor& factor : bound.factors) {
    text += c10::str(text.empty() ? "" : " ", factor.letter, "=",
                     factor.size < 0 ? std::string("?") : std::to_string(factor.size));
    if (!factor.can_cut) text += " (whole)";
    if (factor.must_divide) text += " (equal parts)";
  }
  return text.empty() ? "none" : text;
}

std::string cost_text(const spmd::Candidate& candidate) {
  if (!candidate.rejected.empty() || !std::isfinite(candidate.cost)) return "never";
  char text[32];
  std::snprintf(text, sizeof text, "%.2f us", candidate.cost);
  return text;
}

// Asks for the plan that a call would run by, and tells what it was chosen from.
class Explanation {
 public:
  Explanation(const detail::OpInfo& info, const spmd::OpCall& call, const std::vector<Placements>& placements,
              const MeshAxes& mesh)
      : info_(info),
        call_(call),
        placements_(placements),
        mesh_(mesh),
        plan_(detail::plan_everywhere(info, call, placements, {mesh.shape, mesh.costs}, &trace_)) {}

  std::string text() {
    if (info_.is_foreach) out_ << "each element of the lists is a call of its own; this is the first\n";
    out_ << call_.schema().operator_name() << " on mesh " << mesh_text(mesh_) << "\n";
    for (int slot : trace_.slots) {
      const spmd::TensorArg& tensor = call_.tensor(size_t(slot));
      out_ << "  " << argument_text(tensor) << ": " << tensor_text(tensor) << " " << to_string(current(slot)) << "\n";
    }
    if (info_.handler != nullptr) {
      out_ << "note: this op has a handler of its own, which may take the call before any rule does\n";
    }
    trace_.bound ? write_rule(*trace_.bound) : void(out_ << "rule: none, so every input is replicated\n");
    write_moves();
    write_outputs();
    if (!trace_.bound) out_ << "fix: give the op a rule with register_sharding if this is in the way\n";
    return out_.str();
  }

 private:
  const Placements& current(int slot) const { return placements_[size_t(slot)]; }

  std::string argument_text(const spmd::TensorArg& tensor) const {
    const std::string& name = call_.schema().arguments()[tensor.argument].name();
    return tensor.list_index < 0 || info_.is_foreach ? name : c10::str(name, "[", tensor.list_index, "]");
  }

  void write_rule(const spmd::Bound& bound) {
    out_ << "rule: " << trace_.plan.rule << "\n";
    out_ << "factors: " << factors_text(bound) << "\n";
    for (size_t axis = 0; axis < trace_.weighed.size(); ++axis) write_axis(axis);
    if (trace_.weighed.empty()) out_ << "only the shapes of the inputs matter: nothing moves\n";
  }

  void write_axis(size_t axis) {
    const std::vector<spmd::Candidate>& found = trace_.weighed[axis];
    const size_t chosen = size_t(trace_.plan.rows[axis]);
    out_ << axis_text(mesh_, axis) << ":";
    for (int slot : trace_.slots) out_ << " " << to_string(current(slot)[axis]);
    out_ << "\n";
    size_t width = 0;
    for (const spmd::Candidate& each : found) width = std::max(width, to_string(each.row).size());
    for (size_t k = 0; k < found.size(); ++k) {
      const std::string row = to_string(found[k].row);
      char line[256];
      std::snprintf(line, sizeof line, "  %c %-*s  %10s  %10s", k == chosen ? '*' : ' ', int(width), row.c_str(),
                    cost_text(found[k]).c_str(), bytes_text(found[k].bytes).c_str());
      out_ << line;
      if (k == chosen) out_ << "  " << why(found, chosen, axis);
      if (!found[k].rejected.empty()) out_ << "  " << found[k].rejected;
      out_ << "\n";
    }
  }

  std::string why(const std::vector<spmd::Candidate>& found, size_t chosen, size_t axis) const {
    const spmd::Candidate& taken = found[chosen];
    for (const spmd::Candidate& each : found) {
      if (each.rejected.empty() && each.cost < taken.cost) return "chosen: leaves the written input where it lies";
    }
    bool moves = false;
    for (size_t i = 0; i < taken.row.inputs.size(); ++i) {
      moves |= taken.row.inputs[i] != current(trace_.slots[i])[axis];
    }
    if (!moves) return "chosen: nothing moves";
    return taken.bytes == 0 ? "chosen: no bytes move" : "chosen: costs least";
  }

  int64_t write_steps(const char* what, const spmd::TensorArg& tensor, const std::vector<spmd::Step>& steps) {
    int64_t total = 0;
    for (const spmd::Step& step : steps) {
      const int64_t bytes = spmd::bytes_sent(step, tensor.sizes, tensor.dtype, mesh_.shape);
      total += bytes;
      out_ << what << " " << argument_text(tensor) << ": " << spmd::to_string(step) << ", " << bytes_text(bytes)
           << "\n";
    }
    return total;
  }

  void write_moves() {
    int64_t total = 0;
    const auto write_each = [&](const char* what, auto steps_of) {
      for (const detail::InputMove& move : plan_.moves) {
        const bool shown = std::find(trace_.slots.begin(), trace_.slots.end(), move.slot) != trace_.slots.end();
        if (shown) total += write_steps(what, call_.tensor(size_t(move.slot)), move.*steps_of);
      }
    };
    write_each("move", &detail::InputMove::steps);
    write_each("write back", &detail::InputMove::back);
    out_ << "sent by each rank: " << bytes_text(total) << "\n";
  }

  // What is written in place lies as before, wherever the op saw it.
  const Placements& result_placements(size_t o) const {
    int argument = o < size_t(info_.num_returns) ? info_.return_alias[o] : -1;
    for (int slot : trace_.slots) {
      const int own = call_.tensor(size_t(slot)).argument;
      if (info_.num_returns == 0 && argument < 0 && info_.is_written[own]) argument = own;
      if (own == argument && !info_.is_metadata_change) return current(slot);
    }
    return trace_.plan.outputs[o].placements;
  }

  void write_outputs() {
    const spmd::Plan& plan = trace_.plan;
    for (size_t o = 0; o < plan.outputs.size(); ++o) {
      const spmd::OutputPlan& output = plan.outputs[o];
      out_ << "result";
      if (plan.outputs.size() > 1) out_ << " " << o;
      out_ << ": " << (output.list ? "a list, each " : "") << to_string(result_placements(o)) << "\n";
    }
    if (plan.fixups.empty()) return;
    out_ << "local call differs by:";
    for (const spmd::FixupPattern& fixup : plan.fixups) {
      out_ << " " << fixup.name << (fixup.letters.empty() ? "" : " ") << fixup.letters;
    }
    out_ << "\n";
  }

  const detail::OpInfo& info_;
  const spmd::OpCall& call_;
  const std::vector<Placements>& placements_;
  const MeshAxes& mesh_;
  detail::PlanTrace trace_;
  const detail::CachedPlan plan_;
  std::ostringstream out_;
};

constexpr const char* kExplain = "explain";

std::string explain_stack(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  detail::OpInfo& info = detail::op_info(op);
  if (int(stack.size()) != info.num_arguments) {
    raise<c10::ValueError>({kExplain,
                            c10::str(op.schema(), " takes ", info.num_arguments, " arguments, not ", stack.size()),
                            "pass every argument of the schema, in order"});
  }
  detail::Arguments arguments;
  if (detail::kind_of_call(info, stack) == &kDTensor) detail::collect(info, stack, arguments);
  if (arguments.first == nullptr) {
    raise<c10::ValueError>({kExplain, "no argument of " + info.name + " is a DTensor", "pass at least one DTensor"});
  }
  const DeviceMesh& mesh = arguments.first->mesh;
  return explain(detail::describe(info, arguments, stack), detail::current_placements(arguments),
                 {mesh.shape(), mesh.dim_names(), spmd::cost_models(mesh)});
}

}  // namespace

std::string explain(const spmd::Call& call, const std::vector<Placements>& placements, const MeshAxes& mesh) {
  const c10::FunctionSchema& schema = call.schema();
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(schema.name().c_str(), schema.overload_name().c_str());
  const detail::OpInfo& info = detail::op_info(op);
  if (info.is_composite) {
    const detail::CompositeParts parts = detail::parts_of(op, call);
    if (parts.is_complete && parts.names.empty()) return c10::str(schema.operator_name(), " runs no op on these\n");
    return c10::str(
        schema.operator_name(), " decomposes into ", parts.to_string(),
        ": explain those; CommDebugMode({.ops = true}) shows them in a real call, which may choose by device\n");
  }
  return Explanation(info, call, placements, mesh).text();
}

std::string explain(const std::string& op, const std::vector<at::Tensor>& tensors) {
  const c10::OperatorHandle handle = detail::find_op_for(op, tensors.size());
  return explain_stack(handle, detail::fill_arguments(handle.schema(), tensors));
}

std::string explain(const std::string& op, std::initializer_list<at::Tensor> tensors) {
  return explain(op, std::vector<at::Tensor>(tensors));
}

std::string explain(const std::string& op, const torch::jit::Stack& arguments) {
  size_t num_tensors = 0;
  for (const c10::IValue& value : arguments) num_tensors += value.isTensor();
  return explain_stack(detail::find_op_for(op, num_tensors), arguments);
}

}  // namespace serried
