// The text of explain, from a call and placements alone.
#include "serried/tensor/dispatch/explain.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

#include "serried/base/bytes_text.h"
#include "serried/comm/collectives/watch.h"
#include "serried/spmd/plan.h"
#include "serried/spmd/redistribute.h"
#include "serried/spmd/registry.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/redistribute/step_bytes.h"
#include "serried/tensor/text.h"

namespace serried {
namespace {

using detail::bytes_text;

std::string tensor_text(const spmd::TensorArg& tensor) {
  return watch::dtype_name(tensor.dtype) + detail::sizes_text(tensor.sizes);
}

std::string argument_text(const spmd::Call& call, const spmd::TensorArg& tensor) {
  const std::string& name = call.schema().arguments()[tensor.argument].name();
  return tensor.list_index < 0 ? name : c10::str(name, "[", tensor.list_index, "]");
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

// Inputs that the op changes, with the result that is the same tensor.
std::vector<std::pair<int, int>> written_inputs(const spmd::Call& call) {
  std::vector<std::pair<int, int>> written;
  const auto& returns = call.schema().returns();
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    const c10::AliasInfo* alias = call.schema().arguments()[call.tensor(i).argument].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    int output = returns.empty() ? 0 : -1;  // an op on lists that returns nothing: its rule has one output all the same
    for (size_t r = 0; r < returns.size(); ++r) {
      const c10::AliasInfo* other = returns[r].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) output = int(r);
    }
    written.emplace_back(int(i), output);
  }
  return written;
}

bool decomposes(const spmd::Call& call) {
  const auto op = c10::Dispatcher::singleton().findSchema(call.schema().operator_name());
  return op && op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

bool is_element_by_element(const spmd::Call& call) {
  const std::string& name = call.schema().name();
  const bool each = name.starts_with("aten::_foreach_") || name.starts_with("aten::_fused_");
  return each && std::any_of(call.tensors().begin(), call.tensors().end(),
                             [](const spmd::TensorArg& tensor) { return tensor.list_index >= 0; });
}

std::string cost_text(const spmd::Candidate& candidate) {
  if (!candidate.rejected.empty() || !std::isfinite(candidate.cost)) return "never";
  char text[32];
  std::snprintf(text, sizeof text, "%.2f us", candidate.cost);
  return text;
}

class Explanation {
 public:
  Explanation(const spmd::Call& call, const std::vector<Placements>& placements, const MeshAxes& mesh)
      : call_(call), mesh_(mesh), request_{placements, mesh.shape, written_inputs(call)} {}

  std::string text() {
    out_ << call_.schema().operator_name() << " on mesh " << mesh_text(mesh_) << "\n";
    for (size_t i = 0; i < call_.tensors().size(); ++i) {
      out_ << "  " << argument_text(call_, call_.tensor(i)) << ": " << tensor_text(call_.tensor(i)) << " "
           << to_string(request_.current[i]) << "\n";
    }
    if (find_handler(call_.schema()) != nullptr) {
      out_ << "note: this op has a handler of its own, which may take the call before any rule does\n";
    }
    const std::optional<spmd::Rule> rule = spmd::find_rule(call_);
    return rule ? by_rule(*rule) : by_default();
  }

 private:
  std::string by_default() {
    out_ << "rule: none, so every input is replicated\n";
    const spmd::Plan plan = spmd::default_plan(call_, mesh_.shape.size());
    write_moves(plan);
    write_outputs(plan);
    out_ << "fix: give the op a rule with register_sharding if this is in the way\n";
    return out_.str();
  }

  std::string by_rule(const spmd::Rule& rule) {
    const spmd::Bound bound = spmd::bind(rule, call_);
    const spmd::Plan plan = spmd::make_plan(bound, call_, request_);
    out_ << "rule: " << rule.text << "\n";
    out_ << "factors: " << factors_text(bound) << "\n";
    for (size_t axis = 0; axis < plan.rows.size(); ++axis) {
      write_axis(spmd::candidates(bound, call_, request_, axis), size_t(plan.rows[axis]), axis);
    }
    if (plan.rows.empty()) out_ << "only the shapes of the inputs matter: nothing moves\n";
    write_moves(plan);
    write_outputs(plan);
    return out_.str();
  }

  void write_axis(const std::vector<spmd::Candidate>& found, size_t chosen, size_t axis) {
    out_ << axis_text(mesh_, axis) << ":";
    for (const Placements& now : request_.current) out_ << " " << to_string(now[axis]);
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
    for (size_t i = 0; i < taken.row.inputs.size(); ++i) moves |= taken.row.inputs[i] != request_.current[i][axis];
    if (!moves) return "chosen: nothing moves";
    return taken.bytes == 0 ? "chosen: no bytes move" : "chosen: costs least";
  }

  void write_moves(const spmd::Plan& plan) {
    int64_t total = 0;
    for (size_t i = 0; i < plan.inputs.size(); ++i) {
      const spmd::TensorArg& tensor = call_.tensor(i);
      for (const spmd::Step& step :
           spmd::redistribution(tensor.sizes, request_.current[i], plan.inputs[i], mesh_.shape)) {
        const int64_t bytes = detail::step_bytes(step, tensor.sizes, tensor.dtype, mesh_.shape);
        total += bytes;
        out_ << "move " << argument_text(call_, tensor) << ": " << spmd::to_string(step) << ", " << bytes_text(bytes)
             << "\n";
      }
    }
    out_ << "sent by each rank: " << bytes_text(total) << "\n";
  }

  void write_outputs(const spmd::Plan& plan) {
    for (size_t o = 0; o < plan.outputs.size(); ++o) {
      const spmd::OutputPlan& output = plan.outputs[o];
      out_ << "result";
      if (plan.outputs.size() > 1) out_ << " " << o;
      out_ << ": " << (output.list ? "a list, each " : "") << to_string(output.placements) << "\n";
    }
    if (plan.fixups.empty()) return;
    out_ << "local call differs by:";
    for (const spmd::FixupPattern& fixup : plan.fixups) {
      out_ << " " << fixup.name << (fixup.letters.empty() ? "" : " ") << fixup.letters;
    }
    out_ << "\n";
  }

  const spmd::Call& call_;
  const MeshAxes& mesh_;
  const spmd::PlanRequest request_;
  std::ostringstream out_;
};

}  // namespace

std::string explain(const spmd::Call& call, const std::vector<Placements>& placements, const MeshAxes& mesh) {
  if (decomposes(call)) {
    return c10::str(call.schema().operator_name(),
                    " decomposes into other ops: explain those, or see them with CommDebugMode({.ops = true})\n");
  }
  if (!is_element_by_element(call)) return Explanation(call, placements, mesh).text();
  std::vector<spmd::TensorArg> tensors;
  std::vector<Placements> kept;
  for (size_t i = 0; i < call.tensors().size(); ++i) {
    if (call.tensor(i).list_index > 0) continue;
    tensors.push_back(call.tensor(i));
    tensors.back().list_index = -1;
    kept.push_back(placements[i]);
  }
  const spmd::Call first(call.schema(), call.arguments(), std::move(tensors));
  return "each element of the lists is a call of its own; this is the first\n" + Explanation(first, kept, mesh).text();
}

}  // namespace serried
