// Optimizer state spread over the ranks (ZeRO): each keeps a part, and the weights become those of the optimizer alone.
// Start it with: serried run -n 4 build/bin/09_zero
#include <serried/serried.h>

#include <cstdlib>
#include <iostream>

using namespace serried;

torch::nn::Sequential make_net() {
  torch::manual_seed(0);
  torch::nn::Sequential net(torch::nn::Linear(8, 64));
  for (int layer = 0; layer < 4; ++layer) {
    net->push_back(torch::nn::GELU());
    net->push_back(torch::nn::Linear(64, 64));
  }
  net->push_back(torch::nn::Linear(64, 1));
  return net;
}

void train(DistributedDataParallel<torch::nn::Sequential>& ddp, torch::optim::Optimizer& optimizer, int rank) {
  torch::manual_seed(1 + rank);  // data of this rank's own, the same in both runs
  for (int step = 0; step < 50; ++step) {
    at::Tensor x = torch::randn({16, 8});
    optimizer.zero_grad();
    torch::mse_loss(ddp(x), x.sum(1, true)).backward();
    optimizer.step();
  }
}

/// The numbers that an AdamW keeps beside its parameters.
int64_t state_size(torch::optim::Optimizer& optimizer) {
  int64_t size = 0;
  for (auto& [parameter, state] : optimizer.state()) {
    auto& adamw = static_cast<torch::optim::AdamWParamState&>(*state);
    size += adamw.exp_avg().numel() + adamw.exp_avg_sq().numel();
  }
  return size;
}

int main() {
  Group world = new_group();
  const torch::optim::AdamWOptions options(1e-3);

  DistributedDataParallel alone(make_net(), {.process_group = world});
  torch::optim::AdamW whole(alone.parameters(), options);
  train(alone, whole, world->getRank());

  DistributedDataParallel spread(make_net(), {.process_group = world});
  ZeroRedundancyOptimizer<torch::optim::AdamW> zero(spread.parameters(), options, {.process_group = world});
  train(spread, zero, world->getRank());

  bool equal = true;
  for (size_t i = 0; i < alone.parameters().size(); ++i) {
    equal &= torch::equal(alone.parameters()[i], spread.parameters()[i]);
  }
  std::cout << state_size(zero.local_optimizer()) << " of " << state_size(whole)
            << " numbers of state, equal weights: " << (equal ? "yes" : "no") << std::endl;
  return equal && state_size(zero.local_optimizer()) <= state_size(whole) ? EXIT_SUCCESS : EXIT_FAILURE;
}
