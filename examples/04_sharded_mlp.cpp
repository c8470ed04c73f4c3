// A stock torch::nn MLP trained with its weights cut by columns and rows. serried run -n 4 ./04_sharded_mlp
#include <serried/serried.h>

#include <iostream>

using namespace serried;

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::gelu(fc1(x))); }
  torch::nn::Linear fc1{8, 32}, fc2{32, 4};
};
TORCH_MODULE(Mlp);

// Three steps; the loss after each.
std::vector<double> train(Mlp& net, torch::optim::Optimizer& optimizer, const at::Tensor& x, const at::Tensor& y) {
  std::vector<double> losses;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = torch::mse_loss(net(x), y);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

int main() {
  const Group world = new_group();
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = world});
  torch::manual_seed(0);
  const at::Tensor x = at::randn({16, 8}), y = at::randn({16, 4});
  torch::manual_seed(1);
  Mlp plain;
  torch::manual_seed(1);
  Mlp net;

  // The optimizer is made first on purpose: parameters change in place, so it sees the cut ones.
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  distribute_parameter(net->fc1->weight, mesh, {Replicate(), Shard(0)});
  distribute_parameter(net->fc1->bias, mesh, {Replicate(), Shard(0)});
  distribute_parameter(net->fc2->weight, mesh, {Replicate(), Shard(1)});
  distribute_parameter(net->fc2->bias, mesh, {Replicate(), Replicate()});

  // The batch is cut over "dp", the hidden units over "tp".
  const auto losses = train(net, optimizer, distribute_tensor(x, mesh, {Shard(0), Replicate()}),
                            distribute_tensor(y, mesh, {Shard(0), Replicate()}));

  torch::optim::AdamW plain_optimizer(plain->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto expected = train(plain, plain_optimizer, x, y);
  bool equal = true;
  for (size_t step = 0; step < losses.size(); ++step) {
    if (world->getRank() == 0) std::cout << "loss " << losses[step] << ", on one process " << expected[step] << "\n";
    equal &= std::abs(losses[step] - expected[step]) < 1e-5;
  }
  return equal ? 0 : 1;
}
