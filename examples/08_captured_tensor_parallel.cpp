// A tensor parallel MLP whose step is captured. serried run -n 2 ./08_captured_tensor_parallel
#include <serried/serried.h>

#include <chrono>
#include <iostream>

using namespace serried;

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(const DeviceMesh& mesh) {
    register_module("up", up);
    register_module("down", down);
    distribute_parameter(up->weight, mesh, {Shard(0)});  // by columns: each rank has some of the hidden units
    distribute_parameter(up->bias, mesh, {Shard(0)});
    distribute_parameter(down->weight, mesh, {Shard(1)});  // by rows: what comes out is a sum over ranks
    distribute_parameter(down->bias, mesh, {Replicate()});
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
  torch::nn::Linear up{8, 33}, down{33, 4};
};
TORCH_MODULE(Mlp);

// The time of a step in milliseconds, and the last loss.
template <class Step>
std::pair<double, double> train(Step&& step) {
  constexpr int kWarmUp = 10, kSteps = 500;
  torch::manual_seed(1);  // every rank has the whole batch
  at::Tensor loss;
  auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < kWarmUp + kSteps; ++i) {
    if (i == kWarmUp) begin = std::chrono::steady_clock::now();
    const at::Tensor x = torch::randn({16, 8});
    loss = step(x, x.slice(1, 0, 4).sin());
  }
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
  return {time.count() / kSteps, loss.item<double>()};
}

int main() {
  at::set_num_threads(1);
  const Group world = new_group();
  const DeviceMesh mesh = init_device_mesh("cpu", {world->getSize()}, {"tp"}, {.group = world});

  std::vector<std::pair<double, double>> results;
  for (const bool is_captured : {false, true}) {
    torch::manual_seed(0);
    Mlp net(mesh);
    serried::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
    const auto eager = [&](const at::Tensor& x, const at::Tensor& y) {
      optimizer.zero_grad();
      const auto whole = [&](const at::Tensor& t) { return DTensor::from_local(t, mesh, {Replicate()}); };
      const DTensor output(net(whole(x)));  // a sum over ranks that is still to be taken
      at::Tensor loss = torch::mse_loss(output.redistribute({Replicate()}), whole(y));
      loss.backward();
      optimizer.step();
      return loss;
    };
    auto step = capture(eager);
    results.push_back(is_captured ? train(step) : train(eager));
    if (is_captured && world->getRank() == 0) {
      std::cout << step.graph().to_string() << "graph of " << step.graph().nodes().size() << " ops, "
                << step.graph().collectives().size() << " of them collectives; replayed " << step.replays()
                << " times\n";
    }
  }

  const auto [eager_ms, eager_loss] = results[0];
  const auto [captured_ms, captured_loss] = results[1];
  if (world->getRank() == 0) {
    std::cout << "ms per step: eager " << eager_ms << ", captured " << captured_ms << "\n"
              << "loss: eager " << eager_loss << ", captured " << captured_loss << "\n";
  }
  return eager_loss == captured_loss ? 0 : 1;
}
