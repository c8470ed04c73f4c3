// From eager to recorded to replayed: which of them a call gets.
#include "serried/graph/capture.h"

#include <algorithm>
#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include <c10/core/AutogradState.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/base/text.h"
#include "serried/base/trace.h"
#include "serried/comm/collectives/watch.h"
#include "serried/graph/capture_states.h"
#include "serried/graph/record/agree.h"
#include "serried/graph/record/argument_watch.h"
#include "serried/graph/record/compare.h"
#include "serried/graph/record/handles.h"
#include "serried/graph/record/hooks.h"
#include "serried/graph/record/optimizer_steps.h"
#include "serried/graph/record/stale_numbers.h"
#include "serried/graph/text/report.h"
#include "serried/graph/text/text.h"
#include "serried/tape/facts.h"
#include "serried/tape/module_options.h"
#include "serried/tensor/parts.h"

namespace serried::graph {
namespace {

constexpr int kMaxRecordings = 4;  // of one program before it counts as a different one each time
constexpr int kMinRecorded = 8;    // ways to call a function that were recorded once, and may come again

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

// A number that was read from a tensor may differ in the next call, even if it was equal in two.
void check_numbers_read(const Recorder& recorder) {
  if (recorder.host_reads().empty()) return;
  throw CaptureError(
      {CaptureErrorKind::host_read,
       recorder.host_reads().front().op,
       "",
       "the function reads a number from a tensor and returns values that are no tensors; a replay would "
       "return those of the recording",
       {"return the tensor, and read it outside"}});
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

// What the function made loses its history, as in a replay: what autograd has kept for it is gone then, and does not
// look as if the surroundings held it.
void note_results(Recorder& recorder, std::vector<at::Tensor>& results, Attempt& call) {
  for (at::Tensor& t : results) {
    const ValueId id = recorder.find(part_of(t));
    const ValueKind kind = id == kNoValue ? ValueKind::constant : recorder.value(id).kind;
    recorder.graph().outputs().push_back(id);
    call.output_specs.push_back(spec_of(t));
    call.results_found.push_back(kind == ValueKind::persistent ? t : at::Tensor());
    if (kind == ValueKind::computed && !t.is_leaf()) t = t.detach();
  }
  recorder.graph().output_layouts() = layouts_of(results);
}

// While alive a view holds no more than its base, unless DTensors are met: these ask for views that can be replayed as
// they are made, and the way back from such a view holds what it was taken from.
class PlainViews {
 public:
  PlainViews() : were_replayed_(state().get_view_replay_enabled()) { state().set_view_replay_enabled(false); }
  ~PlainViews() {
    if (were_replayed_) state().set_view_replay_enabled(true);
  }
  PlainViews(const PlainViews&) = delete;
  PlainViews& operator=(const PlainViews&) = delete;

 private:
  static c10::AutogradState& state() { return c10::AutogradState::get_tls_state(); }
  const bool were_replayed_;
};

int64_t next_number() {
  static std::atomic<int64_t> last = 0;
  return ++last;
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

struct CaptureState::Impl {
  enum class Stage : uint8_t {
    first_call,  // runs as it is: optimizer state comes to life
    capturing,
    eager,  // for good: refused, or recorded too often
  };

  CaptureOptions options;
  Stage stage = Stage::first_call;
  std::list<Entry> entries;  // the newest used first
  bool is_busy = false;
  std::thread::id owner;
  FunctionNumbers function;
  const int64_t number = next_number();  // in this process, for the log
  int64_t calls = 0;
  int64_t captures = 0;
  int64_t replays = 0;
  int64_t recordings_in_a_row = 0;  // without a replay
  std::string reason;

  void check_caller();
  template <class... Parts>
  void log_call(const Parts&... parts) const {
    log::line(log::Topic::graph, "call ", calls, " of function ", number, " ", parts...);
  }
  Entry* find(const CallArguments& arguments);
  void note_reason(const CallArguments& arguments);
  Outcome replay(Ready& ready, const CallArguments& arguments);
  Entry& add_entry(const CallArguments& arguments);
  std::vector<GradientState> known_gradients() const;
  std::vector<RecordedFact> known_facts() const;
  OptimizerSteps rely_on_listed(Recorder& recorder) const;
  void record(Entry& entry, const CallArguments& arguments, const Typed& typed);
  void add(Entry& entry, Attempt call, HandleCounts handles, MakeForm make_form);
  void add_different(Entry& entry, Attempt call, const std::string& difference);
  void keep_recorded(Entry& entry, Recorded recorded);
  std::optional<Ready> make_ready(const Recording& before, Attempt call);
  void put_ready(Entry& entry, Ready ready);
  void log_graph(const Entry& entry) const;
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

// The entry that fits the call: one that is ready to replay, if there is one, else one that needs another recording.
Entry* CaptureState::Impl::find(const CallArguments& arguments) {
  for (const bool ready : {true, false}) {
    for (auto entry = entries.begin(); entry != entries.end(); ++entry) {
      if ((entry->ready() != nullptr) != ready || !entry->fits(arguments)) continue;
      entries.splice(entries.begin(), entries, entry);
      return &entries.front();
    }
  }
  return nullptr;
}

void CaptureState::Impl::note_reason(const CallArguments& arguments) {
  for (const Entry& entry : entries) {
    if (entry.ready() == nullptr) continue;
    const std::string why = entry.call_guards.why_not(arguments);
    reason = why.empty() ? entry.ready()->why_not(arguments) : why;
    log_call("is recorded anew", reason.empty() ? "" : ": ", reason);
    return;
  }
}

CaptureState::Outcome CaptureState::Impl::replay(Ready& ready, const CallArguments& arguments) {
  if (recordings_in_a_row > 0) log_call("replays its graph of ", ready.graph.nodes().size(), " ops, as later ones do");
  const trace::Span span("replay", "replay");
  const watch::Replaying replaying;
  Outcome outcome{.is_replay = true, .outputs = ready.replay(arguments), .form = ready.form};
  ++replays;
  recordings_in_a_row = 0;
  return outcome;
}

// A new entry. Where a graph would hold but for inputs or handles that are others now, its recording counts as the
// first of the two that the entry needs.
Entry& CaptureState::Impl::add_entry(const CallArguments& arguments) {
  // Graphs of what is gone would keep memory for nothing.
  entries.remove_if(
      [](const Entry& entry) { return entry.ready() != nullptr && !entry.ready()->state_guards.may_hold_again(); });
  Entry added{CallGuards(arguments)};
  for (const Entry& entry : entries) {
    const Ready* ready = entry.ready();
    if (ready == nullptr || !entry.call_guards.hold(arguments) || !ready->lacks_confirmation(arguments)) continue;
    added.state = Recorded{.last = {.recording = *ready->recording, .plain_results = ready->plain_results},
                           .confirms = ready->recording};
    break;
  }
  return entries.emplace_front(std::move(added));
}

// Gradients of all parameters met so far: which of them the next recording meets is not known before it.
std::vector<GradientState> CaptureState::Impl::known_gradients() const {
  std::vector<GradientState> states;
  for (const Entry& entry : entries) {
    const Recording* recording = entry.last_recording();
    if (recording == nullptr) continue;
    const std::vector<GradientState> more = gradients_of(recording->outer_tensors);
    states.insert(states.end(), more.begin(), more.end());
  }
  return states;
}

// How the surroundings are before a recording runs.
std::vector<RecordedFact> CaptureState::Impl::known_facts() const {
  std::vector<RecordedFact> known;
  for (const Entry& entry : entries) {
    const Recording* recording = entry.last_recording();
    if (recording == nullptr) continue;
    for (const RecordedFact& then : recording->facts) known.push_back({then.fact, then.fact.value()});
  }
  return known;
}

OptimizerSteps CaptureState::Impl::rely_on_listed(Recorder& recorder) const {
  for (const auto& module : options.modules) {
    recorder.rely_on_now(tape::training_mode("the module " + module->name(), module));
    recorder.rely_on_now(tape::contents_of("the module " + module->name(), module));
    recorder.rely_on_now(tape::options_of("the module " + module->name(), module));
  }
  for (size_t i = 0; i < options.optimizers.size(); ++i) {
    recorder.rely_on_now(tape::groups_of(c10::str("optimizers[", i, "]"), *options.optimizers[i]));
  }
  return OptimizerSteps(options.optimizers);
}

void CaptureState::Impl::record(Entry& entry, const CallArguments& arguments, const Typed& typed) {
  ++recordings_in_a_row;
  const Recorded* recorded = entry.recorded();
  Attempt call{.before = known_gradients()};
  HandleCounts handles = recorded != nullptr ? HandleCounts(recorded->last.recording) : HandleCounts();
  Recorder recorder(arguments.tensors, known_facts());
  recorder.graph().input_layouts() = layouts_of(arguments.tensors);
  const OptimizerSteps steps = rely_on_listed(recorder);
  const PlainViews plain_views;
  const ArgumentWatch watch(arguments);
  const ArgumentHandles argument_handles(arguments.tensors);
  try {
    FlatValues result;
    {
      const tape::Scope scope(recorder);
      result = typed.run();
    }
    recorder.raise_refusal();
    watch.check(recorder, typed.flatten());
    check_results(recorder, result.tensors);
    if (recorded != nullptr) check_plain_results(recorded->last.plain_results, result.constants);
    if (recorded != nullptr && typed.returns_plain_values) check_numbers_read(recorder);
    call.plain_results = std::move(result.constants);
    note_results(recorder, result.tensors, call);
    typed.refill(result.tensors);
    recorder.note_kept(argument_handles.kept_now(recorder, result.tensors));
    if (recorded != nullptr) recorder.note_lasting(recorded->last.recording);
    steps.repeat_at_replays(recorder);
    call.effects = Effects(recorder, call.before, arguments.tensors);
    call.recording = recorder.take();
    log_call("was recorded: ", call.recording.graph.nodes().size(), " ops, ", call.recording.graph.collectives().size(),
             " of them collectives");
    add(entry, std::move(call), std::move(handles), typed.make_form);
  } catch (const CaptureError&) {
    const bool stays_eager = options.when_refused == WhenRefused::run_eager;
    tell_ranks(recorder.groups(), {function, calls}, stays_eager ? RecordingStatus::eager : RecordingStatus::refused);
    throw;
  } catch (...) {
    tell_ranks(recorder.groups(), {function, calls}, RecordingStatus::pending);
    throw;
  }
}

// Two recordings that agree become a graph.
void CaptureState::Impl::add(Entry& entry, Attempt call, HandleCounts handles, MakeForm make_form) {
  const Recorded* recorded = entry.recorded();
  if (recorded == nullptr) return keep_recorded(entry, {.last = std::move(call)});
  const std::string difference = first_difference(recorded->last.recording, call.recording);
  if (!difference.empty()) return add_different(entry, std::move(call), difference);
  Recorded next{.num_recordings = recorded->num_recordings + 1, .keeps_inputs = recorded->keeps_inputs};
  // A call that changed its own surroundings need not be like the next: DDP lays its buckets out anew. Nor need one
  // that was to confirm a graph.
  const bool may_differ =
      (recorded->confirms || !all_hold(call.recording.facts)) && next.num_recordings < kMaxRecordings;
  try {
    if (std::optional<Ready> ready = make_ready(recorded->last.recording, call)) {
      ready->handles = std::move(handles);
      ready->form = make_form();
      if (captures == 0) {
        warn_of_stale_numbers(call.recording);
        if (options.optimizers.empty() && options.watch.empty()) warn_of_constant_rate(call.recording.graph);
      }
      return put_ready(entry, std::move(*ready));
    }
  } catch (const CaptureError& error) {
    if (!may_differ || error.report().kind == CaptureErrorKind::different_ranks) throw;
    next.last = std::move(call);
    return keep_recorded(entry, std::move(next));
  }
  next.last = std::move(call);
  next.confirms = recorded->confirms;
  entry.state = std::move(next);
}

void CaptureState::Impl::add_different(Entry& entry, Attempt call, const std::string& difference) {
  Recorded& recorded = *entry.recorded();
  Recorded next{
      .last = std::move(call), .num_recordings = recorded.num_recordings + 1, .keeps_inputs = recorded.keeps_inputs};
  if (next.num_recordings >= kMaxRecordings) {
    refuse_hooks_left(next.last.recording);
    std::vector<std::string> hints = {"let it do the same at every call: no branch on a counter or on data"};
    if (next.last.recording.ran_backward) {
      hints.push_back("let it find gradients in one state: zero them in one way, best by zero_grad() inside");
    }
    throw CaptureError({CaptureErrorKind::different_program, "", "",
                        "the function runs other ops each time: " + difference, std::move(hints)});
  }
  // The function finds by itself what was an argument in the other call: neither says anything of the other.
  if (shares_otherwise(recorded.last.recording, next.last.recording)) {
    next.num_recordings = 1;
    entries.push_back({entry.call_guards, Recorded{.last = std::move(recorded.last), .keeps_inputs = true}});
  }
  keep_recorded(entry, std::move(next));
}

void CaptureState::Impl::keep_recorded(Entry& entry, Recorded recorded) {
  tell_ranks(recorded.last.recording.groups, {function, calls}, RecordingStatus::pending);
  recorded.last.recording.kept.clear();
  entry.state = std::move(recorded);
}

// None where another rank needs one more recording: all begin to replay in the same call.
std::optional<Ready> CaptureState::Impl::make_ready(const Recording& before, Attempt call) {
  Recording replayable = call.recording;
  make_replayable(before, replayable);
  refuse_kept(replayable);
  refuse_hooks_left(replayable);
  replayable.kept.clear();
  Graph graph = replayable.graph;
  for (const Pass& pass : options.passes) pass.run(graph);
  call.effects.drop_unused(graph);
  const RankedGraphs graphs{replayable.graph, graph, replayable.groups, replayable.together};
  if (!agree_on_collectives(graphs, {function, calls})) return std::nullopt;
  return Ready(std::move(call), std::move(replayable), std::move(graph));
}

// Replaces the graph that it confirms, which is the same but holds for fewer inputs and handles.
void CaptureState::Impl::put_ready(Entry& entry, Ready ready) {
  const std::shared_ptr<const Recording> confirms = entry.recorded()->confirms;
  if (!confirms) ++captures;
  entries.remove_if([&](const Entry& other) {
    if (!confirms || other.ready() == nullptr || other.ready()->recording != confirms) return false;
    ready.handles.add(other.ready()->handles);
    return true;
  });
  entry.state = std::move(ready);
  if (log::enabled(log::Topic::graph)) log_graph(entry);
}

void CaptureState::Impl::log_graph(const Entry& entry) const {
  const GraphReport costs = report(entry.ready()->graph);
  std::map<std::string, int64_t> guards;  // a model has many parameters of one shape
  for (const Guard& guard : entry.guards()) ++guards[guard.name + ": " + guard.expected];
  std::string text;
  for (const auto& [guard, count] : guards)
    text += "\n  " + guard + (count == 1 ? "" : c10::str(", ", count, " times"));
  log_call("gave a graph of ", costs.num_ops, " ops, which gives ",
           serried::detail::bytes_text(costs.collective_bytes()), " to collectives and holds while these do:", text);
}

void CaptureState::Impl::refuse(const CaptureError& error) {
  entries.clear();
  if (options.when_refused == WhenRefused::raise) throw error;
  stage = Stage::eager;
  log::warn_once(std::string(error.what_without_backtrace()) + "\n  the function runs eagerly from now on");
}

// Keeps max_graphs of the graphs, and as many recordings that may become one.
void CaptureState::Impl::drop_oldest() {
  size_t num_ready = 0, num_recorded = 0;
  for (auto entry = entries.begin(); entry != entries.end();) {
    const bool is_one_too_many = entry->ready() != nullptr
                                     ? ++num_ready > size_t(options.max_graphs)
                                     : ++num_recorded > size_t(std::max(options.max_graphs, kMinRecorded));
    entry = is_one_too_many ? entries.erase(entry) : std::next(entry);
  }
}

bool CaptureState::Impl::is_hopeless() const {
  return captures > options.max_recaptures || recordings_in_a_row > options.max_recaptures + kMaxRecordings;
}

void CaptureState::Impl::give_up() {
  stage = Stage::eager;
  entries.clear();
  const std::string why = reason.empty() ? "" : ", the last time because " + reason;
  log::warn_once(c10::str("[capture] recorded again and again, ", captures, " times to the end", why,
                          "; the function runs eagerly from now on\n  fix: call it with few different shapes, or raise "
                          "CaptureOptions::max_recaptures"));
}

CallArguments CaptureState::new_call() const {
  CallArguments arguments;
  for (const Watched& variable : impl_->options.watch) {
    arguments.watched.push_back({&variable.name(), variable.text(), variable.identities()});
  }
  return arguments;
}

CaptureState::Outcome CaptureState::call(const CallArguments& arguments, const Typed& typed) {
  Impl& self = *impl_;
  self.check_caller();
  const Busy busy(self.is_busy);
  ++self.calls;
  if (self.stage != Impl::Stage::capturing) {
    typed.run();
    if (self.stage == Impl::Stage::first_call) {
      self.log_call("ran as it is");
      self.stage = Impl::Stage::capturing;
    }
    return {};
  }
  Entry* entry = self.find(arguments);
  if (entry != nullptr && entry->ready() != nullptr) return self.replay(*entry->ready(), arguments);
  if (entry == nullptr) {
    self.note_reason(arguments);
    if (self.is_hopeless()) {
      self.give_up();
      typed.run();
      return {};
    }
    entry = &self.add_entry(arguments);
  }
  try {
    self.record(*entry, arguments, typed);
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
    if (entry.ready() != nullptr) return entry.ready()->graph;
  }
  raise<c10::ValueError>({"capture", "there is no graph yet", "call the captured function three times first"});
}

std::vector<Guard> CaptureState::guards() const {
  for (const Entry& entry : impl_->entries) {
    if (entry.ready() != nullptr) return entry.guards();
  }
  return {};
}

}  // namespace serried::graph
