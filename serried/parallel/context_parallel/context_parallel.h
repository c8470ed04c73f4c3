// Context parallel: one long sequence over the ranks of a mesh axis.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "serried/mesh/mesh.h"
#include "serried/tensor/attention/attention_way.h"

namespace serried {

namespace detail {
class CutBuffers;
struct SequenceScope;
}  // namespace detail

struct ContextParallelOptions {
  std::vector<at::Tensor> buffers = {};  // tensors that have the sequence: this rank's part while the scope is alive
  std::vector<int64_t> seq_dims = {};    // the dim of each that is the sequence
  AttentionWay rotate = AttentionWay::automatic;
  std::vector<at::Tensor> no_restore = {};  // of the buffers those that stay cut
  std::vector<int64_t> documents = {};      // lengths of documents in a row, which do not attend to each other
  std::optional<int64_t> length = {};       // of the sequence, where there are no buffers to tell it
};

/// While alive, plain tensors of this thread are parts of a sequence that the ranks of `mesh`, an axis, hold together:
/// `buffers` become this rank's part in place, cut as BalancedShard cuts, and scaled_dot_product_attention attends to
/// all positions of all ranks. The rest of a model works position by position and needs nothing. At the end buffers are
/// what they were before, exceptions included; what autograd has saved of them raises then, so backward runs inside, or
/// the buffers are in `no_restore`. Nests; the innermost counts. DTensors that are cut along the sequence need no
/// scope; inside one they go the way it asks for.
///     { ContextParallel guard(mesh["cp"], {.buffers = {x, positions}, .seq_dims = {1, 0}}); loss(net(x)).backward(); }
/// ValueError where lengths differ between buffers or ranks. All ranks of the axis make and end it together.
class ContextParallel {
 public:
  explicit ContextParallel(const DeviceMesh& mesh, ContextParallelOptions options = {});
  ~ContextParallel();
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

 private:
  std::unique_ptr<detail::CutBuffers> buffers_;
  std::shared_ptr<const detail::SequenceScope> previous_;
};

struct ContextShardOptions {
  int64_t seq_dim = 0;
  std::vector<int64_t> documents = {};
};

/// This rank's part of `whole` along `seq_dim`, as a ContextParallel scope cuts its buffers. Communicates nothing.
/// Differentiable.
at::Tensor context_parallel_shard(const DeviceMesh& mesh, const at::Tensor& whole, ContextShardOptions options = {});

/// The whole sequence on every rank, in order. Inside a scope with documents these are known. Differentiable.
///     at::Tensor whole = context_parallel_unshard(mesh["cp"], local_out, {.seq_dim = 1});
at::Tensor context_parallel_unshard(const DeviceMesh& mesh, const at::Tensor& local, ContextShardOptions options = {});

}  // namespace serried
