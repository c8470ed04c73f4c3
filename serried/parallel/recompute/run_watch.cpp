// Which operands of an op are read, written, made or drawn.
#include "serried/parallel/recompute/run_watch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/enum_tag.h>
#include <ATen/ops/clone.h>

#include <algorithm>
#include <mutex>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/comm/groups/live_groups.h"
#include "serried/tape/state_update.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/meta.h"

namespace serried::detail {

using c10::IValue;
using torch::jit::Stack;

/// What the schema of an op says, looked at once.
struct OpTraits {
  explicit OpTraits(const c10::OperatorHandle& op);

  bool writes(size_t argument, at::ArrayRef<IValue> arguments) const;
  bool draws(at::ArrayRef<IValue> arguments) const;
  at::Generator generator(at::ArrayRef<IValue> arguments) const;

  std::vector<bool> is_written;
  bool writes_any = false;
  bool is_view = false;
  bool communicates = false;  // maybe
  bool is_random = false;
  int generator_at = -1, dropout_at = -1, training_at = -1;
  int running_mean_at = -1, running_var_at = -1;
};

namespace {

// In elements: what every op costs, and one that waits for other ranks.
constexpr int64_t kWorkOfCall = 1 << 9;
constexpr int64_t kWorkOfCollective = 1 << 20;

int index_of(const c10::FunctionSchema& schema, const char* name) {
  return schema.argumentIndexWithName(name).value_or(-1);
}

const OpTraits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, OpTraits> known;
  const auto found = known.find(&op.schema());
  return found != known.end() ? found->second : known.emplace(&op.schema(), OpTraits(op)).first->second;
}

template <class Fn>
void for_each_tensor_in(const IValue& value, Fn&& fn) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) fn(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) {
      if (t.defined()) fn(t);
    }
  } else if (value.isList()) {
    for (const IValue& element : value.toListRef()) for_each_tensor_in(element, fn);
  }
}

template <class Fn>
IValue with_each_tensor(const IValue& value, Fn&& fn) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(fn(value.toTensor())) : value;
  if (!value.isTensorList()) return value;
  c10::List<at::Tensor> list;
  for (const at::Tensor& t : value.toTensorVector()) list.push_back(fn(t));
  return list;
}

const c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.has_storage() ? t.storage().unsafeGetStorageImpl() : nullptr;
}

std::vector<const c10::StorageImpl*> storages_of(at::ArrayRef<IValue> values) {
  std::vector<const c10::StorageImpl*> storages;
  for (const IValue& value : values) {
    for_each_tensor_in(value, [&](const at::Tensor& t) { storages.push_back(storage_of(t)); });
  }
  return storages;
}

at::Tensor state_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

OpTraits::OpTraits(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  for (const c10::Argument& argument : schema.arguments()) {
    is_written.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
    if (argument.type()->str().find("Generator") != std::string::npos) generator_at = int(is_written.size()) - 1;
  }
  running_mean_at = index_of(schema, "running_mean");
  running_var_at = index_of(schema, "running_var");
  dropout_at = index_of(schema, "dropout_p");
  training_at = index_of(schema, "training") >= 0 ? index_of(schema, "training") : index_of(schema, "train");
  writes_any = running_mean_at >= 0 || std::find(is_written.begin(), is_written.end(), true) != is_written.end();
  const auto& returns = schema.returns();
  is_view = !writes_any && std::any_of(returns.begin(), returns.end(),
                                       [](const c10::Argument& each) { return each.alias_info() != nullptr; });
  communicates = !schema.name().starts_with("aten::");
  is_random = generator_at >= 0 || op.hasTag(at::Tag::nondeterministic_seeded);
}

// Batch norm writes its running statistics in training, and reads them else, whatever the schema says.
bool OpTraits::writes(size_t argument, at::ArrayRef<IValue> arguments) const {
  const bool is_statistic = int(argument) == running_mean_at || int(argument) == running_var_at;
  if (is_statistic && training_at >= 0) return arguments[training_at].isBool() && arguments[training_at].toBool();
  return is_written[argument];
}

bool OpTraits::draws(at::ArrayRef<IValue> arguments) const {
  if (!is_random) return false;
  if (dropout_at >= 0 && arguments[dropout_at].isDouble() && arguments[dropout_at].toDouble() == 0) return false;
  return training_at < 0 || !arguments[training_at].isBool() || arguments[training_at].toBool();
}

at::Generator OpTraits::generator(at::ArrayRef<IValue> arguments) const {
  const bool is_given = generator_at >= 0 && arguments[generator_at].isGenerator();
  const at::Generator given = is_given ? arguments[generator_at].toGenerator() : at::Generator();
  return given.defined() ? given : at::detail::getDefaultCPUGenerator();
}

NotedTensor::NotedTensor(const c10::TensorImpl& t, const c10::VariableVersion& counter_)
    : counter(counter_),
      version(counter.enabled() ? counter.current_version() : 0),
      sizes(t.sizes()),
      dtype(c10::typeMetaToScalarType(t.dtype())) {}

std::string NotedTensor::to_string() const {
  return c10::str(watch::dtype_name(dtype), "[", c10::Join(",", sizes), "]");
}

RunWatch::RunWatch(RunNotes& notes, Run which)
    : notes_(notes),
      which_(which),
      behind_(tape::detail::current),
      is_idle_(which == Run::again && notes.written.empty() && notes.drawings.empty() && !notes.keeps_draws),
      scope_(*this, /*sees_plain=*/!is_idle_) {
  if (which == Run::first) notes.keeps_draws = replays();
}

RunWatch::~RunWatch() {
  // The first note of a counter is the last to be put back.
  for (auto spared = versions_of_spared_.rbegin(); spared != versions_of_spared_.rend(); ++spared) {
    spared->first.set_version(spared->second);
  }
}

void RunWatch::read(const c10::TensorImpl& plain, const c10::VariableVersion& counter) {
  if (behind_ != nullptr) behind_->notes()->read(plain, counter);
  notes_.work += which_ == Run::first ? plain.numel() : 0;
  if (which_ == Run::again || !plain.has_storage() || tape::StateUpdate::is_active()) return;
  const c10::StorageImpl* storage = plain.unsafe_storage().unsafeGetStorageImpl();
  if (born_.contains(storage)) return;
  // The same content has to be there in the second run. A version that changes between two reads cannot be.
  if (reads_.insert(storage).second) notes_.reads.emplace_back(plain, counter);
}

void RunWatch::made(const at::Tensor& plain) {
  if (behind_ != nullptr) behind_->notes()->made(plain);
  if (which_ == Run::first) notes_.work += plain.numel() + kWorkOfCall;
  if (!is_idle_) note_made(storage_of(plain));
}

void RunWatch::note_made(const c10::StorageImpl* storage) {
  born_.insert(storage);
  notes_.saved.erase(storage);  // another one at the address of one that is gone
}

void RunWatch::run(const c10::OperatorHandle& op, Stack& stack) {
  if (is_idle_) return hand_on(op, stack);
  const OpTraits& traits = traits_of(op);
  const size_t num_arguments = op.schema().arguments().size();
  const auto arguments = torch::jit::last(stack, num_arguments);
  if (which_ == Run::first) note_operands(traits, arguments);
  const bool draws = traits.draws(arguments);
  if (draws && which_ == Run::again && notes_.keeps_draws) return repeat_draw(op, traits, stack);
  if (draws && which_ == Run::first) note_draw(op, traits, arguments);
  const std::vector<const c10::StorageImpl*> operands = storages_of(arguments);
  std::vector<IValue> kept;
  if (draws && notes_.keeps_draws) kept.assign(arguments.begin(), arguments.end());
  if (which_ == Run::again && traits.writes_any) spare_written(traits, stack, num_arguments);
  hand_on(op, stack);
  if (draws && notes_.keeps_draws) keep_draw(op, traits, kept, stack);
  note_results(op, stack, operands);
}

void RunWatch::hand_on(const c10::OperatorHandle& op, Stack& stack) {
  const tape::Aside aside(behind_);
  tape::run(op, stack);
}

void RunWatch::note_operands(const OpTraits& traits, at::ArrayRef<IValue> arguments) {
  notes_.work += traits.communicates ? kWorkOfCollective : kWorkOfCall;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool is_written = traits.writes(i, arguments);
    for_each_tensor_in(arguments[i], [&](const at::Tensor& t) {
      notes_.work += traits.is_view ? 0 : t.numel();
      const c10::StorageImpl* storage = storage_of(t);
      if (is_written && notes_.saved.contains(storage)) notes_.writes_saved = true;
      if (storage == nullptr || born_.contains(storage)) return;
      if (is_written) {
        notes_.written.try_emplace(storage, t.storage().getWeakStorageImpl());
      } else if (!traits.is_view && !tape::StateUpdate::is_active() && reads_.insert(storage).second) {
        notes_.reads.emplace_back(*t.unsafeGetTensorImpl(), counter_of(t));
      }
    });
  }
}

const c10::VariableVersion& RunWatch::counter_of(const at::Tensor& t) const {
  const auto counter = counters_of_parts_.find(storage_of(t));
  return counter != counters_of_parts_.end() ? counter->second : t.unsafeGetTensorImpl()->version_counter();
}

void RunWatch::note_results(const c10::OperatorHandle& op, const Stack& stack,
                            const std::vector<const c10::StorageImpl*>& operands) {
  const size_t num_returns = op.schema().returns().size();
  for (const IValue& value : torch::jit::last(stack, num_returns)) {
    for_each_tensor_in(value, [&](const at::Tensor& t) {
      const c10::StorageImpl* storage = storage_of(t);
      if (storage != nullptr && std::find(operands.begin(), operands.end(), storage) == operands.end()) {
        note_made(storage);
      }
    });
  }
}

// The first run has changed them as they should be. A copy takes what the second would do to them.
void RunWatch::spare_written(const OpTraits& traits, Stack& stack, size_t num_arguments) {
  const size_t begin = stack.size() - num_arguments;
  for (size_t i = 0; i < num_arguments; ++i) {
    if (!traits.writes(i, torch::jit::last(stack, num_arguments))) continue;
    stack[begin + i] = with_each_tensor(stack[begin + i], [&](const at::Tensor& t) { return spared(t); });
  }
}

at::Tensor RunWatch::spared(const at::Tensor& t) {
  const c10::StorageImpl* storage = storage_of(t);
  if (storage == nullptr || born_.contains(storage)) return t;
  const auto found = notes_.written.find(storage);
  if (found == notes_.written.end() || found->second.expired()) return t;
  const c10::VariableVersion& counter = counter_of(t);
  if (counter.enabled()) versions_of_spared_.emplace_back(counter, counter.current_version());
  const tape::Aside aside(behind_);
  const LocalOnly local;
  return at::clone(t);
}

void RunWatch::note_draw(const c10::OperatorHandle& op, const OpTraits& traits, at::ArrayRef<IValue> arguments) {
  const at::Generator generator = traits.generator(arguments);
  if (live_groups_of_thread() && generator == at::detail::getDefaultCPUGenerator()) {
    raise<c10::ValueError>({"recompute",
                            c10::str(op.schema().name(),
                                     " draws from torch's generator, which all rank threads share: no second run can "
                                     "draw the same numbers"),
                            "run ranks as processes, draw for DTensors, or pass a generator of this rank"});
  }
  if (notes_.keeps_draws) return;
  const auto is_known = [&](const RunNotes::Drawing& each) { return each.generator == generator; };
  if (std::any_of(notes_.drawings.begin(), notes_.drawings.end(), is_known)) return;
  const tape::Pause only_looks;
  const LocalOnly local;
  notes_.drawings.push_back({generator, state_of(generator)});
}

// Copies: what was drawn may be changed in place afterwards.
void RunWatch::keep_draw(const c10::OperatorHandle& op, const OpTraits& traits, const std::vector<IValue>& arguments,
                         const Stack& stack) {
  const tape::Aside aside(behind_);
  const LocalOnly local;
  std::vector<at::Tensor>& kept = notes_.draws.emplace_back();
  const auto keep = [&](const at::Tensor& t) { kept.push_back(at::clone(t)); };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.writes(i, arguments)) for_each_tensor_in(arguments[i], keep);
  }
  const auto& returns = op.schema().returns();
  for (size_t i = 0; i < returns.size(); ++i) {
    if (returns[i].alias_info() == nullptr) for_each_tensor_in(stack[stack.size() - returns.size() + i], keep);
  }
}

void RunWatch::repeat_draw(const c10::OperatorHandle& op, const OpTraits& traits, Stack& stack) {
  const auto last = torch::jit::last(stack, op.schema().arguments().size());
  const std::vector<IValue> arguments(last.begin(), last.end());
  const auto& returns = op.schema().returns();
  const size_t number = num_draws_++;
  const bool is_simple = std::all_of(returns.begin(), returns.end(), [](const c10::Argument& each) {
    return each.type()->kind() == c10::TypeKind::TensorType;
  });
  if (number >= notes_.draws.size() || !is_simple) {
    raise<c10::NotImplementedError>(
        {"recompute",
         c10::str("the second run draws by ", op.schema().name(), ", which cannot be repeated in a captured function"),
         "keep it out of the captured function, or out of recompute"});
  }
  const tape::Aside aside(behind_);
  const LocalOnly local;
  auto next = notes_.draws[number].begin();
  std::vector<at::Tensor> written;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!traits.writes(i, arguments)) continue;
    for_each_tensor_in(arguments[i], [&](const at::Tensor& t) { written.push_back(spared(t).copy_(*next++)); });
  }
  torch::jit::drop(stack, arguments.size());
  auto same = written.begin();
  for (const c10::Argument& each : returns) {
    at::Tensor result = each.alias_info() != nullptr ? *same++ : at::clone(*next++);
    if (each.alias_info() == nullptr) born_.insert(storage_of(result));
    torch::jit::push(stack, std::move(result));
  }
}

void RunWatch::rely_on(tape::Fact fact) {
  if (behind_ != nullptr) behind_->rely_on(std::move(fact));
}

void RunWatch::rely_on_life(const std::string& name, std::weak_ptr<const void> object) {
  if (behind_ != nullptr) behind_->rely_on_life(name, std::move(object));
}

void RunWatch::before_replay(std::function<void()> action) {
  if (behind_ != nullptr) behind_->before_replay(std::move(action));
}

void RunWatch::after_replay(std::function<void()> action) {
  if (behind_ != nullptr) behind_->after_replay(std::move(action));
}

void RunWatch::meet(c10::TensorImpl* dtensor) {
  const DTensorMeta* meta = dtensor_meta(dtensor);
  const c10::StorageImpl* storage = meta != nullptr ? storage_of(meta->local) : nullptr;
  if (storage != nullptr && !is_idle_) counters_of_parts_.insert_or_assign(storage, dtensor->version_counter());
  if (behind_ != nullptr) behind_->meet(dtensor);
}

// Parameters of a block share their memory: each has a counter of its own.
void RunWatch::read_whole(c10::TensorImpl* dtensor) {
  if (which_ == Run::first && !tape::StateUpdate::is_active() && wholes_.insert(dtensor).second) {
    notes_.reads.emplace_back(*dtensor, dtensor->version_counter());
  }
  Recorder::read_whole(dtensor);
}

GeneratorsPutBack::GeneratorsPutBack(const RunNotes& notes) {
  const tape::Pause only_looks;
  const LocalOnly local;
  for (const RunNotes::Drawing& first : notes.drawings) {
    now_.push_back({first.generator, state_of(first.generator)});
    set_state(first.generator, first.state);
  }
}

GeneratorsPutBack::~GeneratorsPutBack() {
  const tape::Pause only_looks;
  const LocalOnly local;
  for (const RunNotes::Drawing& drawing : now_) set_state(drawing.generator, drawing.state);
}

}  // namespace serried::detail
