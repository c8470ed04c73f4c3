// Facts that a recording relied on, each once.
#include <algorithm>

#include "serried/graph/record/recorder.h"
#include "serried/graph/record/user_hooks.h"

namespace serried::graph {

bool RecordedFact::is_about(const tape::Fact& other) const {
  return other.subject != nullptr && other.subject == fact.subject && other.name == fact.name;
}

bool all_hold(const std::vector<RecordedFact>& facts) {
  return std::all_of(facts.begin(), facts.end(), [](const RecordedFact& fact) { return fact.holds(); });
}

void Recorder::rely_on(tape::Fact fact) {
  const auto is_it = [&](const RecordedFact& recorded) { return recorded.is_about(fact); };
  if (std::any_of(recording_.facts.begin(), recording_.facts.end(), is_it)) return;
  const auto known = std::find_if(known_.begin(), known_.end(), is_it);
  const uint64_t value = known != known_.end() ? known->value : fact.value();
  recording_.facts.push_back({std::move(fact), value});
}

void Recorder::rely_on_now(tape::Fact fact) {
  const uint64_t value = fact.value();
  recording_.facts.push_back({std::move(fact), value});
}

void Recorder::rely_on_life(const std::string& name, std::weak_ptr<const void> object) {
  const auto is_it = [&](const LiveObject& known) {
    return !known.object.owner_before(object) && !object.owner_before(known.object);
  };
  if (std::any_of(recording_.objects.begin(), recording_.objects.end(), is_it)) return;
  recording_.objects.push_back({name, std::move(object)});
}

void Recorder::rely_on_hooks() {
  std::vector<WeakTensor> leaves;
  for (const OuterTensor& outer : recording_.outer_tensors) {
    const at::Tensor t = outer.tensor.lock();
    if (t.defined() && t.requires_grad()) leaves.push_back(outer.tensor);
  }
  rely_on({"changes to hooks on parameters", [leaves = std::move(leaves)] {
             uint64_t changes = 0;
             for (const WeakTensor& leaf : leaves) {
               const at::Tensor t = leaf.lock();
               if (t.defined()) changes += hook_changes(t);
             }
             return changes;
           }});
}

}  // namespace serried::graph
