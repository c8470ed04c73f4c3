// The rounds of a reducer: begin, collect, launch, end.
#include "serried/parallel/ddp/reducer.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/base/trace_slices.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/door.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/making/backward_end.h"
#include "serried/parallel/ddp/parameters.h"
#include "serried/tape/library_hook.h"
#include "serried/tape/tape.h"
#include "serried/tensor/debug/comm_notes.h"

namespace serried::detail {
namespace {

constexpr const char* kBucketCaller = "DDP bucket ";

// Whether a rank did not come to this backward, or came with a call that is none of a bucket.
bool may_be_without_wrapper(const std::string& error) {
  if (error.find("timed out after") != std::string::npos) return true;
  if (error.find("ranks called different collectives") == std::string::npos) return false;
  const size_t first = error.find(kBucketCaller);
  return first == std::string::npos || error.find(kBucketCaller, first + 1) == std::string::npos;
}

// Collectives of buckets are none that users have called: an error has to say whose they are.
template <class Fn>
void as_part_of_backward(Fn fn) {
  try {
    fn();
  } catch (const c10::DistBackendError& error) {
    const char* hint = may_be_without_wrapper(error.msg())
                           ? "; a rank that calls the module without its wrapper takes no part in it"
                           : "";
    throw c10::DistBackendError(c10::str(error.msg(), "\n  in:  a backward of DistributedDataParallel", hint));
  }
}

void count_this_step(const Group& group) {
  count_step(group);
  if (!tape::is_recording()) return;
  tape::after_replay([held = c10::weak_intrusive_ptr<c10d::ProcessGroup>(group)] {
    if (const Group alive = held.lock()) count_step(alive);
  });
}

// What gloo's own threads leave in a future says neither rank nor call.
void wait_for_hook(const HookFuture& future, const std::string& name) {
  trace::Span span("wait for hook", trace::kWait);
  span.note("hook", name);
  try {
    as_part_of_backward([&] { future->waitAndThrow(); });
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    raise<c10::DistBackendError>({"backward", c10::str("the communication hook \"", name, "\" failed: ", error.what()),
                                  "look for the first error of any rank; go on with set_process_group() and a new "
                                  "group, or start again"});
  }
}

}  // namespace

using torch::autograd::Engine;

Reducer::Reducer(std::vector<ManagedParameter> parameters, Group group, ReducerOptions options,
                 std::shared_ptr<Claim> claim)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      claim_(std::move(claim)),
      memory_(parameters_, group_, options_.reduce_dtype),
      touched_(parameters_.size()),
      statistics_(options_.stats_every) {
  // Without parameters (all are reduced elsewhere) no round ever begins.
  if (!parameters_.empty()) make_buckets(initial_buckets(parts_of(parameters_), options_.limits));
}

void Reducer::install_hooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.add(torch::autograd::impl::grad_accumulator(parameters_[i].tensor), [self = weak_from_this(), i] {
      if (const auto reducer = self.lock()) reducer->on_gradient(i);
    });
  }
}

void Reducer::follow_accumulators() {
  if (hooks_.empty()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // A frozen parameter has no node, and gets its old one back when it is thawed.
    if (auto node = torch::autograd::impl::grad_accumulator(parameters_[i].tensor)) hooks_.move(i, std::move(node));
  }
}

void Reducer::remove_hooks() {
  hooks_.clear();
  claim_.reset();
}

void Reducer::make_buckets(const BucketAssignment& assignment) {
  ++num_changes_;
  buckets_.clear();
  memory_.rewind();
  locations_.assign(parameters_.size(), {});
  for (size_t b = 0; b < assignment.size(); ++b) {
    buckets_.push_back(make_bucket(assignment[b], parameters_, memory_));
    for (size_t slot = 0; slot < assignment[b].size(); ++slot) locations_[assignment[b][slot]] = {b, slot};
  }
}

void Reducer::prepare_forward(bool synchronise, int source) {
  if (round_.active) reset();
  if (!synchronise) return;
  ++num_iterations_;
  times_.forward_start = StepTimes::now();
  rebuild_buckets(source);
}

void Reducer::prepare_backward(const std::vector<at::Tensor>& outputs, ForwardPasses::PassPtr pass) {
  if (hooks_.empty()) return;
  on_gradient_of(outputs, [self = weak_from_this(), pass] {
    if (const auto reducer = self.lock()) reducer->enter(*pass);
  });
  std::lock_guard<std::mutex> lock(mutex_);
  passes_.add(std::move(pass));
}

void Reducer::enter(const ForwardPass& pass) {
  // A backward towards chosen tensors (autograd::grad) need not reach our parameters; if it does, they will tell.
  if (is_towards_chosen_tensors()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  if (pass.synchronise && !round_.active && !hooks_.empty()) begin_round();
  if (!pass.synchronise && trace::enabled()) trace_local_backward();
}

void Reducer::trace_local_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(traced_task_, task) == task) return;
  Engine::get_default_engine().queue_callback([begin = trace::now_ns()] {
    trace::add(
        {.name = "backward (no_sync)", .category = trace::kBackward, .begin_ns = begin, .end_ns = trace::now_ns()});
  });
}

void Reducer::start_round() {
  round_ = {};
  round_.active = true;
  round_.counting = options_.static_graph && expected_fires_.empty();
  round_.divides_in_reduction = divides_in_reduction();
  if (!comm_hook_ && !round_.divides_in_reduction) {
    round_.scale = at::native::wrapped_scalar_tensor(1 / divisor_.value_or(group_->getSize()));
  }
  round_.num_fired.assign(parameters_.size(), 0);
  round_.ready.assign(parameters_.size(), false);
  // What has added up on this rank alone is part of this average, also where this backward does not reach it.
  round_.used = std::exchange(touched_, std::vector<bool>(parameters_.size()));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    round_.used[i] = round_.used[i] && parameters_[i].tensor.grad().defined();
  }
  for (Bucket& bucket : buckets_) bucket.num_pending = bucket.members.size();
  times_.backward_start = StepTimes::now();
  times_.communication_start = 0;
}

void Reducer::begin_round() {
  claim_->begin_backward();
  if (before_round_) before_round_();
  start_round();
  Engine::get_default_engine().queue_callback([self = weak_from_this()] {
    if (const auto reducer = self.lock()) reducer->end_round();
  });
  if (round_.counting) return;
  if (options_.static_graph) {
    std::vector<bool> used(parameters_.size());
    for (size_t i = 0; i < used.size(); ++i) used[i] = expected_fires_[i] > 0;
    mark_unused(used);
  } else if (options_.find_unused_parameters) {
    mark_unused(used_by_this_backward());
  }
}

void Reducer::mark_unused(const std::vector<bool>& used) {
  for (size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) mark_ready(i);
  }
  launch_ready_buckets();
}

void Reducer::on_gradient(size_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!claim_) return;
  if (!round_.active) {
    if (!passes_.synchronise_this_backward()) {
      touched_[index] = true;
      return;
    }
    begin_round();
  }
  if (c10::GradMode::is_enabled()) warn_of_second_order();
  round_.used[index] = parameters_[index].tensor.grad().defined();
  if (++round_.num_fired[index] == 1) round_.arrival.push_back(index);
  if (round_.counting) return;
  if (options_.static_graph) {
    check_count(index);
    if (round_.num_fired[index] < expected_fires_[index]) return;
  }
  if (round_.ready[index]) {
    // Once more before the bucket has left (a checkpointed part that is used twice): the sum so far is replaced. One
    // that was divided on its way into the bucket cannot be added to.
    if (buckets_[locations_[index].bucket].launched || round_.scale.defined()) raise_ready_twice(index);
    return contribute(index);
  }
  mark_ready(index);
  launch_ready_buckets();
}

void Reducer::mark_ready(size_t index) {
  round_.ready[index] = true;
  Bucket& bucket = buckets_[locations_[index].bucket];
  if (!options_.batched_grad_copy) contribute(index);
  --bucket.num_pending;
}

// Our own backends divide where they add: one pass less over the gradients.
bool Reducer::divides_in_reduction() const {
  if (comm_hook_ || divisor_) return false;
  return goes_straight(group_, parameters_[0].tensor);
}

void Reducer::contribute(size_t index) {
  at::NoGradGuard no_grad;
  const Location& at = locations_[index];
  Bucket& bucket = buckets_[at.bucket];
  if (bucket.sparse) return contribute_sparse(index);
  at::Tensor& grad = parameters_[index].tensor.mutable_grad();
  const at::Tensor& view = bucket.views[at.slot];
  if (!grad.defined()) {
    view.zero_();
    return;
  }
  const at::Tensor part = gradient_part(grad, parameters_[index].tensor);
  const bool is_view = is_same_memory(part, view);
  if (!is_view || round_.scale.defined()) copy_into_bucket(part, view);
  // Frees what backward has computed, while later gradients are still to come.
  if (holds_gradients(bucket)) grad = bucket.gradients[at.slot];
}

void Reducer::copy_into_bucket(const at::Tensor& part, const at::Tensor& view) const {
  const trace::Span span("copy into bucket", trace::kCopy, int64_t(view.nbytes()));
  if (round_.scale.defined() && part.scalar_type() == view.scalar_type()) {
    at::mul_out(const_cast<at::Tensor&>(view), part, round_.scale);
    return;
  }
  view.copy_(part);
  if (round_.scale.defined()) view.mul_(round_.scale);
}

bool Reducer::holds_gradients(const Bucket& bucket) const {
  return options_.gradient_as_bucket_view && !bucket.gradients.empty();
}

void Reducer::launch_ready_buckets() {
  while (round_.next_bucket < buckets_.size() && buckets_[round_.next_bucket].num_pending == 0) {
    launch(round_.next_bucket++);
  }
  if (round_.next_bucket == buckets_.size() && looks_for_unused() && !round_.used_work) launch_used_map();
}

void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  if (options_.batched_grad_copy) {
    for (size_t member : bucket.members) contribute(member);
  }
  bucket.launched = true;
  // A rank that has joined uses nothing, and cannot know what the others leave out.
  if (options_.skip_unused_allreduce && !before_round_ && is_unused_here(bucket)) return;
  const watch::PartOf scope(c10::str(kBucketCaller, index));
  const comm_debug::OnBehalf parameters([&](auto add) {
    for (size_t member : bucket.members) add(parameters_[member].tensor.unsafeGetTensorImpl());
  });
  const trace::Details details({{"bucket", int64_t(index)}, {"parameters", int64_t(bucket.members.size())}});
  if (times_.communication_start == 0) times_.communication_start = StepTimes::now();
  if (comm_hook_) {
    const auto rows = sparse_rows_.find(bucket.members[0]);
    c10d::GradBucket seen = as_grad_bucket(bucket, index, buckets_.size(), parameters_,
                                           rows != sparse_rows_.end() ? std::optional(rows->second) : std::nullopt);
    bucket.future = (*comm_hook_)(group_, seen);
    return;
  }
  at::NoGradGuard no_grad;
  try {
    as_part_of_backward([&] { bucket.work = start_reduction(bucket); });
  } catch (const c10::ValueError&) {
    raise_if_nan(bucket);
    throw;
  }
}

c10::intrusive_ptr<c10d::Work> Reducer::start_reduction(const Bucket& bucket) const {
  const bool divides = round_.divides_in_reduction && !bucket.sparse;
  return ops::start_all_reduce_(bucket.flat, group_, share(divides ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM));
}

bool Reducer::is_unused_here(const Bucket& bucket) const {
  return std::none_of(bucket.members.begin(), bucket.members.end(), [&](size_t member) { return round_.used[member]; });
}

bool Reducer::looks_for_unused() const {
  return options_.find_unused_parameters && !options_.static_graph;
}

// Which parameters the ranks use decides which ops a step runs; to find that out is no part of the step.
void Reducer::launch_used_map() {
  const tape::Pause only_decides;
  const watch::PartOf scope("DDP's used parameters");
  round_.used_anywhere = at::zeros({int64_t(parameters_.size())}, at::kInt);
  auto* map = round_.used_anywhere.data_ptr<int>();
  for (size_t i = 0; i < parameters_.size(); ++i) map[i] = round_.used[i] ? std::max(1, round_.num_fired[i]) : 0;
  round_.used_work = ops::start_all_reduce_(round_.used_anywhere, group_, share(c10d::ReduceOp::MAX));
}

bool Reducer::is_used_anywhere(size_t index) {
  if (round_.used[index]) return true;
  if (!static_used_anywhere_.empty()) return static_used_anywhere_[index];
  if (!round_.used_work) return true;
  round_.used_work->wait();
  return round_.used_anywhere.data_ptr<int>()[index] > 0;
}

void Reducer::end_round() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!round_.active) return;
  times_.backward_end = StepTimes::now();
  if (trace::enabled()) {
    trace::add({.name = "backward",
                .category = trace::kBackward,
                .begin_ns = times_.backward_start,
                .end_ns = times_.backward_end});
  }
  try {
    if (round_.counting) finish_counting();
    if (round_.next_bucket < buckets_.size()) raise_missing();
    finish_buckets();
    for (const HookFuture& future : std::exchange(awaited_at_end_, {})) future->waitAndThrow();
  } catch (const std::exception& error) {
    last_error_ = error.what();
    reset();
    throw;
  }
  times_.communication_end = StepTimes::now();
  statistics_.add(num_iterations_, times_);
  count_this_step(group_);
  can_be_static_ = can_be_static_ && (last_used_.empty() || last_used_ == round_.used);
  last_used_ = round_.used;
  if (c10d::debug_level() == c10d::DebugLevel::Detail) log_unused();
  last_arrival_ = std::move(round_.arrival);
  passes_.close();
  sparse_rows_.clear();
  round_.active = false;
}

// Every rank has counted; together they know which parameters matter at all.
void Reducer::finish_counting() {
  expected_fires_ = round_.num_fired;
  as_part_of_backward([&] {
    launch_used_map();
    round_.used_work->wait();
  });
  static_used_anywhere_.resize(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    static_used_anywhere_[i] = round_.used_anywhere.data_ptr<int>()[i] > 0;
    mark_ready(i);
  }
  launch_ready_buckets();
}

void Reducer::finish_buckets() {
  try {
    for (size_t b = 0; b < buckets_.size(); ++b) finish_bucket(b);
  } catch (...) {
    // A hook that steps an optimizer may still be at it with later buckets: nobody goes on beside that.
    for (const Bucket& bucket : buckets_) {
      if (bucket.future) bucket.future->wait();
    }
    throw;
  }
}

void Reducer::finish_bucket(size_t index) {
  at::NoGradGuard no_grad;
  Bucket& bucket = buckets_[index];
  if (bucket.future) {
    wait_for_hook(bucket.future, comm_hook_->name());
    const at::Tensor result = c10d::detail::parseCppCommHookResult(bucket.future->value());
    if (bucket.sparse) {
      bucket.flat = result;
    } else if (result.data_ptr() != bucket.flat.data_ptr()) {
      bucket.flat.copy_(result.view_as(bucket.flat));
    }
  } else if (bucket.work) {
    as_part_of_backward([&] { bucket.work->wait(); });
  }
  bucket.end_round();
  for (size_t slot = 0; slot < bucket.members.size(); ++slot) {
    const size_t member = bucket.members[slot];
    if (is_used_anywhere(member)) give_gradient(member, {index, slot});
    if (on_averaged_) on_averaged_(member);
  }
}

void Reducer::give_gradient(size_t index, const Location& location) {
  const Bucket& bucket = buckets_[location.bucket];
  if (bucket.sparse) return give_sparse_gradient(index);
  at::Tensor& grad = parameters_[index].tensor.mutable_grad();
  const at::Tensor& view = bucket.views[location.slot];
  if (holds_gradients(bucket)) {
    if (!grad.is_same(bucket.gradients[location.slot])) grad = bucket.gradients[location.slot];
    return;
  }
  const trace::Span span("copy out of bucket", trace::kCopy, int64_t(view.nbytes()));
  if (grad.defined() && dtensor_meta(grad) == nullptr) {
    grad.copy_(view);
  } else {
    const at::Tensor& parameter = parameters_[index].tensor;
    grad = as_gradient(view.to(parameter.scalar_type(), /*non_blocking=*/false, /*copy=*/true), parameter);
  }
}

void Reducer::reset() {
  bool on_its_way = false;
  BucketAssignment assignment;
  for (Bucket& bucket : buckets_) {
    on_its_way |= (bucket.work && !bucket.work->isCompleted()) || (bucket.future && !bucket.future->completed());
    assignment.push_back(bucket.members);
    bucket.end_round();
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    // Half of them may be averages already: nobody must take a step with those.
    if (!round_.active) break;
    if (round_.ready[i]) parameters_[i].tensor.mutable_grad().reset();
    touched_[i] = touched_[i] || (round_.used[i] && !round_.ready[i]);
  }
  round_ = {};
  passes_.close();
  // A late reduction may still write to the old memory.
  if (on_its_way) {
    memory_ = BucketMemory(parameters_, group_, options_.reduce_dtype);
    make_buckets(assignment);
  }
}

}  // namespace serried::detail
