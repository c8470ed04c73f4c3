// What each state asks of a call, and how a ready one replays.
#include "serried/graph/capture_states.h"

#include <utility>

#include "serried/graph/record/compare.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

std::vector<at::Tensor> parts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  parts.reserve(tensors.size());
  for (const at::Tensor& t : tensors) parts.push_back(part_of(t));
  return parts;
}

// To be compared with one more; what only a replay needs left out. A weak reference to a DTensor keeps its part alive
// (LibTorch frees the storage of a dead tensor, not what is behind it), so those to the gradients of the call go too.
std::shared_ptr<const Recording> to_compare(Recording recording, std::vector<InputPlace> inputs) {
  for (OuterTensor& outer : recording.outer_tensors) outer.grad = at::Tensor();
  recording.inputs = std::move(inputs);
  recording.kept.clear();
  recording.groups.clear();
  recording.before_replay.clear();
  recording.after_replay.clear();
  return std::make_shared<const Recording>(std::move(recording));
}

}  // namespace

bool Recorded::may_be_like_last(const CallArguments& arguments) const {
  const Recording& recording = last.recording;
  if (!same_gradients(last.before) || !all_hold(recording.facts) || !is_in_place(recording)) return false;
  return keeps_inputs ? has_memory_of_inputs(recording, arguments.tensors) : is_apart(recording, arguments.tensors);
}

Ready::Ready(Attempt call, Recording replayable, Graph graph_)
    : graph(std::move(graph_)),
      program(graph, replayable.groups, replayable.generators),
      state_guards(replayable),
      sharing(replayable),
      effects(std::move(call.effects)),
      output_specs(std::move(call.output_specs)),
      results_found(std::move(call.results_found)),
      hooks(std::move(replayable.hooks)),
      before_replay(std::move(replayable.before_replay)),
      after_replay(std::move(replayable.after_replay)),
      plain_results(std::move(call.plain_results)),
      recording(to_compare(std::move(call.recording), std::move(replayable.inputs))) {}

bool Ready::inputs_share_as_recorded(const CallArguments& arguments) const {
  if (!effects.has_inputs()) return sharing.holds(arguments.tensors, arguments.tensors.size());
  return sharing.holds(effects.inputs_of(arguments.tensors), arguments.tensors.size());
}

bool Ready::holds(const CallArguments& arguments) const {
  return state_guards.hold() && effects.hold(arguments.tensors) && inputs_share_as_recorded(arguments) &&
         handles.hold();
}

std::string Ready::why_not(const CallArguments& arguments) const {
  std::string why = state_guards.why_not();
  if (why.empty()) why = effects.why_not(arguments.tensors);
  if (why.empty()) why = sharing.why_not(effects.inputs_of(arguments.tensors), arguments.tensors.size());
  return why.empty() ? handles.why_not() : why;
}

bool Ready::lacks_confirmation(const CallArguments& arguments) const {
  if (!state_guards.hold() || !effects.hold(arguments.tensors)) return false;
  return inputs_share_as_recorded(arguments) ||
         sharing.fails_by_place(effects.inputs_of(arguments.tensors), arguments.tensors.size());
}

at::Tensor Ready::result(size_t i) const {
  const ValueId id = graph.outputs()[i];
  if (id == kNoValue) return {};
  const bool is_found = graph.value(id).kind == ValueKind::persistent;
  const at::Tensor found = is_found ? results_found[i].lock() : at::Tensor();
  if (found.defined()) return found;
  return output_specs[i] ? wrap(program.value(id), output_specs[i]) : program.value(id);
}

std::vector<at::Tensor> Ready::replay(const CallArguments& arguments) {
  // Its ops are those of no module: in what order they run, and in which pass, says the graph alone.
  const comm_debug::OnBehalf no_module([](auto) {});
  for (const auto& action : before_replay) action();
  const HooksScope hooks_of_graph(hooks);
  const std::vector<at::Tensor> inputs = effects.inputs_of(arguments.tensors);
  effects.free_gradients(inputs);
  try {
    program.run(parts_of(inputs));
  } catch (...) {
    effects.drop_gradients(inputs);
    throw;
  }
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < graph.outputs().size(); ++i) outputs.push_back(result(i));
  effects.apply(program, inputs);
  program.clear();
  for (const auto& action : after_replay) action();
  return outputs;
}

const Recording* Entry::last_recording() const {
  if (const Ready* found = ready()) return found->recording.get();
  const Recorded* found = std::get_if<Recorded>(&state);
  return found != nullptr ? &found->last.recording : nullptr;
}

bool Entry::fits(const CallArguments& arguments) const {
  if (!call_guards.hold(arguments)) return false;
  if (const Ready* found = ready()) return found->holds(arguments);
  const Recorded* found = std::get_if<Recorded>(&state);
  return found == nullptr || found->may_be_like_last(arguments);
}

std::vector<Guard> Entry::guards() const {
  std::vector<Guard> guards = call_guards.list();
  const std::vector<Guard> of_state = ready()->state_guards.list();
  guards.insert(guards.end(), of_state.begin(), of_state.end());
  return guards;
}

}  // namespace serried::graph
