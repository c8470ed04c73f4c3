// Data parallel training whose step is recorded while it runs, and then replayed. serried run -n 2 ./07_captured_ddp
#include <serried/serried.h>

#include <chrono>
#include <iostream>

using namespace serried;

// A model with its optimizer; `step` is what a loop without capture would call.
struct Training {
  explicit Training(const Group& world)
      : ddp(torch::nn::Sequential(torch::nn::Linear(8, 32), torch::nn::ReLU(), torch::nn::Linear(32, 1)),
            {.process_group = world}),
        optimizer(ddp.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)) {}

  at::Tensor step(const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    at::Tensor loss = torch::mse_loss(ddp(x), y);
    loss.backward();
    optimizer.step();
    return loss;
  }

  DistributedDataParallel<torch::nn::Sequential> ddp;
  serried::SGD optimizer;  // torch::optim's numbers, with a learning rate that a graph can read
};

// Trains on data of this rank's own; the time of a step in milliseconds, and the last loss.
template <class Step>
std::pair<double, at::Tensor> train(Step&& step, int rank) {
  constexpr int kWarmUp = 10, kSteps = 500;
  torch::manual_seed(100 + rank);
  at::Tensor loss;
  auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kWarmUp + kSteps; ++i) {
    if (i == kWarmUp) begin = std::chrono::steady_clock::now();
    const at::Tensor x = torch::randn({16, 8});
    loss = step(x, x.sum(1, true));
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  return {time.count() / kSteps, loss};
}

int main() {
  at::set_num_threads(1);
  const Group world = new_group();
  torch::manual_seed(0);
  Training eager(world);
  torch::manual_seed(0);
  Training captured(world);  // the same weights again

  const auto [eager_ms, eager_loss] =
      train([&](const at::Tensor& x, const at::Tensor& y) { return eager.step(x, y); }, world->getRank());
  auto step = capture([&](const at::Tensor& x, const at::Tensor& y) { return captured.step(x, y); });
  const auto [captured_ms, captured_loss] = train(step, world->getRank());

  const bool equal = at::equal(eager_loss, captured_loss);
  if (world->getRank() == 0) {
    std::cout << step.graph().to_string() << "graph of " << step.graph().nodes().size() << " ops, "
              << step.graph().count("all_reduce") << " all_reduce; recorded " << step.captures()
              << " time(s), replayed " << step.replays() << "\n"
              << "ms per step: eager " << eager_ms << ", captured " << captured_ms << "\n"
              << "the same loss to the last bit: " << (equal ? "yes" : "no") << "\n";
  }
  return equal ? 0 : 1;
}
