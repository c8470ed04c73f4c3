// Finds reads on the host, and steps by a constant rate.
#include "serried/graph/record/stale_numbers.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "serried/base/log.h"
#include "serried/graph/text/text.h"

namespace serried::graph {
namespace {

bool reads_data(const HostRead& read) {
  return read.op == "aten::_local_scalar_dense" || read.op == "aten::equal";
}

// The steps of SGD and RMSprop: parameter plus something times minus the rate.
bool has_constant_rate(const Graph& graph, const Node& node) {
  const std::string& name = node.op.schema().name();
  if (name != "aten::add_" && name != "aten::addcdiv_") return false;
  const Argument &written = node.arguments.front(), &factor = node.arguments.back();
  const bool is_kept =
      written.kind == Argument::Kind::value && graph.value(written.ids[0]).kind == ValueKind::persistent;
  return is_kept && factor.kind == Argument::Kind::constant && factor.constant.isScalar() &&
         !factor.constant.toScalar().isComplex() && factor.constant.toScalar().toDouble() < 0;
}

}  // namespace

// Right where nobody minds that the number stays: it is the caller's, and no op has it.
void warn_of_stale_numbers(const Recording& recording) {
  const auto read = std::find_if(recording.host_reads.begin(), recording.host_reads.end(), reads_data);
  if (read == recording.host_reads.end()) return;
  const std::string after =
      read->before_node == 0 ? "" : "\n  after: " + line_of(recording.graph, read->before_node - 1);
  log::warn_once(c10::str("[capture] the function reads a tensor on the host (", read->op,
                          read->op == "aten::equal" ? "" : ", which item() calls",
                          "); replays do not, so what it read stays that of the recording", after,
                          "\n  fix: return the tensor, and read it outside of the captured function",
                          read->op == "aten::equal" ? "; nothing is to do where torch::nn::MultiheadAttention compares "
                                                      "its inputs with each other"
                                                    : ""));
}

// No op shows where the number comes from, and a scheduler is outside of the function.
void warn_of_constant_rate(const Graph& graph) {
  const auto& nodes = graph.nodes();
  const auto step =
      std::find_if(nodes.begin(), nodes.end(), [&](const Node& n) { return has_constant_rate(graph, n); });
  if (step == nodes.end()) return;
  log::warn_once(
      c10::str("[capture] a learning rate is a constant of the graph: replays step by it whatever a "
               "scheduler has set since\n  in:  ",
               line_of(graph, size_t(step - nodes.begin())),
               "\n  fix: use serried::SGD, whose rate lies in a tensor, or list the optimizer: "
               "capture(fn, {.optimizers = {&optimizer}})"));
}

}  // namespace serried::graph
