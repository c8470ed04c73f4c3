// When parameters are averaged, among whom, and how.
#include "serried/parallel/model_averaging.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/tape/tape.h"

namespace serried {
namespace {

constexpr const char* kStepKey = "averager_step";

void check_warmup(const char* where, int64_t warmup_steps) {
  if (warmup_steps >= 0) return;
  raise<c10::ValueError>({where, c10::str("warmup_steps is ", warmup_steps), "pass 0 or more"});
}

void warn_of_period_one(const char* where) {
  log::warn_once(c10::str(where, ": the period is 1, so averaging parameters costs as much as averaging gradients at ",
                          "every step; DistributedDataParallel alone does that"));
}

std::string level_text(uint64_t level) {
  if (level == 0) return "not due";
  return level == 1 ? "due" : c10::str("due at level ", level);
}

using Hierarchy = std::vector<std::pair<int64_t, int>>;

void check_hierarchy(const Hierarchy& sizes, int world_size) {
  constexpr const char* where = "HierarchicalModelAverager";
  if (sizes.empty()) {
    raise<c10::ValueError>({where, "period_group_sizes is empty",
                            c10::str("pass pairs of a period and a number of ranks, the last with ", world_size)});
  }
  int64_t previous = 0;
  for (const auto& [period, size] : sizes) {
    if (period <= previous) {
      raise<c10::ValueError>(
          {where, c10::str("the period ", period, " comes after ", previous), "pass rising periods of 1 or more"});
    }
    previous = period;
    if (size >= 1 && world_size % size == 0) continue;
    raise<c10::ValueError>({where, c10::str(world_size, " ranks cannot be cut into groups of ", size),
                            c10::str("pass a number that divides ", world_size)});
  }
  if (sizes.back().second == world_size) return;
  raise<c10::ValueError>(
      {where, c10::str("the last level has ", sizes.back().second, " ranks and the process group ", world_size),
       c10::str("pass ", world_size, " as the size of the largest period")});
}

// Neighbours in groups of `size`.
Group neighbours(const Group& group, int size) {
  if (size == group->getSize()) return group;
  std::vector<std::vector<int>> parts;
  for (int first = 0; first < group->getSize(); first += size) {
    std::vector<int>& ranks = parts.emplace_back(size);
    std::iota(ranks.begin(), ranks.end(), first);
  }
  return split_group(group, parts);
}

void average_flat(const std::vector<at::Tensor>& parameters, const Group& group) {
  std::vector<at::Tensor> flat;
  for (const at::Tensor& parameter : parameters) flat.push_back(parameter.reshape(-1));
  const at::Tensor joined = at::cat(flat).div_(group->getSize());
  all_reduce_(joined, group);
  int64_t begin = 0;
  for (const at::Tensor& parameter : parameters) {
    parameter.copy_(joined.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
    begin += parameter.numel();
  }
}

}  // namespace

void average_parameters(const std::vector<at::Tensor>& parameters, const Group& group) {
  if (!group) return;
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) by_dtype[parameter.scalar_type()].push_back(parameter);
  }
  for (const auto& [_, same] : by_dtype) average_flat(same, group);
}

int64_t detail::AveragerSteps::next(const char* averager, const std::function<uint64_t(int64_t)>& action) {
  if (tape::is_recording()) {
    const std::weak_ptr<int64_t> count = count_;
    const auto value = [count, action] {
      const auto alive = count.lock();
      return alive ? action(*alive) : UINT64_MAX;
    };
    tape::rely_on(
        {.name = c10::str("averaging of ", averager), .value = value, .subject = count_.get(), .text = level_text});
    tape::after_replay([count] {
      if (const auto alive = count.lock()) ++*alive;
    });
  }
  return (*count_)++;
}

PeriodicModelAverager::PeriodicModelAverager(PeriodicModelAveragerOptions options) : options_(std::move(options)) {
  constexpr const char* where = "PeriodicModelAverager";
  check_warmup(where, options_.warmup_steps);
  if (options_.period < 1) {
    raise<c10::ValueError>({where, c10::str("period is ", options_.period), "pass 2 or more"});
  }
  if (options_.period == 1) warn_of_period_one(where);
  if (!options_.process_group) options_.process_group = require_current_process_group(where);
}

void PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const auto is_due = [period = options_.period, warmup = options_.warmup_steps](int64_t step) -> uint64_t {
    return step >= warmup && (step - warmup) % period == 0;
  };
  const int64_t step = steps_.next("PeriodicModelAverager", is_due);
  if (is_due(step) != 0) serried::average_parameters(parameters, options_.process_group);
}

HierarchicalModelAverager::HierarchicalModelAverager(HierarchicalModelAveragerOptions options)
    : warmup_steps_(options.warmup_steps) {
  constexpr const char* where = "HierarchicalModelAverager";
  const Group group = options.process_group ? options.process_group : require_current_process_group(where);
  check_warmup(where, warmup_steps_);
  check_hierarchy(options.period_group_sizes, group->getSize());
  if (options.period_group_sizes.back().first == 1) warn_of_period_one(where);
  for (const auto& [period, size] : options.period_group_sizes) {
    log::line(log::Topic::comm, where, ": groups of ", size, " average every ", period, " steps");
    levels_.push_back({period, neighbours(group, size)});
  }
}

void HierarchicalModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  std::vector<int64_t> periods;
  for (const Level& level : levels_) periods.push_back(level.period);
  // How many levels there are up to the one that is due: the largest whose period divides the step.
  const auto due = [periods = std::move(periods), warmup = warmup_steps_](int64_t step) -> uint64_t {
    if (step < warmup) return 0;
    const auto divides = [step](int64_t period) { return step % period == 0; };
    return uint64_t(std::find_if(periods.rbegin(), periods.rend(), divides).base() - periods.begin());
  };
  const uint64_t level = due(steps_.next("HierarchicalModelAverager", due));
  if (level != 0) serried::average_parameters(parameters, levels_[level - 1].group);
}

std::vector<at::Tensor> detail::parameters_of(const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : groups) parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

void detail::write_averager_step(torch::serialize::OutputArchive& archive, int64_t step) {
  archive.write(kStepKey, c10::IValue(step));
}

int64_t detail::read_averager_step(torch::serialize::InputArchive& archive) {
  c10::IValue step;
  if (archive.try_read(kStepKey, step)) return step.toInt();
  log::warn_once("PostLocalSGDOptimizer: the archive has no step of an averager; it starts again at 0");
  return 0;
}

}  // namespace serried
