// How far capture is with one way to call a function: unrecorded, recorded, ready to replay.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "serried/graph/record/handles.h"
#include "serried/graph/record/recorder.h"
#include "serried/graph/replay/effects.h"
#include "serried/graph/replay/guards.h"
#include "serried/graph/replay/program.h"

namespace serried::graph {

/// One recorded call, before it is trusted.
struct Attempt {
  Recording recording = {};
  std::vector<GradientState> before = {};  // the call, of all parameters that were known then
  Effects effects = {};
  std::vector<SpecPtr> output_specs = {};
  std::vector<WeakTensor> results_found = {};   // results that may be tensors of the surroundings
  std::vector<std::string> plain_results = {};  // besides tensors
};

/// Not recorded to the end yet.
struct Unrecorded {};

/// Recorded: one more recording like the last makes a graph.
struct Recorded {
  Attempt last = {};
  int num_recordings = 1;
  bool keeps_inputs = false;                       // only a call with the same inputs may be like the last
  std::shared_ptr<const Recording> confirms = {};  // that of the Ready which this replaces if the next one is like it

  /// With zero_grad() between calls, those that find gradients and those that find none run other ops. Buckets that
  /// were laid out anew, a module in another mode: another program, and no reason to refuse this one.
  bool may_be_like_last(const CallArguments& arguments) const;
};

/// Two recordings agreed.
struct Ready {
  Graph graph;
  Program program;
  StateGuards state_guards;
  Sharing sharing;
  HandleCounts handles;
  Effects effects;
  std::vector<SpecPtr> output_specs;
  std::vector<WeakTensor> results_found;
  GraphHooks hooks;
  std::vector<std::function<void()>> before_replay;
  std::vector<std::function<void()>> after_replay;
  std::vector<std::string> plain_results;
  std::shared_ptr<const Recording> recording;  // one more like it shows which inputs and handles may be others
  std::shared_ptr<void> form = {};             // of the result, without its tensors

  /// `replayable` is the recording of `call` after make_replayable, `graph` that of `replayable` after passes.
  Ready(Attempt call, Recording replayable, Graph graph);

  bool holds(const CallArguments& arguments) const;
  /// Empty where it holds.
  std::string why_not(const CallArguments& arguments) const;
  /// Whether it holds but for inputs that are other tensors than they were, or handles that somebody took or dropped.
  bool lacks_confirmation(const CallArguments& arguments) const;

  /// What the function would return.
  std::vector<at::Tensor> replay(const CallArguments& arguments);

 private:
  /// Of the program's last run.
  at::Tensor result(size_t i) const;
  bool inputs_share_as_recorded(const CallArguments& arguments) const;
};

/// One way to call the function.
struct Entry {
  CallGuards call_guards;
  std::variant<Unrecorded, Recorded, Ready> state = Unrecorded();

  Recorded* recorded() { return std::get_if<Recorded>(&state); }
  Ready* ready() { return std::get_if<Ready>(&state); }
  const Ready* ready() const { return std::get_if<Ready>(&state); }
  /// Null where there is none yet.
  const Recording* last_recording() const;
  /// Of an entry that is ready: what has to hold for a replay.
  std::vector<Guard> guards() const;
  /// Whether a call may replay this, or be one more recording of it.
  bool fits(const CallArguments& arguments) const;
};

}  // namespace serried::graph
