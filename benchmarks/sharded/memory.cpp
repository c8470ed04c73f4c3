// The memory of a rank that trains under fully_shard, beside what its parts and two blocks add up to.
//
// `serried run -n 4 bench_sharded_memory <layers> <width> <results.json>`: layers of width x width, AdamW. What ranks
// share counts in parts: a page that four ranks read is a quarter of a page to each.
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/optim/adam.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/making/born_sharded.h"
#include "serried/tensor/random/random.h"

namespace {

using namespace serried;
using namespace serried::bench;

constexpr int64_t kBatch = 16;
constexpr double kMib = 1 << 20;

double proportional_mib() {
  std::ifstream lines("/proc/self/smaps_rollup");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("Pss:")) return std::atof(line.c_str() + 4) / 1024;
  }
  return 0;
}

/// Looks every few milliseconds, while it lives.
class Peak {
 public:
  Peak() : watcher_([this] { watch(); }) {}
  ~Peak() {
    is_over_ = true;
    watcher_.join();
  }
  double mib() const { return peak_; }

 private:
  void watch() {
    while (!is_over_) {
      peak_ = std::max(peak_.load(), proportional_mib());
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  std::atomic<bool> is_over_ = false;
  std::atomic<double> peak_ = 0;
  std::thread watcher_;
};

struct Net : torch::nn::Module {
  torch::nn::ModuleList layers;

  Net(int64_t count, int64_t width, const DeviceMesh& mesh) {
    register_module("layers", layers);
    manual_seed(1, mesh);
    for (int64_t i = 0; i < count; ++i) {
      const BornSharded born(mesh, [](at::IntArrayRef) -> Placements { return {Shard(0)}; });
      layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
      fully_shard(*layers[layers->size() - 1], {.mesh = mesh});
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = at::gelu(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
};

/// The peak over that of a process that has done nothing yet, on the rank with the highest, in MiB.
double measured_mib(int64_t count, int64_t width, const Group& group) {
  const double before = proportional_mib();
  const Peak peak;
  Net net(count, width, init_device_mesh("cpu", {group->getSize()}, {"dp"}, {.group = group}));
  AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(1e-4));
  const at::Tensor x = at::randn({kBatch, width});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = net.forward(x).square().mean();
    loss.backward();
    optimizer.step();
    if (group->getRank() == 0) std::printf("step %d, loss %.6g\n", step, loss.item<double>());
  }
  return slowest({peak.mib() - before}, group)[0];
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const int64_t count = argc == 4 ? std::atol(argv[1]) : 0, width = argc == 4 ? std::atol(argv[2]) : 0;
  if (count <= 0 || width <= 0) {
    std::fprintf(stderr, "usage: bench_sharded_memory <layers> <width> <results.json>\n");
    return 2;
  }
  const Group group = new_group();
  const double block = double(width * width * 4) / kMib, ranks = double(group->getSize());
  const double states = 4 * block * double(count);  // parameter, gradient, two averages
  const double activations = double(2 * count * kBatch * width * 4) / kMib;
  const double bound = states / ranks + 2 * block + activations;
  const double peak = measured_mib(count, width, group);
  if (group->getRank() != 0) return 0;
  const std::string name =
      std::to_string(count) + " x " + std::to_string(width) + ", a rank of " + std::to_string(group->getSize());
  const std::vector<Row> rows = {
      {"sharded: memory", name, peak, bound, "parts and 2 blocks", 1.05, "MiB"},
      {"sharded: memory", name, peak, states + activations, "all of it, as in DDP", 0, "MiB"}};
  print_table(rows);
  append_json(rows, argv[3]);
}
