// From eager to recorded to replayed: which of them a call gets.
#include "serried/graph/capture.h"

#include <algorithm>
#include <list>
#include <memory>
#include <thread>
#include <utility>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/graph/record/agree.h"
#include "serried/graph/record/compare.h"
#include "serried/graph/record/inputs.h"
#include "serried/graph/replay/effects.h"
#include "serried/graph/replay/guards.h"
#include "serried/graph/replay/handles.h"
#include "serried/graph/replay/program.h"
#include "serried/graph/replay/sharing.h"
#include "serried/tape/facts.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

constexpr int kMaxRecordings = 4;  // of one program before it counts as a different one each time
constexpr size_t kMaxPending = 8;  // ways to call a function that were recorded once, and may come again

std::vector<at::Tensor> parts_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> parts;
  parts.reserve(tensors.size());
  for (const at::Tensor& t : tensors) parts.push_back(part_of(t));
  return parts;
}

// A replay gives results without an autograd graph, so nobody could call backward on them.
void check_results(Recorder& recorder, const std::vector<at::Tensor>& outputs) {
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].defined() || !outputs[i].requires_grad() || recorder.ran_backward()) continue;
    throw CaptureError({CaptureErrorKind::pending_gradient,
                        "",
                        "",
                        c10::str("result ", i, " ", meta_of(outputs[i]).to_string(),
                                 " requires gradients, and the function calls no backward; a replay returns it without "
                                 "an autograd graph"),
                        {"call backward inside of the captured function",
                         "capture under torch::NoGradGuard, or return result.detach()"}});
  }
}

// What a function returns besides tensors is that of the recording.
void check_plain_results(const std::vector<std::string>& before, const std::vector<std::string>& now) {
  for (size_t i = 0; i < std::min(before.size(), now.size()); ++i) {
    if (before[i] == now[i]) continue;
    throw CaptureError({CaptureErrorKind::changing_scalar,
                        "",
                        "",
                        c10::str("value ", i, " of the result, which is no tensor, was ", before[i],
                                 " in one call and ", now[i], " in the next; a replay would return the last one"),
                        {"return the tensor, and read it outside"}});
  }
}

void check_options(const CaptureOptions& options) {
  const auto check = [](bool is_fine, const std::string& what, const std::string& fix) {
    if (!is_fine) raise<c10::ValueError>({"capture", what, fix});
  };
  check(options.max_graphs >= 1, c10::str("max_graphs is ", options.max_graphs), "keep at least one graph");
  check(options.max_recaptures >= 0, c10::str("max_recaptures is ", options.max_recaptures), "give 0 or more");
  for (size_t i = 0; i < options.modules.size(); ++i) {
    check(options.modules[i] != nullptr, c10::str("modules[", i, "] is null"), "list modules that exist");
  }
  for (size_t i = 0; i < options.optimizers.size(); ++i) {
    check(options.optimizers[i] != nullptr, c10::str("optimizers[", i, "] is null"), "list optimizers that exist");
  }
  for (const Pass& pass : options.passes) {
    check(pass.run != nullptr, c10::str("the pass \"", pass.name, "\" has no function"),
          "give it one, or leave it out");
  }
}

// To be compared once more; what only a replay needs left out.
std::shared_ptr<Recording> copy_to_compare(const Recording& recording) {
  auto copy = std::make_shared<Recording>(recording);
  for (Resident& resident : copy->residents) resident.grad = at::Tensor();
  copy->groups.clear();
  copy->before_replay.clear();
  copy->after_replay.clear();
  return copy;
}

// Sets a flag while alive.
class Busy {
 public:
  explicit Busy(bool& flag) : flag_(flag) { flag_ = true; }
  ~Busy() { flag_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  bool& flag_;
};

}  // namespace

/// One way the function was called: recorded once, or ready to replay.
struct CaptureState::Entry {
  explicit Entry(CallGuards guards) : call_guards(std::move(guards)) {}

  CallGuards call_guards;
  int num_recordings = 0;
  std::optional<Recording> recording;        // the last one, until two agree
  std::vector<GradientState> before;         // that one
  HandleCounts handles;                      // before that one, of what the one before it found
  std::vector<std::string> results;          // of that one, besides tensors
  bool keeps_inputs = false;                 // only a call with the same inputs may be like that one
  std::vector<GradientState> before_last;    // of the recording before that one
  std::vector<std::string> results_of_last;  // of that too
  // Once they do:
  std::unique_ptr<Program> program;
  Graph graph;
  std::optional<StateGuards> state_guards;
  std::optional<Sharing> sharing;
  Effects effects;
  std::vector<SpecPtr> output_specs;
  std::shared_ptr<void> form;
  std::shared_ptr<const Recording> unconfirmed;  // the last one, to be compared with one more
  std::shared_ptr<const Recording> confirms;     // of the entry whose graph this one replaces, if it is like it

  bool is_ready() const { return program != nullptr; }
  bool state_holds(const CallArguments& arguments) const {
    if (!is_ready()) return may_be_like(arguments);
    return state_guards->hold() && effects.hold(arguments.tensors) && inputs_share_as_recorded(arguments) &&
           handles.hold();
  }
  // All that has to hold but that inputs are the tensors that they were, and that nobody has taken or dropped a handle.
  bool needs_confirmation(const CallArguments& arguments) const {
    if (!is_ready() || !call_guards.hold(arguments) || !state_guards->hold() || !effects.hold(arguments.tensors)) {
      return false;
    }
    return inputs_share_as_recorded(arguments) ||
           sharing->fails_by_place(effects.inputs_of(arguments.tensors), arguments.tensors.size());
  }
  std::string why_not(const CallArguments& arguments) const {
    std::string why = state_guards->why_not();
    if (why.empty()) why = effects.why_not(arguments.tensors);
    if (why.empty()) why = sharing->why_not(effects.inputs_of(arguments.tensors), arguments.tensors.size());
    return why.empty() ? handles.why_not() : why;
  }

 private:
  bool inputs_share_as_recorded(const CallArguments& arguments) const {
    if (!effects.has_inputs()) return sharing->holds(arguments.tensors, arguments.tensors.size());
    return sharing->holds(effects.inputs_of(arguments.tensors), arguments.tensors.size());
  }
  // With zero_grad() between calls, those that find gradients and those that find none run other ops. Buckets that were
  // laid out anew, a module in another mode: another program, and no reason to refuse this one.
  bool may_be_like(const CallArguments& arguments) const {
    if (!same_gradients(before) || !recording) return same_gradients(before);
    if (!all_hold(recording->facts) || !is_in_place(*recording)) return false;
    return keeps_inputs ? has_memory_of_inputs(*recording, arguments.tensors) : is_apart(*recording, arguments.tensors);
  }
};

struct CaptureState::Impl {
  CaptureOptions options;
  std::list<Entry> entries;  // the newest used first
  bool is_warm = false;
  bool gave_up = false;
  bool is_busy = false;
  std::thread::id owner;
  FunctionNumbers function;
  int64_t calls = 0;
  int64_t captures = 0;
  int64_t replays = 0;
  int64_t recordings_in_a_row = 0;  // without a replay
  std::string reason;

  void check_caller();
  Entry* find(const CallArguments& arguments);
  void note_reason(const CallArguments& arguments);
  Outcome replay(Entry& entry, const CallArguments& arguments);
  void record(Entry& entry, const CallArguments& arguments, Run run, MakeForm make_form);
  std::vector<GradientState> known_gradients() const;
  std::vector<RecordedFact> known_facts() const;
  void finish(Entry& entry, Recorder& recorder, const CallArguments& arguments, const std::vector<at::Tensor>& outputs);
  void keep_apart(Entry& entry);
  void confirm(Entry& entry, const CallArguments& arguments);
  void replace_confirmed(Entry& entry);
  void compare(Entry& entry, Recording recording, MakeForm make_form);
  bool make_ready(Entry& entry, Recording recording);
  void rely_on_listed(Recorder& recorder) const;
  Entry* add_entry(const CallArguments& arguments);
  void drop_oldest();
  bool is_hopeless() const;
  void refuse(const CaptureError& error);
  void give_up();
};

CaptureState::CaptureState(CaptureOptions options) : impl_(std::make_unique<Impl>()) {
  if (options.dynamic) {
    raise<c10::NotImplementedError>({"capture", "dynamic = true: graphs of varying shapes are not built",
                                     "leave dynamic false: another shape is recorded once and then replayed as well"});
  }
  check_options(options);
  impl_->options = std::move(options);
}

CaptureState::~CaptureState() = default;

void CaptureState::Impl::check_caller() {
  const std::thread::id here = std::this_thread::get_id();
  if (owner == std::thread::id()) owner = here;
  if (owner != here) {
    raise<c10::ValueError>({"capture", "a captured function was called from another thread than before",
                            "capture the function once per thread; ranks that are threads each capture their own"});
  }
  if (is_busy || tape::is_recording()) {
    raise<c10::ValueError>({"capture", "a captured function was called inside of a captured function",
                            "capture the outer function only, and let it call the plain inner one"});
  }
}

// One that replays rather than one that has to be recorded once more.
CaptureState::Entry* CaptureState::Impl::find(const CallArguments& arguments) {
  for (const bool ready : {true, false}) {
    for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
      if (entry->is_ready() != ready || !entry->call_guards.hold(arguments) || !entry->state_holds(arguments)) continue;
      entries.splice(entries.begin(), entries, entry);
      return &entries.front();
    }
  }
  return nullptr;
}

void CaptureState::Impl::note_reason(const CallArguments& arguments) {
  for (const Entry& entry : entries) {
    if (!entry.is_ready()) continue;
    const std::string why = entry.call_guards.why_not(arguments);
    reason = why.empty() ? entry.why_not(arguments) : why;
    return;
  }
}

CaptureState::Outcome CaptureState::Impl::replay(Entry& entry, const CallArguments& arguments) {
  for (const auto& action : entry.recording->before_replay) action();
  Program& program = *entry.program;
  const HooksGuard hooks(entry.recording->hooks);
  const std::vector<at::Tensor> inputs = entry.effects.inputs_of(arguments.tensors);
  entry.effects.free_gradients(inputs);
  try {
    program.run(parts_of(inputs));
  } catch (...) {
    entry.effects.drop_gradients(inputs);
    throw;
  }
  Outcome outcome{.is_replay = true, .outputs = {}, .form = entry.form};
  for (size_t i = 0; i < entry.graph.outputs().size(); ++i) {
    const ValueId id = entry.graph.outputs()[i];
    at::Tensor t = id == kNoValue ? at::Tensor() : program.value(id);
    outcome.outputs.push_back(entry.output_specs[i] ? wrap(t, entry.output_specs[i]) : t);
  }
  entry.effects.apply(program, inputs);
  program.clear();
  for (const auto& action : entry.recording->after_replay) action();
  ++replays;
  recordings_in_a_row = 0;
  return outcome;
}

// Of all parameters met so far: which of them the next recording meets is not known before it.
std::vector<GradientState> CaptureState::Impl::known_gradients() const {
  std::vector<GradientState> states;
  for (const Entry& entry : entries) {
    if (!entry.recording) continue;
    const std::vector<GradientState> more = gradients_of(entry.recording->residents);
    states.insert(states.end(), more.begin(), more.end());
  }
  return states;
}

// How the surroundings are before a recording runs.
std::vector<RecordedFact> CaptureState::Impl::known_facts() const {
  std::vector<RecordedFact> known;
  for (const Entry& entry : entries) {
    if (!entry.recording) continue;
    for (const RecordedFact& known_then : entry.recording->facts) {
      known.push_back({known_then.fact, known_then.fact.value()});
    }
  }
  return known;
}

void CaptureState::Impl::finish(Entry& entry, Recorder& recorder, const CallArguments& arguments,
                                const std::vector<at::Tensor>& outputs) {
  entry.output_specs.clear();
  for (const at::Tensor& t : outputs) {
    recorder.graph().outputs().push_back(recorder.find(part_of(t)));
    entry.output_specs.push_back(spec_of(t));
  }
  recorder.graph().output_layouts() = layouts_of(outputs);
  if (entry.recording) recorder.note_lasting(*entry.recording);
  entry.effects = Effects(recorder, entry.before, arguments.tensors);
}

// False where another rank is not as far: all begin to replay in the same call.
bool CaptureState::Impl::make_ready(Entry& entry, Recording recording) {
  std::shared_ptr<Recording> unconfirmed = copy_to_compare(recording);
  make_replayable(*entry.recording, recording);
  unconfirmed->inputs = recording.inputs;
  Graph graph = recording.graph;
  for (const Pass& pass : options.passes) pass.run(graph);
  entry.effects.drop_unused(graph);
  if (!agree_on_collectives(recording.graph, graph, recording.groups, {function, calls})) return false;
  entry.graph = std::move(graph);
  entry.state_guards.emplace(recording);
  entry.sharing.emplace(recording);
  entry.program = std::make_unique<Program>(entry.graph, recording.groups);
  recording.graph = {};
  recording.groups.clear();
  // A weak reference to a DTensor keeps its part alive (LibTorch frees the storage of a dead tensor, not what is behind
  // it), so those to the gradients of this call go.
  entry.before.clear();
  for (Resident& resident : recording.residents) resident.grad = at::Tensor();
  entry.recording = std::move(recording);
  entry.unconfirmed = std::move(unconfirmed);
  if (!entry.confirms) ++captures;
  replace_confirmed(entry);
  return true;
}

// The same graph for more inputs and handles.
void CaptureState::Impl::replace_confirmed(Entry& entry) {
  const auto is_replaced = [&](const Entry& other) {
    if (!entry.confirms || other.unconfirmed != entry.confirms) return false;
    entry.handles.add(other.handles);
    return true;
  };
  entries.remove_if(is_replaced);
  entry.confirms.reset();
}

// The function finds by itself what was an argument in the other call: neither says anything of the other.
void CaptureState::Impl::keep_apart(Entry& entry) {
  Entry& other = entries.emplace_back(entry.call_guards);
  other.num_recordings = 1;
  other.recording = std::move(entry.recording);
  other.before = entry.before_last;
  other.results = entry.results_of_last;
  other.keeps_inputs = true;
  entry.num_recordings = 1;
}

// Begins an entry with the recording of one that needs no more than another one like it.
void CaptureState::Impl::confirm(Entry& entry, const CallArguments& arguments) {
  for (const Entry& ready : entries) {
    if (!ready.needs_confirmation(arguments)) continue;
    entry.num_recordings = 1;
    entry.recording = *ready.unconfirmed;
    entry.results = ready.results;
    entry.confirms = ready.unconfirmed;
    return;
  }
}

// Two recordings that agree become a graph.
void CaptureState::Impl::compare(Entry& entry, Recording recording, MakeForm make_form) {
  const std::string difference = entry.recording ? first_difference(*entry.recording, recording) : "";
  if (!difference.empty()) entry.confirms.reset();
  if (!difference.empty() && entry.num_recordings >= kMaxRecordings) {
    throw CaptureError({CaptureErrorKind::different_program,
                        "",
                        "",
                        "the function runs other ops each time: " + difference,
                        {"let it do the same at every call: no branch on a counter or on data"}});
  }
  const auto keep_pending = [&](Recording last) {
    tell_ranks(last.groups, {function, calls}, RecordingStatus::pending);
    entry.recording = std::move(last);
  };
  if (!difference.empty() && shares_otherwise(*entry.recording, recording)) keep_apart(entry);
  if (!entry.recording || !difference.empty()) return keep_pending(std::move(recording));
  // A call that changed its own surroundings need not be like the next: DDP lays its buckets out anew. Nor need one
  // that was to confirm a graph.
  const bool may_differ = (entry.confirms || !all_hold(recording.facts)) && entry.num_recordings < kMaxRecordings;
  Recording last = recording;
  try {
    if (make_ready(entry, std::move(recording))) {
      entry.form = make_form();
    } else {
      entry.recording = std::move(last);
    }
  } catch (const CaptureError& error) {
    if (!may_differ || error.report().kind == CaptureErrorKind::different_ranks) throw;
    entry.confirms.reset();
    keep_pending(std::move(last));
  }
}

void CaptureState::Impl::rely_on_listed(Recorder& recorder) const {
  for (const auto& module : options.modules) {
    recorder.rely_on_now(tape::training_mode("the module " + module->name(), module));
    recorder.rely_on_now(tape::contents_of("the module " + module->name(), module));
  }
  for (size_t i = 0; i < options.optimizers.size(); ++i) {
    recorder.rely_on_now(tape::groups_of(c10::str("optimizers[", i, "]"), *options.optimizers[i]));
  }
}

void CaptureState::Impl::record(Entry& entry, const CallArguments& arguments, Run run, MakeForm make_form) {
  ++recordings_in_a_row;
  entry.before_last = std::exchange(entry.before, known_gradients());
  if (entry.recording) entry.handles = HandleCounts(*entry.recording);
  Recorder recorder(arguments.tensors, known_facts());
  recorder.graph().input_layouts() = layouts_of(arguments.tensors);
  rely_on_listed(recorder);
  try {
    FlatValues result;
    {
      const tape::Scope scope(recorder);
      result = run();
    }
    recorder.raise_refusal();
    check_results(recorder, result.tensors);
    if (entry.recording) check_plain_results(entry.results, result.constants);
    entry.results_of_last = std::exchange(entry.results, std::move(result.constants));
    finish(entry, recorder, arguments, result.tensors);
    ++entry.num_recordings;
    compare(entry, recorder.take(), make_form);
  } catch (const CaptureError&) {
    const bool stays_eager = options.when_refused == WhenRefused::run_eager;
    tell_ranks(recorder.groups(), {function, calls}, stays_eager ? RecordingStatus::eager : RecordingStatus::refused);
    throw;
  } catch (...) {
    tell_ranks(recorder.groups(), {function, calls}, RecordingStatus::pending);
    throw;
  }
}

void CaptureState::Impl::refuse(const CaptureError& error) {
  entries.clear();
  if (options.when_refused == WhenRefused::raise) throw error;
  gave_up = true;
  log::warn_once(std::string(error.what_without_backtrace()) + "\n  the function runs eagerly from now on");
}

CaptureState::Entry* CaptureState::Impl::add_entry(const CallArguments& arguments) {
  // Graphs of what is gone would keep memory for nothing.
  entries.remove_if([](const Entry& entry) { return entry.is_ready() && !entry.state_guards->may_hold_again(); });
  entries.emplace_front(CallGuards(arguments));
  confirm(entries.front(), arguments);
  return &entries.front();
}

// Of the graphs, and of what may become one.
void CaptureState::Impl::drop_oldest() {
  size_t num_ready = 0, num_pending = 0;
  for (auto entry = entries.begin(); entry != entries.end();) {
    const bool is_one_too_many =
        entry->is_ready() ? ++num_ready > size_t(options.max_graphs) : ++num_pending > kMaxPending;
    entry = is_one_too_many ? entries.erase(entry) : std::next(entry);
  }
}

bool CaptureState::Impl::is_hopeless() const {
  return captures > options.max_recaptures || recordings_in_a_row > options.max_recaptures + kMaxRecordings;
}

void CaptureState::Impl::give_up() {
  gave_up = true;
  entries.clear();
  const std::string why = reason.empty() ? "" : ", the last time because " + reason;
  log::warn_once(c10::str("[capture] recorded again and again, ", captures, " times to the end", why,
                          "; the function runs eagerly from now on\n  fix: call it with few different shapes, or raise "
                          "CaptureOptions::max_recaptures"));
}

CallArguments CaptureState::new_call() const {
  CallArguments arguments;
  for (const Watched& variable : impl_->options.watch) arguments.watched.push_back({&variable.name(), variable.text()});
  return arguments;
}

CaptureState::Outcome CaptureState::call(const CallArguments& arguments, Run run, MakeForm make_form) {
  Impl& self = *impl_;
  self.check_caller();
  const Busy busy(self.is_busy);
  ++self.calls;
  if (!self.is_warm || self.gave_up) {
    run();
    self.is_warm = true;
    return {};
  }
  Entry* entry = self.find(arguments);
  if (entry != nullptr && entry->is_ready()) return self.replay(*entry, arguments);
  if (entry == nullptr) {
    self.note_reason(arguments);
    if (self.is_hopeless()) {
      self.give_up();
      run();
      return {};
    }
    entry = self.add_entry(arguments);
  }
  try {
    self.record(*entry, arguments, run, make_form);
    self.drop_oldest();
  } catch (const CaptureError& error) {
    self.refuse(error);
  } catch (...) {
    self.entries.pop_front();
    throw;
  }
  return {};
}

int64_t CaptureState::captures() const {
  return impl_->captures;
}

int64_t CaptureState::replays() const {
  return impl_->replays;
}

const std::string& CaptureState::last_recapture_reason() const {
  return impl_->reason;
}

const Graph& CaptureState::graph() const {
  for (const Entry& entry : impl_->entries) {
    if (entry.is_ready()) return entry.graph;
  }
  raise<c10::ValueError>({"capture", "there is no graph yet", "call the captured function three times first"});
}

std::vector<Guard> CaptureState::guards() const {
  for (const Entry& entry : impl_->entries) {
    if (!entry.is_ready()) continue;
    std::vector<Guard> guards = entry.call_guards.list();
    const std::vector<Guard> state = entry.state_guards->list();
    guards.insert(guards.end(), state.begin(), state.end());
    return guards;
  }
  return {};
}

}  // namespace serried::graph
