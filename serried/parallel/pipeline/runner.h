// Runs the row of one rank: waits for what an action needs, does it, sends what others wait for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "serried/parallel/pipeline/messages.h"
#include "serried/parallel/pipeline/pipeline.h"
#include "serried/parallel/pipeline/stage_run.h"

namespace serried::detail {

class Runner {
 public:
  /// `options` have their group and their table.
  Runner(std::vector<PipelineStage> stages, PipelineOptions options);

  std::vector<at::Tensor> step(const at::Tensor& input, const at::Tensor& target);
  std::vector<at::Tensor> eval(const at::Tensor& input);
  PipelineTrace trace() const;

  const PipelineOptions& options() const { return options_; }
  const PipelineTable& table() const { return *options_.table; }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  std::vector<at::Tensor> parameters() const;
  int64_t peak_in_flight() const { return peak_in_flight_; }

 private:
  /// What the row says of a stage.
  struct StagePlan {
    size_t first_action = 0;  // places in the row
    size_t last_action = 0;
    size_t last_backward = 0;
    int64_t last_microbatch = 0;  // of that backward
    bool unshards_itself = false;
  };
  using Place = std::pair<int64_t, int64_t>;  // stage and micro-batch

  void plan_stages();
  void rely_on_stages() const;
  void check_usable();
  void check_arguments(const at::Tensor& input, const at::Tensor& target, bool trains) const;
  void check_target_rows() const;
  void begin(const at::Tensor& input, const at::Tensor& target, bool trains);
  void begin_row(const at::Tensor& input, const at::Tensor& target, bool trains);
  void run_row(bool trains);
  void end_row(bool trains);
  void run(size_t place, bool trains);
  void do_action(size_t place);
  void forward(const PipelineAction& action, bool is_last_microbatch);
  void backward(const PipelineAction& action);
  Received input_of(const PipelineAction& action);
  at::Tensor gradient_for(const PipelineAction& action);
  at::Tensor loss_of(const at::Tensor& output, int64_t microbatch);
  void check_losses(const StageRun& last, int64_t microbatch);
  void hand_on(const PipelineAction& action, const at::Tensor& output);
  void mark_begin();
  void abandon(const PipelineAction& at, const std::exception& error);
  std::string context_of(const PipelineAction& action) const;
  StageRun& stage(int64_t index);
  bool has_first() const { return table().rank_of(0) == rank_; }
  bool has_last() const { return table().rank_of(table().stages() - 1) == rank_; }

  const PipelineOptions options_;
  const int rank_;
  const PipelineTable::Row& row_;
  std::vector<StageRun> stages_;
  std::vector<StagePlan> plans_;
  Messages messages_;
  TiedWeights tied_;

  // Of the running step.
  const std::shared_ptr<int64_t> step_ = std::make_shared<int64_t>(0);  // a graph that replays it may outlive this
  bool trains_ = false;
  std::vector<at::Tensor> inputs_;
  std::vector<at::Tensor> targets_;
  int64_t target_rows_ = 0;
  int64_t num_losses_ = 0;
  bool has_graph_ = false;                 // one of them
  std::map<Place, Received> activations_;  // from a stage of this rank, for the one after it
  std::map<Place, at::Tensor> gradients_;  // and back
  std::string needs_;                      // what the running action has got or waits for, for messages
  int64_t begin_ns_ = 0;

  // Of the newest one.
  std::vector<at::Tensor> losses_;
  std::vector<at::Tensor> outputs_;    // of the newest step
  std::vector<at::Tensor> evaluated_;  // of an eval that is under way
  int64_t peak_in_flight_ = 0;
  std::vector<int64_t> times_ns_;  // begin and end of each action
  std::string broken_;             // what ended it; empty: it ended well
};

}  // namespace serried::detail
