// Rounds of blocks, each call timed by itself after a barrier.
#include "benchmarks/support/turns.h"

#include <ATen/ops/tensor.h>

#include <algorithm>

#include "serried/comm/collectives/collectives.h"

namespace serried::bench {

std::vector<double> slowest(const std::vector<double>& values, const Group& group) {
  const at::Tensor all = at::tensor(values, at::kDouble);
  all_reduce_(all, group, c10d::ReduceOp::MAX);
  return {all.data_ptr<double>(), all.data_ptr<double>() + all.numel()};
}

double lower_quartile(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 4, values.end());
  return values[values.size() / 4];
}

namespace {

/// As many as fill a block, the same number on all ranks.
int steps_per_block(const Contender& contender, const Group& group, double block_us) {
  barrier(group);
  return std::clamp(int(block_us / slowest({us_of(contender.step)}, group)[0]), 2, 200);
}

}  // namespace

void take_turns(std::vector<Contender>& contenders, const Group& group, TurnOptions options) {
  for (Contender& contender : contenders) {
    for (int i = 0; i < options.warm_up; ++i) contender.step();
  }
  const int steps = steps_per_block(contenders[0], group, options.block_us);
  for (int round = 0; round < options.rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      Contender& contender = contenders[(i + size_t(round)) % contenders.size()];
      contender.step();  // the caches still hold another model
      for (int call = 0; call < steps; ++call) {
        barrier(group);
        contender.times.push_back(us_of(contender.step));
      }
    }
  }
  for (Contender& contender : contenders) contender.times = slowest(contender.times, group);
}

}  // namespace serried::bench
