// Data parallel training in its plainest form: equal weights, different data, averaged gradients.
// Start it with: serried run -n 4 build/bin/02_data_parallel_by_hand
#include <serried/serried.h>

#include <cstdlib>
#include <iostream>

int main() {
  serried::Group world = serried::new_group();

  // Equal weights on every rank: rank 0's.
  torch::nn::Linear net(8, 1);
  for (auto& p : net->parameters()) serried::broadcast_(p.detach(), world);

  // What the net has to learn: the sum of its inputs. Each rank draws data of its own.
  torch::manual_seed(world->getRank());
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  double loss_value = 0;
  for (int step = 0; step < 200; ++step) {
    at::Tensor x = torch::randn({16, 8});
    at::Tensor loss = torch::mse_loss(net(x), x.sum(1, true));
    optimizer.zero_grad();
    loss.backward();
    for (auto& p : net->parameters()) serried::all_reduce_(p.grad(), world, c10d::ReduceOp::AVG);
    optimizer.step();
    loss_value = loss.item<double>();
  }

  // The gradients were the same everywhere, so the weights still are, to the last bit.
  at::Tensor weights = serried::all_gather(net->weight.detach(), world);
  const bool equal = (weights == weights[0]).all().item<bool>();
  if (world->getRank() == 0)
    std::cout << "loss " << loss_value << ", equal weights: " << (equal ? "yes" : "no") << "\n";
  return equal && loss_value < 1e-4 ? EXIT_SUCCESS : EXIT_FAILURE;
}
