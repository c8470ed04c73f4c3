// The interpreter of a row.
#include "serried/parallel/pipeline/runner.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor_split.h>

#include <algorithm>
#include <chrono>
#include <unordered_set>

#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/comm/collectives/objects.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tape/facts.h"
#include "serried/tape/module_options.h"
#include "serried/tape/recorder.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dtensor.h"

namespace serried::detail {
namespace {

using Kind = PipelineAction::Kind;

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

std::vector<StageRun> make_runs(std::vector<PipelineStage> stages, const PipelineOptions& options) {
  const std::vector<int64_t> indices = options.table->stages_of(options.group->getRank());
  std::vector<StageRun> runs;
  runs.reserve(stages.size());
  for (size_t i = 0; i < stages.size(); ++i) {
    runs.emplace_back(std::move(stages[i]), indices[i]);
    if (options.mesh) runs.back().set_mesh(*options.mesh);
  }
  return runs;
}

bool is_backward(Kind kind) {
  return kind == Kind::B || kind == Kind::W;
}

}  // namespace

Runner::Runner(std::vector<PipelineStage> stages, PipelineOptions options)
    : options_(std::move(options)),
      rank_(options_.group->getRank()),
      row_(options_.table->rows()[size_t(rank_)]),
      stages_(make_runs(std::move(stages), options_)),
      messages_(options_.group, *options_.table),
      tied_(options_.group, *options_.table, stages_, options_.tied) {
  plan_stages();
}

void Runner::plan_stages() {
  for (const StageRun& run : stages_) {
    StagePlan plan{.first_action = row_.size(), .unshards_itself = true};
    for (size_t i = 0; i < row_.size(); ++i) {
      const PipelineAction& action = row_[i];
      if (action.stage != run.index()) continue;
      plan.first_action = std::min(plan.first_action, i);
      plan.last_action = i;
      if (action.kind == Kind::unshard) plan.unshards_itself = false;
      if (!is_backward(action.kind)) continue;
      plan.last_backward = i;
      plan.last_microbatch = action.microbatch;
    }
    plans_.push_back(plan);
  }
}

StageRun& Runner::stage(int64_t index) {
  return *std::find_if(stages_.begin(), stages_.end(), [&](const StageRun& run) { return run.index() == index; });
}

// Stages may share one: an optimizer that got it twice would step it twice.
std::vector<at::Tensor> Runner::parameters() const {
  std::vector<at::Tensor> all;
  std::unordered_set<const void*> seen;
  for (const StageRun& run : stages_) {
    for (const at::Tensor& parameter : run.stage().module()->parameters()) {
      if (seen.insert(parameter.unsafeGetTensorImpl()).second) all.push_back(parameter);
    }
  }
  return all;
}

void Runner::check_usable() {
  if (options_.group->getSize() > 1 && options_.group->getBackendName() == "fake") {
    raise<c10::NotImplementedError>({"Pipeline",
                                     "a step needs the messages of other ranks, and a fake group brings none",
                                     "make stages and tables there, and run steps on ranks that exist"});
  }
  if (broken_.empty()) return;
  const ErrorText text{"Pipeline", "an earlier step failed: " + broken_,
                       "make a new group and a new Pipeline, on every rank"};
  raise<c10::ValueError>(text);
}

void Runner::check_arguments(const at::Tensor& input, const at::Tensor& target, bool trains) const {
  const char* where = trains ? "Pipeline::step" : "Pipeline::eval";
  const int64_t count = table().microbatches();
  if (has_first() && !input.defined()) {
    raise<c10::ValueError>({where, c10::str("the input is undefined on rank ", rank_, ", which has the first stage"),
                            "pass the batch there"});
  }
  // Without gradients a micro-batch may be empty: the last batch of a validation set is as small as it likes.
  if (has_first() && (input.dim() == 0 || (trains && input.size(0) < count))) {
    raise<c10::ValueError>(
        {where, c10::str(watch::describe_tensor(input), " cannot be cut into ", count, " micro-batches along dim 0"),
         c10::str("pass ", count, " rows or more, or fewer micro-batches")});
  }
  if (!trains || !has_last()) return;
  if (!options_.loss) {
    raise<c10::ValueError>({where, c10::str("rank ", rank_, " has the last stage and no loss"),
                            "pass .loss there, or call eval() for outputs"});
  }
  if (!target.defined()) {
    raise<c10::ValueError>({where, c10::str("the target is undefined on rank ", rank_, ", which has the last stage"),
                            "pass the target there"});
  }
  if (target.dim() == 0) {
    raise<c10::ValueError>(
        {where, c10::str("the target ", watch::describe_tensor(target), " has no rows to be cut into micro-batches"),
         "pass one row for each row of the input"});
  }
}

// Both are cut alike: rows of the one have to meet those of the other, or a loss that broadcasts is wrong in silence.
void Runner::check_target_rows() const {
  const int64_t rows = messages_.batch_rows();
  if (target_rows_ == rows) return;
  const bool has_several_each = target_rows_ > 0 && target_rows_ % rows == 0 && rows % table().microbatches() == 0;
  if (has_several_each) return;
  raise<c10::ValueError>({"Pipeline::step",
                          c10::str("the target has ", target_rows_, " rows, and the input ", rows, ", to be cut into ",
                                   table().microbatches(), " micro-batches each"),
                          "pass one row of the target for each row of the input"});
}

void Runner::begin(const at::Tensor& input, const at::Tensor& target, bool trains) {
  trains_ = trains;
  ++*step_;
  const int64_t count = table().microbatches();
  activations_.clear();
  gradients_.clear();
  for (StageRun& run : stages_) run.begin_step();
  evaluated_.assign(!trains && has_last() ? size_t(count) : 0, {});
  if (trains) {
    losses_.assign(has_last() ? size_t(count) : 0, {});
    outputs_.assign(has_last() && options_.keep_outputs ? size_t(count) : 0, {});
    times_ns_.assign(options_.trace ? 2 * row_.size() : 0, 0);
    peak_in_flight_ = 0;
    num_losses_ = 0;
    has_graph_ = false;
  }
  // Before anything is checked: an error is told to those who wait.
  messages_.begin_step(*step_, trains, has_first() && input.defined() && input.dim() > 0 ? input.size(0) : 0);
  check_arguments(input, target, trains);
  inputs_ = has_first() ? input.tensor_split(count) : std::vector<at::Tensor>();
  targets_ = trains && has_last() ? target.tensor_split(count) : std::vector<at::Tensor>();
  target_rows_ = targets_.empty() ? 0 : target.size(0);
}

// A replay runs the ops of the step and nothing of this.
void Runner::rely_on_stages() const {
  if (!tape::is_recording()) return;
  if (trains_ && options_.keep_outputs && tape::is_replayed()) {
    raise<c10::NotImplementedError>({"Pipeline::step", "a replay of a captured step would not keep outputs",
                                     "leave out .keep_outputs, or call step() outside of the captured function"});
  }
  for (const StageRun& run : stages_) {
    const std::string name = c10::str("stage ", run.index(), " of a pipeline");
    tape::rely_on(tape::training_mode(name, run.stage().module()));
    tape::rely_on(tape::contents_of(name, run.stage().module()));
    tape::rely_on(tape::options_of(name, run.stage().module()));
  }
  tape::after_replay([step = step_] { ++*step; });
  tape::replay_together(options_.group->getGroupName());  // messages of a replay have no headers
}

std::vector<at::Tensor> Runner::step(const at::Tensor& input, const at::Tensor& target) {
  const at::AutoGradMode with_gradients(true);
  const watch::PartOf scope("Pipeline::step");
  const trace::Span span("pipeline step", trace::kForward);
  check_usable();
  begin_row(input, target, true);
  run_row(true);
  return std::exchange(losses_, {});
}

std::vector<at::Tensor> Runner::eval(const at::Tensor& input) {
  const at::NoGradGuard no_grad;
  const watch::PartOf scope("Pipeline::eval");
  check_usable();
  begin_row(input, {}, false);
  run_row(false);
  return std::exchange(evaluated_, {});
}

// To ask for the first messages fails where a rank is known to be gone: one that died between two steps.
void Runner::begin_row(const at::Tensor& input, const at::Tensor& target, bool trains) {
  const PipelineAction& first = row_.front();
  needs_.clear();
  try {
    begin(input, target, trains);
    rely_on_stages();
    if (trains) tied_.put_aside();
  } catch (c10::DistBackendError& error) {
    error.add_context("before" + context_of(first).substr(2));
    abandon(first, error);
    throw;
  } catch (const std::exception& error) {
    abandon(first, error);
    throw;
  }
}

void Runner::run_row(bool trains) {
  for (size_t place = 0; place < row_.size(); ++place) run(place, trains);
  end_row(trains);
  inputs_.clear();
  targets_.clear();
}

// Others may be gone by now, or find out that they cannot go on.
void Runner::end_row(bool trains) {
  const PipelineAction& last = row_.back();
  needs_ = ", while its last messages were on their way";
  try {
    messages_.end_step();
    needs_ = ", while gradients of tied parameters were added up";
    if (trains) tied_.sum_gradients();
  } catch (c10::Error& error) {
    error.add_context("after" + context_of(last).substr(2));
    abandon(last, error);
    throw;
  } catch (const std::exception& error) {
    abandon(last, error);
    throw;
  }
}

void Runner::run(size_t place, bool trains) {
  const PipelineAction& action = row_[place];
  needs_.clear();
  try {
    messages_.poll();
    StagePlan& plan = plans_[size_t(&stage(action.stage) - stages_.data())];
    StageSync& sync = stage(action.stage).sync();
    if (place == plan.first_action) sync.begin(plan.unshards_itself);
    if (trains && place == plan.last_backward) sync.before_last_backward();
    const bool happens = trains || action.kind == Kind::F || !has_microbatch(action.kind);
    if (happens) do_action(place);
    if (place == plan.last_action) sync.end();
  } catch (c10::Error& error) {
    error.add_context(context_of(action));
    abandon(action, error);
    throw;
  } catch (const std::exception& error) {
    abandon(action, error);
    throw;
  }
}

void Runner::do_action(size_t place) {
  const PipelineAction& action = row_[place];
  StageRun& run = stage(action.stage);
  const StagePlan& plan = plans_[size_t(&run - stages_.data())];
  begin_ns_ = 0;
  if (action.kind == Kind::F) {
    forward(action, action.microbatch == plan.last_microbatch);
  } else if (action.kind == Kind::unshard) {
    run.sync().unshard();
  } else if (action.kind == Kind::reshard) {
    run.sync().reshard();
  } else if (action.kind != Kind::reduce) {  // the stage's last backward has reduced
    const StageSync::Scope scope(run.sync(), place == plan.last_backward);
    backward(action);
    if (place == plan.last_backward) run.check_reduced(action.microbatch);
  }
  if (times_ns_.empty() || !trains_) return;
  const int64_t end = now_ns();
  times_ns_[2 * place] = begin_ns_ != 0 ? begin_ns_ : end;
  times_ns_[2 * place + 1] = end;
}

// What the action needs is there.
void Runner::mark_begin() {
  if (!times_ns_.empty() && trains_) begin_ns_ = now_ns();
}

Received Runner::input_of(const PipelineAction& action) {
  const auto [kind, index, microbatch] = action;
  if (index == 0) return {inputs_[size_t(microbatch)], false};
  const PipelineAction made_by{Kind::F, index - 1, microbatch};
  needs_ = c10::str(", which waits for ", to_string(made_by), " on rank ", table().rank_of(index - 1));
  if (messages_.is_local(index - 1)) {
    const auto found = activations_.find({index - 1, microbatch});
    Received local = std::move(found->second);
    activations_.erase(found);
    return local;
  }
  return messages_.receive(made_by, stage(index).mesh());
}

void Runner::forward(const PipelineAction& action, bool is_last_microbatch) {
  StageRun& run = stage(action.stage);
  Received input = input_of(action);
  mark_begin();
  const bool is_last = action.stage + 1 == table().stages();
  if (action.stage > 0) {
    needs_ = c10::str(", whose input ", watch::describe_tensor(input.tensor), " is what stage ", action.stage - 1,
                      " on rank ", table().rank_of(action.stage - 1), " gives");
  }
  const StageSync::Scope scope(run.sync(), is_last_microbatch);
  StageRun::Finish finish;
  if (is_last && trains_) finish = [&](const at::Tensor& output) { return loss_of(output, action.microbatch); };
  const at::Tensor output = run.forward(action.microbatch, std::move(input), finish);
  if (is_last && trains_) check_losses(run, action.microbatch);
  if (is_last) {
    std::vector<at::Tensor>& outputs = trains_ ? outputs_ : evaluated_;
    if (!outputs.empty()) outputs[size_t(action.microbatch)] = output;
  } else {
    hand_on(action, output);
  }
  int64_t in_flight = 0;
  for (const StageRun& each : stages_) in_flight += each.num_in_flight();
  peak_in_flight_ = std::max(peak_in_flight_, in_flight);
}

at::Tensor Runner::loss_of(const at::Tensor& output, int64_t microbatch) {
  check_target_rows();
  const at::Tensor loss = options_.loss(output, targets_[size_t(microbatch)]);
  if (!loss.defined() || loss.numel() != 1) {
    raise<c10::ValueError>({"Pipeline",
                            c10::str("the loss of micro-batch ", microbatch, " is ",
                                     loss.defined() ? watch::describe_tensor(loss) : "undefined", ", not one number"),
                            "reduce it: mean() or sum()"});
  }
  losses_[size_t(microbatch)] = loss.detach();
  if (!options_.scale_gradients || table().microbatches() == 1) return loss;
  return loss / double(table().microbatches());
}

// A loop would raise at the first loss without a graph; here micro-batches may have nothing to learn from, but not all.
void Runner::check_losses(const StageRun& last, int64_t microbatch) {
  has_graph_ = has_graph_ || last.has_graph(microbatch);
  if (++num_losses_ < table().microbatches() || has_graph_) return;
  const auto parameters = last.stage().module()->parameters();
  if (std::none_of(parameters.begin(), parameters.end(), [](const at::Tensor& p) { return p.requires_grad(); })) return;
  raise<c10::ValueError>(
      {"Pipeline::step",
       c10::str("no loss of the step needs a gradient, and parameters of stage ", last.index(), " do"),
       "let the loss depend on the output, without detach(), NoGradGuard or InferenceMode"});
}

void Runner::hand_on(const PipelineAction& action, const at::Tensor& output) {
  if (messages_.is_local(action.stage)) {
    activations_[{action.stage, action.microbatch}] = {output.detach(), output.requires_grad()};
  } else {
    messages_.send(action, output, output.requires_grad());
  }
}

at::Tensor Runner::gradient_for(const PipelineAction& action) {
  const auto [kind, index, microbatch] = action;
  if (index + 1 == table().stages()) return {};
  const PipelineAction made_by{Kind::B, index + 1, microbatch};
  needs_ = c10::str(", which waits for the gradient of stage ", index + 1, " on rank ", table().rank_of(index + 1));
  if (messages_.is_local(index)) {
    const auto found = gradients_.find({index + 1, microbatch});
    at::Tensor local = std::move(found->second);
    gradients_.erase(found);
    return local;
  }
  return messages_.receive(made_by, stage(index).output_mesh(microbatch)).tensor;
}

void Runner::backward(const PipelineAction& action) {
  StageRun& run = stage(action.stage);
  if (action.kind == Kind::W) {
    mark_begin();
    return run.backward_weights(action.microbatch);
  }
  const at::Tensor gradient = gradient_for(action);
  mark_begin();
  needs_.clear();
  const at::Tensor of_input = run.backward(action.microbatch, gradient, action.kind == Kind::I);
  if (action.stage == 0) return;
  if (messages_.is_local(action.stage - 1)) {
    gradients_[{action.stage, action.microbatch}] = of_input;
  } else {
    messages_.send(action, of_input, false);
  }
}

std::string Runner::context_of(const PipelineAction& action) const {
  return c10::str("at ", to_string(action), " on rank ", rank_, " of the pipeline", needs_);
}

// Neighbours are told, and nothing of the step stays: neither graphs nor gathered parameters.
void Runner::abandon(const PipelineAction& at, const std::exception& error) {
  broken_ = c10::str("at ", to_string(at), " on rank ", rank_);
  messages_.tell_failure(at, error);
  for (StageRun& run : stages_) {
    run.drop_all();
    run.sync().end();
  }
  inputs_.clear();
  targets_.clear();
  activations_.clear();
  gradients_.clear();
}

PipelineTrace Runner::trace() const {
  if (times_ns_.empty()) {
    raise<c10::ValueError>(
        {"Pipeline::trace", "no step has been recorded", "pass .trace = true, and call step() before trace()"});
  }
  const std::vector<std::vector<int64_t>> all = all_gather_object(times_ns_, options_.group);
  int64_t first = times_ns_[0];
  for (const auto& times : all) {
    for (const int64_t time : times) first = std::min(first, time);
  }
  PipelineTrace result{.table = table(), .spans = {}};
  for (const auto& times : all) {
    result.spans.emplace_back();
    for (size_t i = 0; i + 1 < times.size(); i += 2) {
      result.spans.back().push_back({double(times[i] - first) * 1e-3, double(times[i + 1] - first) * 1e-3});
    }
  }
  return result;
}

}  // namespace serried::detail
