// Makes views of memory that stays in place once, not at each run.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>

#include "serried/graph/passes/access.h"
#include "serried/graph/passes/passes.h"

namespace serried::passes {
namespace {

using namespace serried::graph;

bool stays_in_place(const Value& value) {
  return value.kind == ValueKind::buffer || value.tensor.defined();
}

bool can_hoist(const Graph& graph, const Node& node, const Storages& storages, const std::vector<bool>& escapes) {
  if (!is_alias(graph, node)) return false;
  const ValueId base = node.arguments[0].ids[0];
  bool fits = stays_in_place(graph.value(base)) && !storages.changes_layout(base);
  for (size_t i = 1; i < node.arguments.size(); ++i) fits &= node.arguments[i].ids.empty();
  // A result of the function is a tensor of its own in each run.
  for_each_result(node, [&](ValueId id) { fits &= !escapes[id]; });
  return fits;
}

std::vector<at::Tensor> run_view(const Node& node, const at::Tensor& base) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  torch::jit::Stack stack{base};
  for (size_t i = 1; i < node.arguments.size(); ++i) stack.push_back(node.arguments[i].constant);
  node.op.callBoxed(stack);
  if (stack[0].isTensor()) return {stack[0].toTensor()};
  return stack[0].toTensorVector();
}

// A view of a buffer lies where the buffer will lie: its layout says all.
void hoist(Graph& graph, const Node& node) {
  const Value base = graph.value(node.arguments[0].ids[0]);
  const std::vector<at::Tensor> tensors =
      base.tensor.defined() ? run_view(node, base.tensor) : std::vector<at::Tensor>();
  const std::vector<ValueId>& ids = node.results[0];
  for (size_t k = 0; k < ids.size(); ++k) {
    if (ids[k] == kNoValue) continue;
    Value& value = graph.value(ids[k]);
    value.kind = base.kind;
    value.arena_offset = base.arena_offset;
    if (k < tensors.size()) value.tensor = tensors[k];
  }
}

void run_hoist_views(Graph& graph) {
  const Storages storages(graph);
  const std::vector<bool> escapes = graph.escaping();
  std::erase_if(graph.nodes(), [&](const Node& node) {
    if (!can_hoist(graph, node, storages, escapes)) return false;
    hoist(graph, node);
    return true;
  });
}

}  // namespace

Pass hoist_views() {
  return {"hoist_views", run_hoist_views};
}

}  // namespace serried::passes
