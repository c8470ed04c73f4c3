// Nodes to actions: what a node computes by its shapes, when a collective starts and who waits for it.
#include "tools/serried/graph_job.h"

#include <algorithm>
#include <map>

#include "serried/base/error.h"
#include "serried/graph/text/report.h"
#include "serried/graph/text/text.h"

namespace serried::tools {
namespace {

using graph::Graph;
using graph::Node;
using graph::ValueId;
using simulation::Action;

// A core of some years ago. Only shares of it count where a step was measured.
const simulation::Compute kUsual{simulation::Fitted::exactly(1), simulation::Fitted::exactly(0.02),
                                 simulation::Fitted::exactly(0.1)};

bool is_among(const std::string& name, std::initializer_list<const char*> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

c10::IntArrayRef sizes_of(const Graph& graph, const Node& node, size_t argument) {
  if (argument >= node.arguments.size() || node.arguments[argument].ids.size() != 1) return {};
  const ValueId id = node.arguments[argument].ids[0];
  return id == graph::kNoValue ? c10::IntArrayRef{} : c10::IntArrayRef(graph.value(id).meta.sizes);
}

double product(c10::IntArrayRef sizes) {
  double all = 1;
  for (const int64_t size : sizes) all *= double(size);
  return all;
}

// [..., k] by [..., k, n], or [n, k] where the second lies as the weights of a Linear do.
double product_flops(c10::IntArrayRef left, c10::IntArrayRef right, bool is_linear) {
  if (left.empty() || right.empty()) return 0;
  return 2 * product(left) * double(is_linear ? right.front() : right.back());
}

double attention_flops(c10::IntArrayRef query, c10::IntArrayRef key, bool is_backward) {
  if (query.size() < 2 || key.size() < 2) return 0;
  const double each = 2 * product(query) * double(key[key.size() - 2]);
  return each * (is_backward ? 5 : 2);
}

double bytes_of(const Graph& graph, const Node& node) {
  double bytes = double(graph::written_bytes(graph, node));
  graph::for_each_operand(node, [&](ValueId id) { bytes += double(graph.value(id).meta.num_bytes()); });
  return bytes;
}

double time_us(const Graph& graph, const Node& node, const simulation::Compute& compute) {
  if (graph::is_view(node.op.schema()) || node.is_wait()) return 0;
  const double computing = flops_of(graph, node) * compute.ns_per_flop.value;
  const double moving = bytes_of(graph, node) * compute.ns_per_byte.value;
  return compute.op_us.value + std::max(computing, moving) / 1e3;
}

class Writer {
 public:
  Writer(const Graph& graph, const std::vector<simulation::Axis>& axes, const simulation::Compute& compute,
         double scale, simulation::Order order)
      : graph_(graph), axes_(axes), compute_(compute), scale_(scale), order_(order) {}

  simulation::Program run() {
    for (const Node& node : graph_.nodes()) {
      if (node.is_collective())
        issue(node);
      else if (node.is_wait())
        wait(node);
      else
        program_.push_back(Action::compute(simulation::time_of_us(time_us(graph_, node, compute_) * scale_)));
    }
    for (const auto& [work, number] : started_) program_.push_back(Action::wait(number));
    return std::move(program_);
  }

 private:
  void issue(const Node& node) {
    const std::string name = node.short_name();
    const std::optional<simulation::Kind> kind = simulation::kind_of(name);
    if (!kind) {
      raise<c10::ValueError>({"plan", "the step calls " + name + ", which is not simulated",
                              "simulate a step of all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, "
                              "reduce, gather, scatter and barrier; pipelines: serried plan --pipeline"});
    }
    program_.push_back(
        Action::issue(axis_of(node), {*kind, graph::collective_bytes(graph_, node), element_of(node), order_}));
    const size_t number = issued_++;
    bool is_started = false;
    graph::for_each_result(node, [&](ValueId id) {
      if (graph_.value(id).kind != graph::ValueKind::work) return;
      started_[id] = number;
      is_started = true;
    });
    if (!is_started) program_.push_back(Action::wait(number));
  }

  void wait(const Node& node) {
    graph::for_each_operand(node, [&](ValueId id) {
      const auto found = started_.find(id);
      if (found == started_.end()) return;
      program_.push_back(Action::wait(found->second));
      started_.erase(found);
    });
  }

  size_t axis_of(const Node& node) const {
    const std::string group = node.group_name();
    std::string known;
    for (size_t axis = 0; axis < axes_.size(); ++axis) {
      if (axes_[axis].name == group) return axis;
      known += (known.empty() ? "" : ", ") + axes_[axis].name;
    }
    raise<c10::ValueError>({"plan",
                            c10::str("the step calls ", node.short_name(), " on the group \"", group,
                                     "\", which is no axis of the mesh: ", known),
                            "give the mesh an axis of that name"});
  }

  int64_t element_of(const Node& node) const {
    int64_t bytes = 4;
    graph::for_each_operand(node, [&](ValueId id) {
      const graph::Value& value = graph_.value(id);
      if (value.kind != graph::ValueKind::work) bytes = int64_t(c10::elementSize(value.meta.dtype));
    });
    return bytes;
  }

  const Graph& graph_;
  const std::vector<simulation::Axis>& axes_;
  const simulation::Compute& compute_;
  const double scale_;
  const simulation::Order order_;
  simulation::Program program_ = {};
  std::map<ValueId, size_t> started_ = {};
  size_t issued_ = 0;
};

}  // namespace

double flops_of(const Graph& graph, const Node& node) {
  const std::string name = node.short_name();
  const auto sizes = [&](size_t argument) { return sizes_of(graph, node, argument); };
  if (is_among(name, {"mm", "bmm", "matmul", "mv"})) return product_flops(sizes(0), sizes(1), false);
  if (name == "linear") return product_flops(sizes(0), sizes(1), true);
  if (is_among(name, {"addmm", "baddbmm", "addbmm"})) return product_flops(sizes(1), sizes(2), false);
  if (name.starts_with("_scaled_dot_product")) {
    const bool is_backward = name.ends_with("_backward");
    return is_backward ? attention_flops(sizes(1), sizes(2), true) : attention_flops(sizes(0), sizes(1), false);
  }
  if (is_among(name, {"convolution", "_convolution", "convolution_backward"})) {
    const bool is_backward = name == "convolution_backward";
    const c10::IntArrayRef weight = sizes(is_backward ? 2 : 1);
    double result = 0;
    if (is_backward) result = product(sizes(0));
    if (!is_backward)
      graph::for_each_result(node, [&](ValueId id) { result += double(product(graph.value(id).meta.sizes)); });
    if (weight.empty() || weight.front() == 0) return 0;
    return 2 * result * product(weight) / double(weight.front()) * (is_backward ? 2 : 1);
  }
  return 0;
}

simulation::Program program_of(const Graph& graph, const std::vector<simulation::Axis>& axes,
                               const GraphJobOptions& options) {
  const simulation::Compute compute = options.compute.value_or(kUsual);
  double scale = 1;
  if (options.step_us) {
    double total = 0;
    for (const Node& node : graph.nodes()) total += node.is_collective() ? 0 : time_us(graph, node, compute);
    scale = total > 0 ? *options.step_us / total : 0;
  }
  return Writer(graph, axes, compute, scale, options.order).run();
}

}  // namespace serried::tools
