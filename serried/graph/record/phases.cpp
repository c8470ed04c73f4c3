// Walks a recorded graph once in order, for what reads gradients, and once back, for what each node is needed for.
#include "serried/graph/record/phases.h"

#include <algorithm>

namespace serried::graph {
namespace {

// What the data of a value is needed for, as bits.
using Needs = uint8_t;
constexpr Needs kForResult = 1, kForBackward = 2, kForUpdate = 4;

class PhaseFinder {
 public:
  PhaseFinder(Graph& graph, const StepMemory& memory)
      : graph_(graph),
        memory_(memory),
        needs_of_value_(graph.values().size()),
        needs_of_storage_(num_storages()),
        has_gradients_(graph.values().size()),
        storage_has_gradients_(num_storages()),
        is_for_backward_alone_(graph.values().size(), true) {}

  void find() {
    follow_gradients();
    for (ValueId id : graph_.outputs()) {
      if (id != kNoValue) need(id, kForResult);
    }
    for (size_t i = graph_.nodes().size(); i-- > 0;) {
      Node& node = graph_.nodes()[i];
      const Needs needs = needs_of(node);
      if (writes(node, memory_.parameters)) {
        node.phase = Phase::optimizer;
      } else if (node.phase != Phase::backward) {
        node.phase = phase_of(i, needs);
      }
      const Needs passed_on = passed_on_by(node.phase, needs);
      for_each_operand(node, [&](ValueId id) { need(id, passed_on); });
    }
  }

 private:
  size_t num_storages() const {
    int32_t last = -1;
    for (const Value& value : graph_.values()) last = std::max(last, value.storage);
    return size_t(last + 1);
  }

  // Parameters are written with gradients, and are none.
  void follow_gradients() {
    for (int32_t storage : memory_.gradients) storage_has_gradients_[size_t(storage)] = true;
    for (ValueId id : graph_.outputs()) {
      if (id != kNoValue) is_for_backward_alone_[size_t(id)] = false;
    }
    for (const Node& node : graph_.nodes()) {
      const bool is_backward = node.phase == Phase::backward;
      if (is_backward && first_backward_ == SIZE_MAX) first_backward_ = reads_gradients_.size();
      bool reads = is_backward;
      for_each_operand(node, [&](ValueId id) {
        reads |= holds_gradients(id);
        if (!is_backward) is_for_backward_alone_[size_t(id)] = false;
      });
      reads_gradients_.push_back(reads);
      if (!reads) continue;
      for_each_result(node, [&](ValueId id) { has_gradients_[size_t(id)] = !is_parameter(id); });
      for_each_written(node, [&](ValueId id) {
        const int32_t storage = graph_.value(id).storage;
        if (storage >= 0 && !is_parameter(id)) storage_has_gradients_[size_t(storage)] = true;
      });
    }
    if (first_backward_ == SIZE_MAX) first_backward_ = 0;
  }

  bool is_parameter(ValueId id) const { return memory_.parameters.count(graph_.value(id).storage) > 0; }

  bool holds_gradients(ValueId id) const {
    const int32_t storage = graph_.value(id).storage;
    return has_gradients_[size_t(id)] || (storage >= 0 && storage_has_gradients_[size_t(storage)]);
  }

  void need(ValueId id, Needs needs) {
    needs_of_value_[size_t(id)] |= needs;
    const int32_t storage = graph_.value(id).storage;
    if (storage >= 0) needs_of_storage_[size_t(storage)] |= needs;
  }

  Needs needs_of(const Node& node) const {
    Needs needs = 0;
    for_each_result(node, [&](ValueId id) { needs |= needs_of_value_[size_t(id)]; });
    for_each_written(node, [&](ValueId id) {
      const int32_t storage = graph_.value(id).storage;
      if (storage >= 0) needs |= needs_of_storage_[size_t(storage)];
    });
    return needs;
  }

  bool writes(const Node& node, const std::unordered_set<int32_t>& storages) const {
    bool found = false;
    for_each_written(node, [&](ValueId id) { found |= storages.count(graph_.value(id).storage) > 0; });
    return found;
  }

  // What a call to backward() makes before autograd's engine runs.
  bool starts_backward(const Node& node) const {
    bool is_used_there = makes_by_constants(node.op);
    for_each_result(node, [&](ValueId id) {
      is_used_there &= is_for_backward_alone_[size_t(id)] && (needs_of_value_[size_t(id)] & kForBackward) != 0;
    });
    return is_used_there;
  }

  Phase phase_of(size_t i, Needs needs) const {
    const Node& node = graph_.nodes()[i];
    if (needs == kForUpdate) return Phase::optimizer;
    if (writes(node, memory_.gradients)) return Phase::other;
    if (reads_gradients_[i]) {
      if ((needs & kForBackward) != 0) return Phase::forward;  // a penalty on gradients
      return (needs & kForUpdate) != 0 ? Phase::optimizer : Phase::other;
    }
    if (starts_backward(node)) return Phase::backward;
    return (needs & (kForBackward | kForResult)) != 0 || i < first_backward_ ? Phase::forward : Phase::other;
  }

  static Needs passed_on_by(Phase phase, Needs needs) {
    if (phase == Phase::optimizer) return kForUpdate;
    return phase == Phase::backward ? kForBackward : needs;
  }

  Graph& graph_;
  const StepMemory& memory_;
  std::vector<Needs> needs_of_value_, needs_of_storage_;
  std::vector<bool> has_gradients_, storage_has_gradients_;
  std::vector<bool> is_for_backward_alone_;  // per value
  std::vector<bool> reads_gradients_;        // per node
  size_t first_backward_ = SIZE_MAX;         // node
};

}  // namespace

void find_phases(Graph& graph, const StepMemory& memory) {
  PhaseFinder(graph, memory).find();
}

}  // namespace serried::graph
