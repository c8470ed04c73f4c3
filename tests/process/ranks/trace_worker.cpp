// Trains a small model under SERRIED_TRACE; the last rank comes late to the end. With "die" it kills itself once its
// trace has something in it.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "serried/serried.h"

namespace {

using namespace std::chrono_literals;

void step(serried::DistributedDataParallel<torch::nn::Sequential>& ddp, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  ddp(torch::ones({4, 5})).sum().backward();
  const serried::trace::Span span("step", serried::trace::kOptimizer);
  optimizer.step();
}

bool trace_tells_of(const std::string& path, const std::string& text) {
  std::ifstream file(path);
  return std::string(std::istreambuf_iterator<char>(file), {}).find(text) != std::string::npos;
}

// As a rank is killed in the middle of its work: without a word, and with an end of its file that is no end.
[[noreturn]] void die(const serried::Group& world) {
  const std::string path =
      std::string(std::getenv("SERRIED_TRACE")) + "/rank_" + std::to_string(world->getRank()) + ".json";
  while (!trace_tells_of(path, "DDP bucket 0")) std::this_thread::sleep_for(10ms);
  kill(getpid(), SIGKILL);
  std::abort();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  at::set_num_threads(1);
  const serried::Group world = serried::new_group("shm", {.timeout = 20s});
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(5, 7), torch::nn::BatchNorm1d(7), torch::nn::Linear(7, 3));
  serried::DistributedDataParallel ddp(net, {.process_group = world, .bucket_cap_mb = 0.0001});
  torch::optim::SGD optimizer(ddp.parameters(), 0.1);
  const bool is_last = world->getRank() == world->getSize() - 1;
  for (int i = 0; i < 3; ++i) step(ddp, optimizer);
  if (is_last && mode == "die") die(world);
  if (is_last) std::this_thread::sleep_for(50ms);  // late, so that there is a wait to tell of
  try {
    serried::barrier(world);
  } catch (const c10::Error&) {
    return 4;  // the other one is gone
  }
  return 0;
}
