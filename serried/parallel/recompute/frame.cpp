// The second run: stopped as soon as it has saved all that backward wants.
#include "serried/parallel/recompute/frame.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include "serried/base/error.h"
#include "serried/tensor/making/backward_end.h"
#include "serried/tensor/meta.h"

namespace serried::detail {
namespace {

thread_local int segments_running = 0;

// In elements: what is computed faster than an exception comes through to us.
constexpr int64_t kCheapWork = 1 << 14;

// Thrown through the function when nothing is missing any more. No std::exception: functions catch these.
struct AllCollected {};

[[noreturn]] void raise_changed(const std::string& what, const NotedTensor& noted) {
  raise<c10::Error>({"recompute",
                     c10::str(what, " ", noted.to_string(),
                              " has been changed by an in-place operation since the forward: it is at version ",
                              noted.counter.current_version(), ", expected version ", noted.version),
                     "change it after backward, or change a copy: x = x.add(y)"});
}

bool is_parameter(const at::Tensor& t) {
  return t.is_leaf() && t.requires_grad();
}

// Without its history, which would hold the node that saves it.
at::Tensor without_history(const at::Tensor& t) {
  return is_parameter(t) ? t : t.tensor_data();
}

const c10::StorageImpl* memory_of(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  const at::Tensor& part = meta != nullptr ? meta->local : t;
  return part.has_storage() ? part.storage().unsafeGetStorageImpl() : nullptr;
}

NotedTensor noted(const at::Tensor& t) {
  return NotedTensor(*t.unsafeGetTensorImpl(), t.unsafeGetTensorImpl()->version_counter());
}

// One tensor of the first run: a parameter itself, of all else a number.
class NumberHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit NumberHooks(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}
  ~NumberHooks() override {
    if (frame_ && is_packed_) frame_->drop(number_);
  }
  NumberHooks(const NumberHooks&) = delete;
  NumberHooks& operator=(const NumberHooks&) = delete;

  void call_pack_hook(const at::Tensor& t) override {
    number_ = frame_->add(t, is_parameter(t));
    is_packed_ = true;
    if (!is_parameter(t)) return;
    parameter_ = t;
    version_ = uint32_t(t._version());
    frame_.reset();
  }

  at::Tensor call_unpack_hook() override {
    if (!parameter_.defined()) return frame_->give(number_);
    if (parameter_._version() != version_) {
      NotedTensor then = noted(parameter_);
      then.version = version_;
      raise_changed("a parameter", then);
    }
    return parameter_;
  }

 private:
  std::shared_ptr<Frame> frame_;
  size_t number_ = 0;
  bool is_packed_ = false;
  at::Tensor parameter_;
  uint32_t version_ = 0;
};

}  // namespace

/// The keeper of a second run: sorts what is saved into the frame.
class Collector final : public TensorKeeper {
 public:
  explicit Collector(Frame& frame) : frame_(frame) {
    frame.collected_.assign(frame.slots_.size(), at::Tensor());
    for (size_t i = 0; i < frame.slots_.size(); ++i) {
      if (frame.slots_[i].is_wanted) end_ = i + 1;
    }
    const int64_t rest = end_ > 0 ? frame.notes_.work - frame.slots_[end_ - 1].work : 0;
    stops_ = !frame.notes_.writes_saved && (rest > kCheapWork || tape::is_replayed());
  }
  SavedHooks make_hooks() override;
  void take(const at::Tensor& t);
  void check_complete() const;

 private:
  void stop() const;

  Frame& frame_;
  size_t next_ = 0;
  size_t end_ = 0;  // behind the last that is wanted
  bool stops_ = true;
};

namespace {

// One tensor of the second run: in its graph it is as always, in case the function itself calls backward.
class CollectHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit CollectHooks(Collector& collector) : collector_(collector) {}
  void call_pack_hook(const at::Tensor& t) override {
    kept_ = without_history(t);
    collector_.take(kept_);
  }
  at::Tensor call_unpack_hook() override { return kept_; }

 private:
  Collector& collector_;
  at::Tensor kept_;
};

}  // namespace

SavedHooks Collector::make_hooks() {
  return std::make_unique<CollectHooks>(*this);
}

void Collector::take(const at::Tensor& t) {
  const size_t number = next_++;
  if (number >= end_) return stop();
  const Frame::Slot& slot = frame_.slots_[number];
  if (t.sizes() != slot.noted.sizes || t.scalar_type() != slot.noted.dtype) {
    raise<c10::Error>({"recompute",
                       c10::str("the second run differs from the first: tensor ", number, " that autograd saves is ",
                                noted(t).to_string(), ", and was ", slot.noted.to_string()),
                       "let the function do the same each time: no branches on what changes between forward and "
                       "backward, no counters, no random numbers but torch's"});
  }
  if (slot.is_wanted) frame_.collected_[number] = t;
  if (number + 1 == end_) stop();
}

void Collector::stop() const {
  if (stops_) throw AllCollected();
}

void Collector::check_complete() const {
  if (next_ >= end_) return;
  raise<c10::Error>(
      {"recompute",
       c10::str("the second run differs from the first: autograd saves ", next_, " tensors, and saved ",
                frame_.slots_.size(), "; the first that is missing was ", frame_.slots_[next_].noted.to_string()),
       "let the function do the same each time: no branches on what changes between forward and "
       "backward, no counters, no random numbers but torch's"});
}

KeptInput::KeptInput(const at::Tensor& t, TensorKeeper* outer)
    : noted_(detail::noted(t)), requires_grad_(t.requires_grad()) {
  if (outer == nullptr) {
    tensor_ = t;
    return;
  }
  const at::NoGradGuard no_grad;
  hooks_ = outer->make_hooks();
  hooks_->call_pack_hook(t);
}

at::Tensor KeptInput::get() const {
  const at::NoGradGuard no_grad;
  const at::Tensor t = hooks_ ? hooks_->call_unpack_hook() : tensor_;
  if (is_parameter(t)) return t;
  at::Tensor again = t.tensor_data();
  if (!requires_grad_) return again;
  auto end = c10::make_intrusive<torch::autograd::Error>("[recompute] the function calls backward on its arguments");
  torch::autograd::create_gradient_edge(again, std::move(end));
  return again;
}

Frame::Frame(std::shared_ptr<Segment> segment, const std::vector<at::Tensor>& tensors, TensorKeeper* outer)
    : segment_(std::move(segment)) {
  for (const at::Tensor& t : tensors) {
    is_defined_.push_back(t.defined());
    if (t.defined()) inputs_.emplace_back(t, outer);
  }
}

SavedHooks Frame::make_hooks() {
  return std::make_unique<NumberHooks>(shared_from_this());
}

void Frame::check_repeatable() const {
  for (size_t i = 0; i < inputs_.size(); ++i) {
    if (inputs_[i].is_unchanged()) continue;
    raise<c10::ValueError>({"recompute",
                            c10::str("the function changes its argument ", inputs_[i].noted().to_string(),
                                     " in place, so a second run would not find it as it was"),
                            "let it work on a copy, or use the op that makes a new tensor"});
  }
  for (const NotedTensor& read : notes_.reads) {
    if (read.is_unchanged()) continue;
    raise<c10::ValueError>({"recompute",
                            c10::str("the function reads a tensor ", read.to_string(),
                                     " that it was not given, and changes it afterwards: a second run would not find "
                                     "it as it was"),
                            "change it outside of the function, or read a copy: state.clone()"});
  }
}

size_t Frame::add(const at::Tensor& t, bool is_leaf) {
  const std::lock_guard lock(mutex_);
  slots_.push_back({noted(t), !is_leaf, notes_.work});
  if (!is_leaf) notes_.saved.insert(memory_of(t));
  return slots_.size() - 1;
}

void Frame::drop(size_t number) {
  const std::lock_guard lock(mutex_);
  slots_[number].is_wanted = false;
  if (number < collected_.size()) collected_[number].reset();
}

at::Tensor Frame::give(size_t number) {
  const std::lock_guard lock(mutex_);
  if (!slots_[number].noted.is_unchanged()) raise_changed("a tensor that autograd saved,", slots_[number].noted);
  const int64_t task = torch::autograd::get_current_graph_task_id();
  const bool is_there = task >= 0 && task == task_ && number < collected_.size() && collected_[number].defined();
  if (!is_there) run_again();
  at::Tensor given = std::move(collected_[number]);
  collected_[number].reset();
  if (task < 0) collected_.clear();
  return given;
}

void Frame::run_again() {
  const int64_t task = torch::autograd::get_current_graph_task_id();
  check_unchanged();
  const std::vector<at::Tensor> tensors = inputs();
  Collector collector(*this);
  try {
    run_segment(tensors, collector);
    collector.check_complete();
  } catch (...) {
    collected_.clear();
    throw;
  }
  if (task >= 0 && task != task_) {
    when_backward_ends([frame = weak_from_this(), task](bool) {
      if (const auto alive = frame.lock()) alive->release(task);
    });
  }
  task_ = task;
}

void Frame::run_segment(const std::vector<at::Tensor>& tensors, TensorKeeper& collector) {
  const InSegment inside;
  const SurroundingsGuard surroundings(surroundings_);
  const KeeperScope scope("recompute", &collector);
  RunWatch watch(notes_, RunWatch::Run::again);
  if (watch.replays() && !notes_.drawings.empty()) {
    raise<c10::NotImplementedError>({"recompute",
                                     "the forward drew random numbers outside of the captured function that runs its "
                                     "backward",
                                     "capture forward and backward as one function"});
  }
  const GeneratorsPutBack generators(notes_);
  try {
    segment_->run(tensors);
  } catch (const AllCollected&) {
  }
}

void Frame::check_unchanged() const {
  for (const KeptInput& input : inputs_) {
    if (!input.is_unchanged()) raise_changed("an argument of the function,", input.noted());
  }
  for (const NotedTensor& read : notes_.reads) {
    if (!read.is_unchanged()) raise_changed("a tensor that the function reads,", read);
  }
}

std::vector<at::Tensor> Frame::inputs() const {
  std::vector<at::Tensor> tensors;
  auto next = inputs_.begin();
  for (const bool is_defined : is_defined_) tensors.push_back(is_defined ? (next++)->get() : at::Tensor());
  return tensors;
}

void Frame::release(int64_t task) {
  const std::lock_guard lock(mutex_);
  if (task == task_) collected_.clear();
}

struct FirstRun::Impl {
  explicit Impl(std::shared_ptr<Frame> frame_)
      : frame(std::move(frame_)), scope("recompute", frame.get()), watch(frame->notes(), RunWatch::Run::first) {}

  const InSegment inside;
  const std::shared_ptr<Frame> frame;
  const KeeperScope scope;
  const RunWatch watch;
};

FirstRun::FirstRun(std::shared_ptr<Segment> segment, std::vector<at::Tensor> tensors)
    : impl_(std::make_unique<Impl>(std::make_shared<Frame>(std::move(segment), tensors, current_keeper()))) {}

FirstRun::~FirstRun() = default;

void FirstRun::end() {
  impl_->frame->notes().saved.clear();
  impl_->frame->check_repeatable();
}

InSegment::InSegment() {
  ++segments_running;
}

InSegment::~InSegment() {
  --segments_running;
}

bool is_in_segment() {
  return segments_running > 0;
}

bool saves_activations() {
  return c10::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

}  // namespace serried::detail
