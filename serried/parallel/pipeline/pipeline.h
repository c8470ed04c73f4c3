// Pipeline: a model cut into stages, which ranks run micro-batch by micro-batch as a table says.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/pipeline/schedule.h"
#include "serried/parallel/pipeline/simulate.h"
#include "serried/parallel/pipeline/stage.h"
#include "serried/parallel/pipeline/table.h"
#include "serried/parallel/pipeline/tied.h"
#include "serried/parallel/pipeline/trace.h"

namespace serried {

namespace detail {
class Runner;
}

/// Of the last stage's output and the target, each of one micro-batch: one number.
using PipelineLoss = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

struct PipelineOptions {
  Group group = {};  // whose rank r is rank r of the table; null: the current process group
  Schedule schedule = Schedule::OneFOneB;
  int64_t microbatches = 0;                 // 0: as many as the table has
  PipelineLoss loss = {};                   // needed where the last stage is
  std::optional<PipelineTable> table = {};  // in place of the schedule's
  std::vector<PipelineTie> tied = {};
  bool scale_gradients = true;          // those of the mean of the losses; false: of their sum
  bool keep_outputs = false;            // of step(), for outputs()
  bool trace = false;                   // when each action of the newest step began and ended, for trace()
  std::optional<DeviceMesh> mesh = {};  // of DTensors between stages; none: that of the stage's parameters
};

/// Runs stages that ranks share out. All ranks of the group make it, with the same options, and call its functions
/// together. Rank r of p gives its stages in the order r, r + p, ..., of ZBV and DualPipeV r and 2p - 1 - r, of a table
/// of its own in ascending order. A stage takes one tensor and gives one; shapes may differ from step to step and from
/// micro-batch to micro-batch.
///     Pipeline pipe(stage, {.group = pp, .schedule = Schedule::OneFOneB, .microbatches = 8, .loss = loss_fn});
///     for (...) { optimizer.zero_grad(); auto losses = pipe.step(input, target); optimizer.step(); }
class Pipeline {
 public:
  /// One stage on this rank. ValueError on every rank where options or stages do not fit, or the table waits for ever.
  Pipeline(PipelineStage stage, PipelineOptions options)
      : Pipeline(std::vector<PipelineStage>{std::move(stage)}, std::move(options)) {}
  /// Several of them.
  Pipeline(std::vector<PipelineStage> stages, PipelineOptions options);
  Pipeline(const std::vector<torch::nn::AnyModule>& stages, PipelineOptions options)
      : Pipeline(std::vector<PipelineStage>(stages.begin(), stages.end()), std::move(options)) {}
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;
  Pipeline& operator=(Pipeline&&) noexcept;

  /// Forward and backward of a whole batch: gradients are added to those that are there, as by one backward of the mean
  /// of the losses. Returns the losses, one per micro-batch where the last stage is, none elsewhere. `input` is read
  /// where the first stage is, `target` where the last is; both are cut like at::tensor_split along dim 0, so a target
  /// has as many rows as the input (or several for each, where the rows divide evenly by the micro-batches). An error
  /// on one rank is raised on all of them; the pipeline is of no use after it.
  std::vector<at::Tensor> step(const at::Tensor& input = {}, const at::Tensor& target = {});

  /// Forwards only, without gradients: the outputs, one per micro-batch where the last stage is, none elsewhere. Fewer
  /// rows than micro-batches leave some of them empty.
  /// Modules are in whichever of train() and eval() they are in.
  std::vector<at::Tensor> eval(const at::Tensor& input = {});

  /// Of the newest step, where the last stage is: one per micro-batch. ValueError without keep_outputs.
  const std::vector<at::Tensor>& outputs() const;

  /// The newest step of all ranks, who call it together. ValueError without `.trace`, and before the first step.
  ///     std::ofstream("step.csv") << pipe.trace().to_csv();   // serried plan --pipeline step.csv
  PipelineTrace trace() const;

  const PipelineTable& table() const;
  /// Of all stages on this rank, for an optimizer; one that several of them share is there once.
  std::vector<at::Tensor> parameters() const;
  /// The most micro-batches that this rank kept at once in the newest step, counted in each stage.
  int64_t peak_in_flight() const;

 private:
  std::unique_ptr<detail::Runner> runner_;
};

}  // namespace serried
