// A ZeroRedundancyOptimizer's step inside backward: each bucket's parameters are updated once it is averaged.
#include <set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/ops.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/parameters.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/hooks/chain_queue.h"
#include "serried/parallel/ddp/hooks/steps.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/parallel/zero/optimizer.h"

namespace serried::hooks {
namespace {

using serried::detail::ZeroOptimizer;

constexpr const char* kWhere = "with_zero_step";

void check_options(const DistributedDataParallelOptions& options) {
  if (options.mixed_precision.param_dtype) {
    raise<c10::ValueError>({kWhere,
                            c10::str("during backward the parameters are ", *options.mixed_precision.param_dtype,
                                     ", the optimizer's are of full precision"),
                            "leave out mixed_precision.param_dtype, or call step() after backward"});
  }
  if (options.skip_unused_allreduce) {
    raise<c10::ValueError>({kWhere, "skip_unused_allreduce keeps buckets from the hook, the last one maybe, too",
                            "leave out skip_unused_allreduce, or call step() after backward"});
  }
}

void check_group(const Group& group, const ZeroOptimizer& zero) {
  if (group == zero.process_group()) return;
  raise<c10::ValueError>({kWhere, "the module and the optimizer have different groups",
                          "make both with the same process_group; after set_process_group make a new optimizer"});
}

void check_parameters(DataParallelBase& ddp, const ZeroOptimizer& zero) {
  std::set<const void*> in_buckets;
  for (const auto& parameter : serried::detail::parts_of(ddp.reducer().parameters())) {
    if (parameter.sparse_gradient) {
      raise<c10::ValueError>({kWhere, "the gradient of " + parameter.name + " is sparse",
                              "build its module with .sparse(false), or call step() after backward"});
    }
    in_buckets.insert(parameter.tensor.unsafeGetTensorImpl());
  }
  int64_t index = 0;
  for (const auto& group : zero.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (in_buckets.count(parameter.unsafeGetTensorImpl()) == 0) {
        raise<c10::ValueError>({kWhere,
                                c10::str("parameter ", index, " of the optimizer, ", watch::describe_tensor(parameter),
                                         ", is in no bucket of the module"),
                                "give the optimizer parameters that the module averages: not frozen, ignored, delayed "
                                "or distributed ones"});
      }
      ++index;
    }
  }
}

/// Updates of buckets that a hook has averaged. They communicate on a group of their own, one after another: on the
/// module's group their broadcasts would come at no fixed place among its reductions.
class ZeroStep {
 public:
  ZeroStep(const DataParallelBase& ddp, ZeroOptimizer& zero) : ddp_(ddp), zero_(zero) {}

  /// The bucket's buffer, when its parameters have been updated on every rank.
  HookFuture update(const Group& group, const c10d::GradBucket& bucket, const HookFuture& averaged) {
    check_group(group, zero_);
    const Group& own_group = chains_.group(group);
    const at::Tensor used = finds_unused() ? used_here(bucket) : at::Tensor();
    return chains_.run([this, bucket, averaged, used, &own_group] {
      const auto agree = [used, &own_group] { return any(used, own_group); };
      const HookFuture ready_to_step = used.defined() ? detail::after_async(averaged, agree) : averaged;
      return detail::after_async(ready_to_step, [=, this, &own_group] { return step(bucket, used, own_group); });
    });
  }

 private:
  // As the reducer sees it, which tells after the last bucket only.
  bool finds_unused() const { return ddp_.options().find_unused_parameters || ddp_.options().static_graph; }

  static at::Tensor used_here(const c10d::GradBucket& bucket) {
    const std::vector<at::Tensor> parameters = bucket.getParameters();
    at::Tensor used = at::empty({int64_t(parameters.size())}, at::kInt);
    for (size_t i = 0; i < parameters.size(); ++i) used.data_ptr<int>()[i] = parameters[i].grad().defined() ? 1 : 0;
    return used;
  }

  static HookFuture any(const at::Tensor& used, const Group& group) {
    using namespace serried::detail;
    return ops::start_all_reduce_(used, group, share(c10d::ReduceOp::MAX))->getFuture();
  }

  HookFuture step(const c10d::GradBucket& bucket, const at::Tensor& used, const Group& group) const {
    const std::vector<at::Tensor> all = bucket.getParameters(), slices = bucket.getGradients();
    std::vector<at::Tensor> parameters, gradients;
    for (size_t i = 0; i < all.size(); ++i) {
      if (used.defined() && used.data_ptr<int>()[i] == 0) continue;
      parameters.push_back(all[i]);
      gradients.push_back(in_layout_of(all[i], slices[i]).to(all[i].scalar_type()));
    }
    HookFuture done = detail::ready(bucket.getBuffer());
    for (const HookFuture& sent : zero_.step_part(parameters, gradients, group)) {
      done = detail::after_async(done, [sent] { return sent; });
    }
    return detail::after(done, [buffer = bucket.getBuffer()](const c10::IValue&) { return buffer; });
  }

  // Buckets have gradients in the memory format of their parameters, which GradBucket does not know.
  static at::Tensor in_layout_of(const at::Tensor& parameter, const at::Tensor& slice) {
    if (!parameter.is_non_overlapping_and_dense()) return slice;
    return slice.as_strided(parameter.sizes(), parameter.strides());
  }

  const DataParallelBase& ddp_;
  ZeroOptimizer& zero_;
  detail::ChainQueue chains_;  // last: its end waits for updates
};

std::shared_ptr<ZeroStep> make_zero_step(DataParallelBase& ddp, ZeroOptimizer& zero) {
  check_options(ddp.options());
  check_group(ddp.process_group(), zero);
  check_parameters(ddp, zero);
  zero.leave_steps_to_backward();
  return std::make_shared<ZeroStep>(ddp, zero);
}

// The average in the bucket's own buffer, wherever the hook has put it.
HookFuture average_in_place(const CommHook& hook, const Group& group, c10d::GradBucket& bucket) {
  return detail::after(hook(group, bucket), [buffer = bucket.getBuffer()](const c10::IValue& value) {
    const at::Tensor result = c10d::detail::parseCppCommHookResult(value);
    return result.data_ptr() == buffer.data_ptr() ? buffer : buffer.copy_(result.view_as(buffer));
  });
}

// The value of the last, which ends last; or the first error.
HookFuture last_of(std::vector<HookFuture> updates) {
  const HookFuture last = updates.back();
  return last->then(
      [updates = std::move(updates)](c10::ivalue::Future& done) {
        for (const HookFuture& update : updates) update->value();
        return done.value();
      },
      c10::TensorType::get());
}

using AveragedBuckets = std::vector<std::pair<c10d::GradBucket, HookFuture>>;

}  // namespace

CommHook with_zero_step(CommHook hook, DataParallelBase& ddp, ZeroOptimizer& zero) {
  const std::string name = hook.name() + "_with_zero_step";
  const auto run = [hook = std::move(hook), step = make_zero_step(ddp, zero),
                    waiting = std::make_shared<AveragedBuckets>()](const Group& group, c10d::GradBucket& bucket) {
    if (bucket.getIndex() == 0) waiting->clear();  // a backward that failed may have left some
    const HookFuture averaged = average_in_place(hook, group, bucket);
    waiting->emplace_back(bucket, averaged);
    if (!bucket.isLast()) return averaged;
    std::vector<HookFuture> updates;
    for (const auto& [earlier, future] : std::exchange(*waiting, {})) {
      updates.push_back(step->update(group, earlier, future));
    }
    return last_of(std::move(updates));
  };
  return CommHook(name, run);
}

CommHook with_zero_step_interleaved(CommHook hook, DataParallelBase& ddp, ZeroOptimizer& zero) {
  const std::string name = hook.name() + "_with_zero_step_interleaved";
  const auto run = [hook = std::move(hook), step = make_zero_step(ddp, zero)](const Group& group,
                                                                              c10d::GradBucket& bucket) {
    return step->update(group, bucket, average_in_place(hook, group, bucket));
  };
  return CommHook(name, run);
}

}  // namespace serried::hooks
