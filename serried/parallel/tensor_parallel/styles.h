// Styles: how a module's parameters lie over tensor parallel ranks, and what its inputs and outputs are brought to.
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <functional>
#include <utility>

#include "serried/mesh/mesh.h"

namespace serried {

/// What a style is: anything that can be applied to a module on a mesh of one axis.
template <class Style>
concept IsParallelStyle = requires(const Style& style, torch::nn::Module& module, const DeviceMesh& mesh) {
  style.apply(module, mesh);
};

/// A value that holds any style, one of these or your own:
///     struct MyStyle { void apply(torch::nn::Module& module, const DeviceMesh& mesh) const; };
class ParallelStyle {
 public:
  template <IsParallelStyle Style>
  requires(!std::same_as<Style, ParallelStyle>) ParallelStyle(Style style)  // NOLINT: a plan lists styles as they are
      : comes_last_(requires { Style::kComesLast; }),
        apply_([style = std::move(style)](auto& module, const auto& mesh) { style.apply(module, mesh); }) {}

  void apply(torch::nn::Module& module, const DeviceMesh& mesh) const { apply_(module, mesh); }
  /// Whether it changes what other styles have written, and so is applied after them.
  bool comes_last() const { return comes_last_; }

 private:
  bool comes_last_;
  std::function<void(torch::nn::Module&, const DeviceMesh&)> apply_;
};

struct ColwiseOptions {
  Placements input = {Replicate()};
  Placements output = {};  // none: as the columns lie, Shard(-1)
  int64_t fused = 1;       // how many projections stand side by side in the matrix: each of them is cut
};

/// Cuts the outputs: Linear {weight S0, bias S0}, Embedding {weight S1}, MultiheadAttention {its fused projection}.
///     {"blocks.*.qkv", ColwiseParallel({.fused = 3})}
class ColwiseParallel {
 public:
  explicit ColwiseParallel(ColwiseOptions options = {}) : options_(std::move(options)) {}
  void apply(torch::nn::Module& module, const DeviceMesh& mesh) const;

 private:
  ColwiseOptions options_;
};

struct RowwiseOptions {
  Placements input = {};  // none: Shard(-1), of an Embedding's indices Replicate
  Placements output = {Replicate()};
};

/// Cuts the inputs: Linear {weight S1, bias R}, Embedding {weight S0}. The sums are done on the way to `output`;
/// {Shard(1)} is sequence parallel.
class RowwiseParallel {
 public:
  explicit RowwiseParallel(RowwiseOptions options = {}) : options_(std::move(options)) {}
  void apply(torch::nn::Module& module, const DeviceMesh& mesh) const;

 private:
  RowwiseOptions options_;
};

struct SequenceOptions {
  int64_t dim = 1;
};

/// Keeps parameters whole and cuts the tokens: LayerNorm, GroupNorm; Dropout has nothing to place. The gradients of
/// the parameters are summed over the ranks.
class SequenceParallel {
 public:
  explicit SequenceParallel(SequenceOptions options = {}) : options_(options) {}
  void apply(torch::nn::Module& module, const DeviceMesh& mesh) const;

 private:
  SequenceOptions options_;
};

struct PrepareOptions {
  Placements desired;
};

/// What the Linear, Embedding and norm modules within take in, where no style of theirs says it.
class PrepareModuleInput {
 public:
  static constexpr bool kComesLast = true;
  explicit PrepareModuleInput(PrepareOptions options) : options_(std::move(options)) {}
  void apply(torch::nn::Module& module, const DeviceMesh& mesh) const;

 private:
  PrepareOptions options_;
};

/// What a Linear, an Embedding or a norm gives, whatever its style says.
class PrepareModuleOutput {
 public:
  static constexpr bool kComesLast = true;
  explicit PrepareModuleOutput(PrepareOptions options) : options_(std::move(options)) {}
  void apply(torch::nn::Module& module, const DeviceMesh& mesh) const;

 private:
  PrepareOptions options_;
};

}  // namespace serried
