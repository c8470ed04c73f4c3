// Trains a fully sharded net on three ranks, loses the second while the others gather a block or reduce its gradients,
// and starts anew with the two that are left; the second argument says in which pass.
#include <signal.h>
#include <unistd.h>

#include <chrono>
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

constexpr int kStepOfDeath = 3;
constexpr int kNumSteps = 6;
constexpr int kVictim = 1;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(8, 300));
    second = register_module("second", torch::nn::Linear(300, 300));
    third = register_module("third", torch::nn::Linear(300, 4));
    scale = register_parameter("scale", torch::ones({4}));
  }
  at::Tensor forward(const at::Tensor& x, const std::function<void(const at::Tensor&)>& between) {
    at::Tensor y = torch::relu(first(x * scale.sum() / 4));
    between(y);
    y = torch::relu(second(y));
    return third(y) * scale;
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Net);

Net make_net() {
  torch::manual_seed(1);
  return Net();
}

at::Tensor batch_of(int rank, int step) {
  return torch::sin(torch::arange(16).reshape({2, 8}) * 0.1 + rank + step * 10);
}

/// A net with its optimizer on the ranks of a group.
struct Training {
  explicit Training(const Group& group_)
      : group(group_),
        net(make_net()),
        handle([&] {
          const DeviceMesh mesh = DeviceMesh::from_group(group);
          for (const auto& layer : net->children()) fully_shard(*layer, {.mesh = mesh});
          return fully_shard(*net, {.mesh = mesh});
        }()),
        optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)) {}

  void step(
      int number, const std::function<void(const at::Tensor&)>& between = [](const at::Tensor&) {}) {
    optimizer.zero_grad();
    net->forward(batch_of(group->getRank(), number), between).pow(2).mean().backward();
    optimizer.step();
  }

  Group group;
  Net net;
  FullyShardHandle handle;
  torch::optim::SGD optimizer;
};

/// What one process makes of the batches of two ranks.
bool is_as_alone(const Training& training) {
  Net net = make_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor x = torch::cat({batch_of(0, step), batch_of(1, step)});
    net->forward(x, [](const at::Tensor&) {}).pow(2).mean().backward();
    optimizer.step();
  }
  bool same = true;
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    const at::Tensor actual = DTensor(training.net->parameters()[i].detach()).full_tensor();
    same &= at::allclose(actual, net->parameters()[i], 1e-4, 1e-6);
  }
  return same;
}

void die(const std::string& death_note) {
  std::ofstream(death_note) << now_ms() << std::flush;
  kill(getpid(), SIGKILL);
}

/// Between the blocks of one pass, so that the others wait for the next.
std::function<void(const at::Tensor&)> dying(const std::string& death_note, const std::string& pass) {
  return [=](const at::Tensor& y) {
    if (pass == "forward") die(death_note);
    y.register_hook([=](const at::Tensor&) { die(death_note); });
  };
}

void check_memory(const Training& training, const std::string& pass, int num_ranks) {
  const FullyShardUsage usage = training.handle.usage();
  // The outermost block is kept through forward, with 64 bytes from each rank that say which block it is.
  const int64_t kept = pass == "forward" ? training.handle.whole_bytes() + 64 * num_ranks : 0;
  if (usage.gathered_bytes != kept) say(c10::str("was left: ", usage.gathered_bytes, " bytes, not ", kept));
  if (usage.gradient_bytes != 0) say(c10::str("was left: ", usage.gradient_bytes, " bytes of gradients"));
  training.handle.reshard();
  if (training.handle.usage().gathered_bytes != 0) say("was left after reshard()");
}

void lose_one(const Group& world, const std::string& death_note, const std::string& pass) {
  Training training(world);
  for (int step = 0; step < kStepOfDeath; ++step) training.step(step);
  try {
    if (world->getRank() == kVictim) training.step(kStepOfDeath, dying(death_note, pass));
    training.step(kStepOfDeath);
    say("nothing was raised");
  } catch (const c10::DistBackendError& error) {
    int64_t died_at = 0;
    std::ifstream(death_note) >> died_at;
    say(c10::str("raised after ", now_ms() - died_at, " ms: ", error.what_without_backtrace()));
    check_memory(training, pass, world->getSize());
  }
}

}  // namespace

int main(int, char** argv) {
  signal(SIGTERM, SIG_IGN);  // the launcher asks the others to end when one has died
  at::set_num_threads(1);
  const Group world = new_group("shm", {.timeout = 20s});
  const int rank = world->getRank();
  lose_one(world, argv[1], argv[2]);
  const auto store = c10::make_intrusive<c10d::PrefixStore>("survivors", world->getStore());
  Training training(new_group("shm", {.store = store, .rank = rank == 0 ? 0 : 1, .world_size = 2}));
  for (int step = 0; step < kNumSteps; ++step) training.step(step);
  say(is_as_alone(training) ? "trained on" : "went wrong");
}
