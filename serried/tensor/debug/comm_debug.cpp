// CommDebugMode: observers of a thread that write down what they are told.
#include "serried/tensor/debug/comm_debug.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/debug/comm_debug_state.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

constexpr std::array kNames{"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce",
                            "gather",     "scatter",    "send",           "recv",       "barrier"};

constinit thread_local CommDebugMode::State* newest = nullptr;

void add_to(std::map<std::string, CommDebugMode::Tally>& tallies, const observe::Call& call) {
  CommDebugMode::Tally& tally = tallies[call.name];
  tally.count += 1;
  tally.bytes += call.bytes;
}

void check_name(std::string_view where, std::string_view name) {
  if (std::find(kNames.begin(), kNames.end(), name) != kNames.end()) return;
  std::vector<std::string> known(kNames.begin(), kNames.end());
  raise<c10::ValueError>({where, c10::str("there is no collective \"", name, "\"; known: ", c10::Join(", ", known)),
                          "pass one of the known names"});
}

bool has_dtensor(c10::ArrayRef<const c10::IValue> values) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined() && dtensor_meta(value.toTensor()) != nullptr) return true;
    if (!value.isTensorList()) continue;
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined() && dtensor_meta(item.toTensor()) != nullptr) return true;
    }
  }
  return false;
}

// Recorded functions that are no ops of the dispatcher (autograd nodes, user ranges) have no operator name.
std::unique_ptr<at::ObserverContext> note_op(const at::RecordFunction& call) {
  const std::optional<c10::OperatorName> op = call.operator_name();
  if (!op) return nullptr;
  const std::string name = c10::toString(*op);
  const bool distributed = has_dtensor(call.inputs());
  for (CommDebugMode::State* state = newest; state != nullptr; state = state->outer) {
    if (!state->op_callback) continue;
    CommDebugMode::OpCount& count = state->ops[name];
    ++(distributed ? count.distributed : count.plain);
  }
  return nullptr;
}

}  // namespace

CommDebugMode::Region& CommDebugMode::State::region(const std::string& path, bool backward) {
  for (Region& each : regions) {
    if (each.path == path && each.backward == backward) return each;
  }
  regions.push_back({path, backward, {}});
  return regions.back();
}

std::map<std::string, CommDebugMode::Tally> CommDebugMode::State::totals() const {
  std::map<std::string, Tally> sums;
  for (const Region& each : regions) {
    for (const auto& [name, tally] : each.calls) {
      sums[name].count += tally.count;
      sums[name].bytes += tally.bytes;
    }
  }
  return sums;
}

CommDebugMode::ModuleCalls CommDebugMode::State::described(const detail::ModuleTracker::Found& found) const {
  const bool is_unknown = found.module == detail::ModuleTracker::kNone;
  return {.path = is_unknown ? "" : tracker->paths()[size_t(found.module)],
          .is_after = found.is_after,
          .is_unknown = is_unknown};
}

void CommDebugMode::State::add(const observe::Call& call) {
  const detail::Where where = detail::current_region();
  add_to(region(where.path, where.backward).calls, call);
  if (!tracker) return;
  const detail::ModuleTracker::Found found = tracker->current();
  ModuleCalls& module = modules.try_emplace({found.module, found.is_after}, described(found)).first->second;
  add_to(where.backward ? module.backward : module.forward, call);
}

CommDebugMode::CommDebugMode(const torch::nn::Module& net, CommDebugOptions options) : CommDebugMode(options) {
  state_->tracker.emplace(net);
  detail::follow_ops();
}

CommDebugMode::CommDebugMode(CommDebugOptions options) : state_(std::make_unique<State>()) {
  State* state = state_.get();
  state->observer.emplace([state](const observe::Call& call) { state->add(call); });
  // One callback serves all nested modes: each op is told once, whoever asked.
  const bool counted_already = [] {
    for (State* each = newest; each != nullptr; each = each->outer) {
      if (each->op_callback) return true;
    }
    return false;
  }();
  if (options.ops) {
    state->op_callback = counted_already
                             ? at::INVALID_CALLBACK_HANDLE
                             : at::addThreadLocalCallback(at::RecordFunctionCallback(note_op).needsInputs(true).scopes(
                                   {at::RecordScope::FUNCTION}));
  }
  state->outer = newest;
  newest = state;
  detail::keep_region_history();
}

CommDebugMode::~CommDebugMode() {
  State** place = &newest;
  while (*place != nullptr && *place != state_.get()) place = &(*place)->outer;
  if (*place != nullptr) *place = state_->outer;
  if (state_->op_callback && *state_->op_callback != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(*state_->op_callback);
  }
  if (state_->tracker) detail::follow_no_ops();
  detail::drop_region_history();
}

int64_t CommDebugMode::count(std::string_view name) const {
  check_name("CommDebugMode::count", name);
  return state_->totals()[std::string(name)].count;
}

int64_t CommDebugMode::count() const {
  int64_t sum = 0;
  for (const auto& [name, tally] : state_->totals()) sum += tally.count;
  return sum;
}

std::map<std::string, int64_t> CommDebugMode::counts() const {
  std::map<std::string, int64_t> result;
  for (const auto& [name, tally] : state_->totals()) result[name] = tally.count;
  return result;
}

int64_t CommDebugMode::bytes(std::string_view name) const {
  check_name("CommDebugMode::bytes", name);
  return state_->totals()[std::string(name)].bytes;
}

int64_t CommDebugMode::bytes() const {
  int64_t sum = 0;
  for (const auto& [name, tally] : state_->totals()) sum += tally.bytes;
  return sum;
}

const std::vector<CommDebugMode::Region>& CommDebugMode::regions() const {
  return state_->regions;
}

std::string CommDebugMode::ModuleCalls::name() const {
  if (is_unknown) return "(no module)";
  return (is_after ? "after " : "") + (path.empty() ? std::string("(net)") : path);
}

std::vector<CommDebugMode::ModuleCalls> CommDebugMode::by_module() const {
  if (!state_->tracker) {
    raise<c10::ValueError>({"CommDebugMode::by_module", "the mode was made without a net, so it knows no modules",
                            "name the net where the mode begins: CommDebugMode comm(*net)"});
  }
  std::vector<ModuleCalls> found;
  for (const auto& [key, module] : state_->modules) found.push_back(module);
  // Numbers go depth first; what belongs to no module comes last.
  std::stable_partition(found.begin(), found.end(), [](const ModuleCalls& each) { return !each.is_unknown; });
  return found;
}

const std::vector<CommDebugMode::Redistribution>& CommDebugMode::redistributions() const {
  return state_->redistributions;
}

const std::map<std::string, int64_t>& CommDebugMode::defaults() const {
  return state_->defaults;
}

const std::map<std::string, CommDebugMode::OpCount>& CommDebugMode::ops() const {
  return state_->ops;
}

CommDebugMode::Scope::Scope(std::string name) : first_node_(detail::enter_region(name)) {}

CommDebugMode::Scope::~Scope() {
  detail::leave_region(first_node_);
}

CommDebugMode::State*& detail::newest_mode() {
  return newest;
}

namespace comm_debug {

void note_redistribution(const std::string& op, const Spec& from, const Placements& to, bool implicit) {
  if (newest == nullptr) [[likely]]
    return;
  const detail::Where where = detail::current_region();
  std::string tensor = from.to_string();
  tensor.resize(std::min(tensor.size(), tensor.find(' ')));
  int64_t bytes = 0;
  for (const spmd::Step& step : redistribution(from, to)) {
    bytes += spmd::bytes_sent(step, from.sizes, from.dtype, from.mesh.shape());
  }
  const CommDebugMode::Redistribution record{.op = op,
                                             .tensor = tensor,
                                             .from = from.placements,
                                             .to = to,
                                             .bytes = bytes,
                                             .implicit = implicit,
                                             .backward = where.backward,
                                             .path = where.path,
                                             .module = {}};
  for (CommDebugMode::State* state = newest; state != nullptr; state = state->outer) {
    state->redistributions.push_back(record);
    if (state->tracker) state->redistributions.back().module = state->described(state->tracker->current()).name();
  }
}

void note_default(const std::string& op) {
  for (CommDebugMode::State* state = newest; state != nullptr; state = state->outer) ++state->defaults[op];
}

}  // namespace comm_debug

std::vector<std::string> ops_without_rule(const std::function<void()>& fn) {
  const CommDebugMode comm;
  fn();
  std::vector<std::string> names;
  for (const auto& [op, count] : comm.defaults()) names.push_back(op);
  return names;
}

}  // namespace serried
