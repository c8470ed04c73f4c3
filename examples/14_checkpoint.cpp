// Training that is saved, and goes on under another layout: data parallel with ZeRO, then fully sharded.
// Start it with: serried run -n 4 build/bin/14_checkpoint
// Each half alone on one rank or on three works, too: files know nothing of ranks.
#include <serried/serried.h>

#include <cmath>
#include <cstdio>
#include <filesystem>

namespace {

using namespace serried;
namespace nn = torch::nn;

struct NetImpl : nn::Module {
  nn::Linear in = register_module("in", nn::Linear(32, 64));
  nn::Linear middle = register_module("middle", nn::Linear(64, 64));
  nn::Linear out = register_module("out", nn::Linear(64, 1));

  at::Tensor forward(const at::Tensor& x) { return out(torch::tanh(middle(torch::tanh(in(x))))); }
};
TORCH_MODULE(Net);

constexpr int64_t kSteps = 10;  // of each half

/// The same on every rank, so that any number of them computes the same.
at::Tensor loss_of(const std::function<at::Tensor(const at::Tensor&)>& net, int64_t step) {
  return seeded(uint64_t(step), [&] {
    const at::Tensor x = torch::randn({16, 32});
    return torch::mse_loss(net(x), x.sum(1, true).sin());
  });
}

/// One process's worth of steps [begin, end); the loss of the last.
double train(const std::function<at::Tensor(const at::Tensor&)>& net, torch::optim::Optimizer& optimizer, int64_t begin,
             int64_t end) {
  at::Tensor loss;
  for (int64_t step = begin; step < end; ++step) {
    optimizer.zero_grad();
    loss = loss_of(net, step);
    loss.backward();
    optimizer.step();
  }
  return loss.item<double>();
}

void first_half(const std::string& path, const Group& world) {
  Net net = seeded(1, [] { return Net(); });
  DistributedDataParallel ddp(net, {.process_group = world});
  ZeroRedundancyOptimizer<torch::optim::AdamW> optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  train([&](const at::Tensor& x) { return ddp(x); }, optimizer, 0, kSteps);
  checkpoint::save(path, {{"model", checkpoint::state_of(*net)},
                          {"optimizer", checkpoint::state_of(optimizer)},
                          {"step", kSteps},
                          {"note", "data parallel"}});
}

double second_half(const std::string& path) {
  Net net;  // random; what counts is in the files
  for (const auto& layer : net->children()) fully_shard(*layer);
  fully_shard(*net);
  serried::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  int64_t step = 0;
  checkpoint::load(
      path, {{"model", checkpoint::state_of(*net)}, {"optimizer", checkpoint::state_of(optimizer)}, {"step", &step}});
  return train([&](const at::Tensor& x) { return net(x); }, optimizer, step, 2 * kSteps);
}

double uninterrupted() {
  Net net = seeded(1, [] { return Net(); });
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  return train([&](const at::Tensor& x) { return net(x); }, optimizer, 0, 2 * kSteps);
}

}  // namespace

int main() {
  const Group world = new_group();
  const ProcessGroupGuard current(world);
  const std::string path = (std::filesystem::temp_directory_path() / "serried_example_checkpoint").string();
  first_half(path, world);
  const double resumed = second_half(path);
  if (world->getRank() != 0) return 0;
  std::printf("saved by %d ranks of data parallel: %s, \"%s\"\n", world->getSize(), path.c_str(),
              checkpoint::read_value(path, "note").toStringRef().c_str());
  std::printf("loss after %ld more steps, fully sharded: %.9f\n", kSteps, resumed);
  const double expected = uninterrupted();
  std::printf("loss of one process without a stop:     %.9f\n", expected);
  std::printf("The same loss: %s\n", std::abs(resumed - expected) < 1e-6 ? "yes" : "no");
  std::filesystem::remove_all(path);
}
