// Trains on three ranks, loses the second in the middle of a backward, and goes on with the two that are left; with
// "captured" as second argument in the replay of a captured step.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/serried.h"
#include "tests/process/ranks/worker_output.h"

namespace {

using namespace serried;
using namespace std::chrono_literals;
using serried::testing::now_ms;
using serried::testing::say;

constexpr int kStepOfDeath = 5;  // a captured step is replayed by then
constexpr int kNumSteps = 9;
constexpr int kVictim = 1;

torch::nn::Sequential make_net() {
  torch::manual_seed(1);
  return torch::nn::Sequential(torch::nn::Linear(8, 600), torch::nn::ReLU(), torch::nn::Linear(600, 600),
                               torch::nn::ReLU(), torch::nn::Linear(600, 4));
}

at::Tensor batch_of(int rank, int step) {
  return torch::sin(torch::arange(16).reshape({2, 8}) * 0.1 + rank + step * 10);
}

/// What one process makes of the batches of all ranks that were there.
std::vector<at::Tensor> expected_parameters() {
  torch::nn::Sequential net = make_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kNumSteps; ++step) {
    std::vector<at::Tensor> batches;
    for (const int rank : {0, 1, 2}) {
      if (rank != kVictim || step < kStepOfDeath) batches.push_back(batch_of(rank, step));
    }
    optimizer.zero_grad();
    net->forward(torch::cat(batches)).pow(2).mean().backward();
    optimizer.step();
  }
  return net->parameters();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string death_note = argv[1];
  const bool is_captured = argc > 2 && argv[2] == std::string("captured");
  signal(SIGTERM, SIG_IGN);  // the launcher asks the others to end when one has died
  at::set_num_threads(1);
  const Group world = new_group("shm", {.timeout = 20s});
  const int rank = world->getRank();
  torch::nn::Sequential net = make_net();
  // Small buckets: some are reduced already when the victim dies.
  DistributedDataParallel ddp(net, {.process_group = world, .bucket_cap_mb = 0.1});
  torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  bool dies = false;
  net->parameters()[2].register_hook([&](const at::Tensor& grad) {
    if (!dies) return grad;
    std::ofstream(death_note) << now_ms() << std::flush;
    kill(getpid(), SIGKILL);
    return grad;
  });
  const auto train = [&](const at::Tensor& batch) {
    optimizer.zero_grad();
    ddp(batch).pow(2).mean().backward();
    optimizer.step();
  };
  auto captured = capture(train);
  const auto train_step = [&](int step) { is_captured ? captured(batch_of(rank, step)) : train(batch_of(rank, step)); };
  for (int step = 0; step < kNumSteps; ++step) {
    dies = rank == kVictim && step == kStepOfDeath;
    if (step == kStepOfDeath && is_captured && captured.replays() == 0) say("nothing was replayed");
    try {
      train_step(step);
    } catch (const c10::DistBackendError& error) {
      int64_t died_at = 0;
      std::ifstream(death_note) >> died_at;
      say(c10::str("raised after ", now_ms() - died_at, " ms: ", error.msg()));
      for (const at::Tensor& parameter : ddp.parameters()) {
        if (parameter.grad().defined()) say("a gradient of the failed backward was left");
      }
      const auto store = c10::make_intrusive<c10d::PrefixStore>("survivors", world->getStore());
      ddp.set_process_group(new_group("shm", {.store = store, .rank = rank == 0 ? 0 : 1, .world_size = 2}));
      train_step(step);
    }
  }
  const std::vector<at::Tensor> expected = expected_parameters();
  bool same = true;
  for (size_t i = 0; i < expected.size(); ++i) same &= at::allclose(ddp.parameters()[i], expected[i], 1e-4, 1e-6);
  say(same ? "trained on" : "went wrong");
}
