// The communication hooks that come with the library: averaging, compression, quantisation, low rank, local SGD.
#pragma once

#include "serried/parallel/ddp/comm_hook.h"

#include <cstdint>
#include <functional>

namespace serried {
class DataParallelBase;
namespace detail {
class ZeroOptimizer;
}
}  // namespace serried

namespace serried::hooks {

/// The mean over the group: divides, then sums. What DistributedDataParallel does without a hook.
CommHook allreduce();

/// Leaves each rank its own gradients: shows what a step costs without communication.
CommHook noop();

/// The mean, sent in half the bytes of f32: cast, divide, sum, cast back.
CommHook fp16_compress();
CommHook bf16_compress();

/// Runs `inner` on a bucket cast to half the bytes, and casts its result back.
///     ddp.register_comm_hook(hooks::fp16_compress(hooks::power_sgd({.rank = 2})));
CommHook fp16_compress(CommHook inner);
CommHook bf16_compress(CommHook inner);

struct QuantizePerChannelOptions {
  int64_t bucket_size = 512;  // elements that share a scale
};

/// The mean of gradients that each rank rounds to 8 bits between its smallest and its largest: per bucket, or per
/// `bucket_size` elements. One all-gather; good for few ranks.
CommHook quantize_per_tensor();
CommHook quantize_per_channel(QuantizePerChannelOptions options = {});

struct PowerSGDOptions {
  int64_t rank = 1;                 // of the approximation
  int64_t start_iter = 1000;        // iterations with a plain mean first
  double min_compression_rate = 2;  // what saves less is averaged as it is
  bool use_error_feedback = true;   // what an approximation leaves out is added to the next gradient
  bool warm_start = true;           // start from the factors of the iteration before
  double orthogonalization_epsilon = 0;
  uint32_t random_seed = 0;                             // the same on every rank
  int64_t compression_stats_logging_frequency = 10000;  // iterations between lines of the log topic "comm"
  bool batch_tensors_with_same_shape = false;
};

/// The mean of each gradient, approximated by a product of two narrow matrices (arXiv 1905.13727); only those are sent.
/// The first compressed bucket makes a group of its own, so every rank must reach it.
///     ddp.register_comm_hook(hooks::power_sgd({.rank = 2, .start_iter = 100}));
CommHook power_sgd(PowerSGDOptions options = {});

/// The same with each bucket as one square matrix: fewer operations, less accurate.
CommHook batched_power_sgd(PowerSGDOptions options = {});

struct PostLocalSGDOptions {
  Group subgroup = {};                        // null: the ranks of the group on this host
  int64_t start_iter = 0;                     // iterations with the mean over the whole group
  bool post_local_gradient_allreduce = true;  // false: no communication at all after them
};

/// The mean over the group until `start_iter`, over the subgroup from then on. Goes with a model averager of the same
/// number of warm-up steps, see model_averaging.h.
CommHook post_local_sgd(PostLocalSGDOptions options);

/// Calls `after` with each bucket once `hook` has filled it, on the thread that communicates: the place for an
/// optimizer that steps bucket by bucket.
CommHook then(CommHook hook, std::function<void(const c10d::GradBucket&)> after);

/// Backward also steps: once `hook` has averaged a bucket, each rank updates the parameters in it that it owns and
/// sends them to the others. The result is that of backward() and step(), bit for bit, from the first iteration on; so
/// gradients cannot be clipped in between. `zero` was made with overlap_with_ddp and outlives `ddp`'s backwards.
///     ZeroRedundancyOptimizer<torch::optim::AdamW> zero(ddp.parameters(), torch::optim::AdamWOptions(1e-3),
///                                                       {.process_group = world, .overlap_with_ddp = true});
///     ddp.register_comm_hook(hooks::with_zero_step(hooks::allreduce(), ddp, zero));
/// Updates begin when the last bucket is full, beside reductions that are still on their way; interleaved ones at once,
/// beside the computation of backward, too: better where the ranks do not need all cores for that. ValueError for an
/// optimizer without overlap_with_ddp, of another group, or with parameters that are in no bucket; with
/// mixed_precision.param_dtype, skip_unused_allreduce or sparse gradients.
CommHook with_zero_step(CommHook hook, DataParallelBase& ddp, serried::detail::ZeroOptimizer& zero);
CommHook with_zero_step_interleaved(CommHook hook, DataParallelBase& ddp, serried::detail::ZeroOptimizer& zero);

enum class CommHookType {
  ALLREDUCE,
  FP16_COMPRESS,
  BF16_COMPRESS,
  QUANTIZE_PER_TENSOR,
  QUANTIZE_PER_CHANNEL,
  POWER_SGD,
  POWER_SGD_RANK2,
  BATCHED_POWER_SGD,
  BATCHED_POWER_SGD_RANK2,
  NOOP,
};

/// The hook of that name with its default options; ValueError for a number that names none.
CommHook make(CommHookType type);

}  // namespace serried::hooks
