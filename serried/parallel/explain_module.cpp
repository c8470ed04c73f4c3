// How a parallelised net lies on its ranks, and what its modules communicate: one table.
#include "serried/parallel/explain_module.h"

#include <algorithm>
#include <set>

#include "serried/base/columns.h"
#include "serried/base/text.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/fsdp/block.h"
#include "serried/tensor/above.h"
#include "serried/tensor/debug/comm_debug_state.h"
#include "serried/tensor/parts.h"

namespace serried {
namespace {

using Tallies = std::map<std::string, CommDebugMode::Tally>;
using Module = ModuleExplanation::Module;

std::string layout_text(const detail::AskedLayout& layout) {
  return layout.is_asked() ? to_string(layout.given()) : "any";
}

std::string asks_of(const at::Tensor& parameter) {
  for (const detail::Role role : {detail::Role::matrix, detail::Role::table, detail::Role::norm}) {
    const detail::RoleLayouts* asked = detail::role_of(parameter, role);
    if (asked == nullptr || !asked->by_style) continue;
    return layout_text(asked->input) + " -> " + layout_text(asked->output);
  }
  return "";
}

std::string block_text(const at::Tensor& parameter) {
  const auto block = detail::block_of(parameter);
  if (!block) return "";
  return c10::str(block->number(), " (", detail::bytes_text(block->whole_bytes()), ")");
}

class Explainer {
 public:
  explicit Explainer(const torch::nn::Module& net) {
    found_.type = net.name();
    add(net, "");
  }

  ModuleExplanation result() {
    std::erase_if(found_.modules, [](const Module& each) {
      return each.parameters.empty() && each.forward.empty() && each.backward.empty();
    });
    return std::move(found_);
  }

  void add_calls(const std::vector<CommDebugMode::ModuleCalls>& all) {
    found_.has_run = true;
    for (const CommDebugMode::ModuleCalls& calls : all) {
      Module& module = entry_of(calls);
      module.forward = calls.forward;
      module.backward = calls.backward;
    }
  }

 private:
  void add(const torch::nn::Module& module, const std::string& path) {
    found_.modules.push_back({.name = CommDebugMode::ModuleCalls{.path = path}.name()});
    for (const auto& item : module.named_parameters(/*recurse=*/false)) add_parameter(item.key(), item.value());
    for (const auto& child : module.named_children()) {
      add(*child.value(), path.empty() ? child.key() : path + "." + child.key());
    }
  }

  void add_parameter(const std::string& name, const at::Tensor& t) {
    if (!t.defined()) return;
    const SpecPtr spec = spec_of(t);
    const int64_t bytes = int64_t(part_of(t).nbytes());
    Module& module = found_.modules.back();
    module.parameters.push_back(
        {.name = name,
         .lies_as = spec ? spec->to_string() : watch::dtype_name(t.scalar_type()) + detail::sizes_text(t.sizes()),
         .bytes = bytes,
         .block = block_text(t)});
    if (module.asks.empty()) module.asks = asks_of(t);
    // A parameter that modules share is there once.
    if (!seen_.insert(t.unsafeGetTensorImpl()).second) return;
    found_.bytes += bytes;
    found_.global_bytes += t.numel() * int64_t(t.element_size());
  }

  // What comes after a module stands behind it, what belongs to none behind all.
  Module& entry_of(const CommDebugMode::ModuleCalls& calls) {
    std::vector<Module>& modules = found_.modules;
    const CommDebugMode::ModuleCalls own{.path = calls.path};
    const auto at = std::find_if(modules.begin(), modules.end(), [&](const Module& m) { return m.name == own.name(); });
    if (!calls.is_unknown && !calls.is_after) return *at;
    return *modules.insert(calls.is_unknown ? modules.end() : std::next(at), {.name = calls.name()});
  }

  ModuleExplanation found_;
  std::set<const c10::TensorImpl*> seen_;
};

Tallies sum_of(const std::vector<Module>& modules, Tallies Module::*direction) {
  Tallies sum;
  for (const Module& module : modules) {
    for (const auto& [name, tally] : module.*direction) {
      sum[name].count += tally.count;
      sum[name].bytes += tally.bytes;
    }
  }
  return sum;
}

void add_rows(const Module& module, bool has_run, std::vector<detail::TextRow>& rows) {
  const size_t first = rows.size();
  rows.push_back({module.name, "", "", "", "", module.asks});
  for (size_t i = 0; i < module.parameters.size(); ++i) {
    const ModuleExplanation::Parameter& parameter = module.parameters[i];
    if (i > 0) rows.push_back({"", "", "", "", "", ""});
    detail::TextRow& row = rows.back();
    row[1] = parameter.name;
    row[2] = parameter.lies_as;
    row[3] = detail::bytes_text(parameter.bytes);
    row[4] = parameter.block;
  }
  if (!has_run) return;
  for (size_t i = first; i < rows.size(); ++i) {
    rows[i].push_back(i == first ? detail::calls_text(module.forward) : "");
    rows[i].push_back(i == first ? detail::calls_text(module.backward) : "");
  }
}

// A column that says nothing is left out.
void drop_column(size_t column, std::vector<detail::TextRow>& rows) {
  for (size_t i = 1; i < rows.size(); ++i) {
    if (column < rows[i].size() && !rows[i][column].empty()) return;
  }
  for (detail::TextRow& row : rows) {
    if (column < row.size()) row.erase(row.begin() + int64_t(column));
  }
}

}  // namespace

Tallies ModuleExplanation::forward() const {
  return sum_of(modules, &Module::forward);
}

Tallies ModuleExplanation::backward() const {
  return sum_of(modules, &Module::backward);
}

std::string ModuleExplanation::text() const {
  std::vector<detail::TextRow> rows = {{"module", "parameter", "lies as", "here", "block (whole)", "in -> out"}};
  if (has_run) rows[0].insert(rows[0].end(), {"forward", "backward"});
  for (const Module& module : modules) add_rows(module, has_run, rows);
  if (has_run) {
    rows.push_back({"all", "", "", "", "", "", detail::calls_text(forward()), detail::calls_text(backward())});
  }
  drop_column(5, rows);
  drop_column(4, rows);
  return c10::str(type, ": ", detail::bytes_text(bytes), " of ", detail::bytes_text(global_bytes),
                  " of parameters on this rank\n", detail::columns(rows));
}

ModuleExplanation explain(const torch::nn::Module& net) {
  return Explainer(net).result();
}

ModuleExplanation explain(const torch::nn::Module& net, const std::function<void()>& step) {
  Explainer explainer(net);
  const CommDebugMode comm(net);
  step();
  explainer.add_calls(comm.by_module());
  return explainer.result();
}

}  // namespace serried
