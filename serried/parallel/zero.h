// An optimizer whose state is spread over the ranks: each keeps and updates only its own parameters.
#pragma once

#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "serried/parallel/zero/optimizer.h"

namespace serried {

/// Equals a `LocalOptimizer` over all parameters, bit for bit, at 1/n of its state: parameters go to n ranks, the
/// largest first to the rank that has the fewest bytes; `step()` updates the own ones and broadcasts them. Gradients
/// must be the same on every rank, as after a DistributedDataParallel backward. Every rank makes it with the same
/// parameters, else a ValueError names the first difference. It is a torch::optim::Optimizer: schedulers, closures,
/// param_groups() and zero_grad() work. A tensor that stands twice in a group, as tied weights do, is updated once.
/// hooks::with_zero_step makes its steps inside backward; join({&ddp, &opt}, ...) takes inputs of different lengths.
///     ZeroRedundancyOptimizer<torch::optim::AdamW> opt(ddp.parameters(), torch::optim::AdamWOptions(1e-3),
///                                                      {.process_group = world});
///     opt.consolidate_state_dict(0);
///     if (world->getRank() == 0) torch::save(opt, "optimizer.pt");   // torch::load(opt, ...) on every rank
template <class LocalOptimizer>
class ZeroRedundancyOptimizer : public detail::ZeroOptimizer {
  static_assert(!std::is_same_v<LocalOptimizer, torch::optim::LBFGS>,
                "LBFGS needs all gradients in one place: use it without ZeroRedundancyOptimizer");

 public:
  /// `defaults` is what LocalOptimizer takes: its options, or a learning rate.
  template <class Defaults>
  ZeroRedundancyOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, Defaults defaults,
                          const ZeroOptions& options = {})
      : ZeroOptimizer(
            groups,
            [defaults](const detail::ParamGroups& part) { return std::make_unique<LocalOptimizer>(part, defaults); },
            options) {}

  template <class Defaults>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, Defaults defaults, const ZeroOptions& options = {})
      : ZeroRedundancyOptimizer(detail::ParamGroups{torch::optim::OptimizerParamGroup(std::move(parameters))},
                                std::move(defaults), options) {}

  /// The optimizer over this rank's own parameters; its state() is all this rank keeps. Its options are overwritten by
  /// those of param_groups() in each step().
  LocalOptimizer& local_optimizer() const { return static_cast<LocalOptimizer&>(local()); }
};

}  // namespace serried
