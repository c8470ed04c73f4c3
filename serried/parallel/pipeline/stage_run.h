// One stage of this rank at work: forwards keep what their backwards need, micro-batch by micro-batch.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "serried/mesh/mesh.h"
#include "serried/parallel/pipeline/backward_split.h"
#include "serried/parallel/pipeline/messages.h"
#include "serried/parallel/pipeline/stage.h"
#include "serried/parallel/pipeline/stage_sync.h"
#include "serried/tensor/spec.h"

namespace serried::detail {

class StageRun {
 public:
  StageRun(PipelineStage stage, int64_t index);

  /// What a stage gives, for the next one or for the loss: its graph stays here.
  using Finish = std::function<at::Tensor(const at::Tensor& output)>;

  /// The output, which others may use without a graph. `finish` makes of it what backward starts from: a loss, whose
  /// gradient is 1. Without: the output itself, whose gradient comes later.
  at::Tensor forward(int64_t microbatch, Received input, const Finish& finish);
  /// B, or I: the gradient of the input, undefined where it has none. `gradient` is that of the output.
  at::Tensor backward(int64_t microbatch, const at::Tensor& gradient, bool is_split);
  /// W.
  void backward_weights(int64_t microbatch);
  void begin_step() { num_computed_ = 0; }
  /// After the stage's last backward in a step, which reduces the gradients of all: ValueError where it had nothing to
  /// compute, so that those of the others were left.
  void check_reduced(int64_t microbatch) const;

  /// Micro-batches whose F is done and whose B or W is not.
  int64_t num_in_flight() const { return int64_t(flights_.size()); }
  /// Whether its backward will have something to compute.
  bool has_graph(int64_t microbatch) const { return flights_.at(microbatch).root.is_valid(); }
  void drop_all() { flights_.clear(); }

  int64_t index() const { return index_; }
  const PipelineStage& stage() const { return stage_; }
  StageSync& sync() { return sync_; }
  /// That of the parameters, where DTensors come to; none where they are plain, or on several.
  const std::optional<DeviceMesh>& mesh() const { return mesh_; }
  void set_mesh(DeviceMesh mesh) { mesh_ = std::move(mesh); }
  /// Where gradients of the output of `microbatch` lie.
  std::optional<DeviceMesh> output_mesh(int64_t microbatch) const;

 private:
  struct Flight {
    at::Tensor input;                 // a leaf; undefined: the first stage's belongs to the user
    torch::autograd::Edge root = {};  // of the output or of the loss; none: there is nothing to compute
    at::Tensor seed = {};             // the gradient of a loss
    c10::DimVector sizes = {};        // of the output
    at::ScalarType dtype = at::kFloat;
    SpecPtr spec = {};  // of an output that is a DTensor
    std::unique_ptr<SplitBackward> split = {};
  };

  void check_gradient(const Flight& flight, const at::Tensor& gradient) const;

  const PipelineStage stage_;
  const int64_t index_;
  StageSync sync_;
  std::optional<DeviceMesh> mesh_;
  std::map<int64_t, Flight> flights_;
  int64_t num_computed_ = 0;  // backwards of this step that had something to compute
  bool last_computed_ = false;
};

}  // namespace serried::detail
