// Training whose ranks may be killed at will: the loss goes on falling, and ranks that come take the state of the
// others. Start it with: serried run -n 4 --keep-going build/bin/16_elastic In another terminal: kill -9 <one of the
// processes that it names>, as often as you like. Arguments: steps (600), milliseconds per step (50).
#include <serried/serried.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

using namespace serried;

/// The next rows of one sequence of samples: none is skipped and none comes twice, however many ranks there are.
at::Tensor batch(int64_t step, const Group& world) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(step));
  return torch::randn({world->getSize() * 64, 8}, generator).narrow(0, world->getRank() * 64, 64);
}

void print_ranks(const Group& world, int64_t step) {
  const std::vector<int64_t> processes = all_gather_object(int64_t(::getpid()), world);
  if (world->getRank() != 0) return;
  std::printf("step %ld goes on with %d ranks, processes", long(step), world->getSize());
  for (const int64_t process : processes) std::printf(" %ld", long(process));
  std::printf("\n");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t num_steps = argc > 1 ? std::atol(argv[1]) : 600;
  const std::chrono::milliseconds pause(argc > 2 ? std::atol(argv[2]) : 50);

  Elastic elastic({.min_ranks = 1});  // world() is this rank alone until the first run
  torch::nn::Sequential net(torch::nn::Linear(8, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(3e-3));
  elastic.keep("model", *net);
  elastic.keep("optimizer", optimizer);

  DistributedDataParallel ddp(net, {.process_group = elastic.world()});
  elastic.on_change([&](const Group& world) {
    ddp.set_process_group(world);
    print_ranks(world, elastic.step());
  });

  while (elastic.step() < num_steps) {
    double loss = 0;
    elastic.run([&] {
      const at::Tensor x = batch(elastic.step(), elastic.world());
      optimizer.zero_grad();
      const at::Tensor error = torch::mse_loss(ddp(x), x.narrow(1, 0, 2).sum(1, true).sin());
      error.backward();
      loss = all_reduce(error.detach(), elastic.world(), c10d::ReduceOp::AVG).item<double>();
      if (elastic.commit()) optimizer.step();
    });
    if (elastic.world()->getRank() == 0 && elastic.step() % 20 == 0) {
      std::printf("step %ld  loss %.4f  %d ranks\n", long(elastic.step()), loss, elastic.world()->getSize());
      std::fflush(stdout);
    }
    std::this_thread::sleep_for(pause);
  }
}
