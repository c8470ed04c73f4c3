// A rank that trains with Elastic and kills itself where it is told: <steps> <min ranks>
// [until:<file>] [<step>:<rank>:<phase>:<nth>]... With a file, the training ends early when that is there. At the end
// it does all steps again in a plain loop, with as many ranks as each step had, and compares bits.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <sstream>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/observe.h"
#include "serried/comm/groups/ranks.h"
#include "serried/elastic/elastic.h"
#include "serried/parallel/ddp/ddp.h"

namespace {

using namespace serried;
using Clock = std::chrono::steady_clock;

struct Death {
  int64_t step = 0;
  int rank = 0;
  std::string phase = {};
  int nth = 0;
};

Death parse(std::string text) {
  for (char& letter : text) letter = letter == ':' ? ' ' : letter;
  Death death;
  std::istringstream(text) >> death.step >> death.rank >> death.phase >> death.nth;
  return death;
}

/// Where this rank is, and whether it dies there. Only ranks that began with the job do.
class Fate {
 public:
  Fate(int count, char** texts) {
    for (int i = 0; i < count; ++i) deaths_.push_back(parse(texts[i]));
  }

  void at(const std::string& phase, int64_t step) {
    if (phase != phase_) nth_ = 0;
    phase_ = phase;
    const char* generation = std::getenv("SERRIED_GENERATION");
    const bool is_first = generation == nullptr || std::string(generation) == "0";
    const int rank = std::atoi(std::getenv("RANK"));
    for (const Death& each : deaths_) {
      if (!is_first || each.rank != rank || each.step != step || each.phase != phase || each.nth != nth_) continue;
      ::kill(::getpid(), SIGKILL);
    }
    ++nth_;
  }

 private:
  std::vector<Death> deaths_;
  std::string phase_;
  int nth_ = 0;
};

torch::nn::Sequential net_of_all() {
  return seeded(
      7, [] { return torch::nn::Sequential(torch::nn::Linear(6, 5), torch::nn::Tanh(), torch::nn::Linear(5, 3)); });
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.square().mean() + output.sum() * 0.1;
}

/// The same on all ranks.
bool any_sees(const std::string& file, const Group& world) {
  const at::Tensor there = at::tensor({int64_t(::access(file.c_str(), F_OK) == 0)});
  all_reduce_(there, world, c10d::ReduceOp::MAX);
  return there.item<int64_t>() == 1;
}

at::Tensor batch(int64_t step, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(step * 100 + rank));
  return at::randn({2 + (step + rank) % 3, 6}, generator);
}

torch::optim::AdamWOptions rate() {
  return torch::optim::AdamWOptions(0.01);
}

/// `history`: the number of ranks of each step.
bool equals_plain_loop(torch::nn::Sequential& trained, const std::string& history) {
  torch::nn::Sequential net = net_of_all();
  torch::optim::AdamW optimizer(net->parameters(), rate());
  std::istringstream in(history);
  int world_size = 0;
  for (int64_t step = 0; in >> world_size; ++step) {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < world_size; ++rank) {
      const auto grads = torch::autograd::grad({loss_of(net->forward(batch(step, rank)))}, net->parameters());
      for (size_t i = 0; i < grads.size(); ++i)
        rank == 0 ? sums.push_back(grads[i].clone()) : void(sums[i].add_(grads[i]));
    }
    for (size_t i = 0; i < sums.size(); ++i) net->parameters()[i].mutable_grad() = sums[i].div(world_size);
    optimizer.step();
  }
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    if (!at::equal(net->parameters()[i], trained->parameters()[i])) return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  ::alarm(100);  // whatever becomes of the test
  const int64_t num_steps = std::atol(argv[1]);
  const std::string until = argc > 3 && std::string(argv[3]).starts_with("until:") ? argv[3] + 6 : "";
  const int first_death = until.empty() ? 3 : 4;
  Fate fate(argc - first_death, argv + first_death);
  torch::nn::Sequential net = net_of_all();
  torch::optim::AdamW optimizer(net->parameters(), rate());
  std::string history;
  Elastic elastic({.min_ranks = std::atoi(argv[2])});
  elastic.keep("model", *net);
  elastic.keep("optimizer", optimizer);
  elastic.keep("history", &history);
  DistributedDataParallel ddp(net, {.process_group = elastic.world(), .bucket_cap_mb = 1e-5});
  std::string phase = "meeting";
  elastic.on_change([&](const Group& world) { ddp.set_process_group(world); });
  const observe::Observer observer([&](const observe::Call& call) {
    const std::string name = call.name;
    fate.at(phase == "meeting" && (name == "send" || name == "recv") ? "transfer" : phase, elastic.step());
  });
  double longest = 0;
  Clock::time_point last = Clock::now();
  bool ends = false;
  while (elastic.step() < num_steps && !ends) {
    const bool first = elastic.world()->getSize() == 1;
    elastic.run([&] {
      fate.at("forward", elastic.step());
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(ddp(batch(elastic.step(), elastic.world()->getRank())));
      phase = "bucket";
      loss.backward();
      if (!until.empty()) ends = any_sees(until, elastic.world());
      phase = "commit";
      const bool steps = elastic.commit();
      phase = "meeting";
      if (!steps) return;
      fate.at("before_optimizer", elastic.step());
      optimizer.step();
      history += std::to_string(elastic.world()->getSize()) + " ";
      fate.at("behind_optimizer", elastic.step());
    });
    const double passed = std::chrono::duration<double>(Clock::now() - last).count();
    if (!first) longest = std::max(longest, passed);
    last = Clock::now();
    if (elastic.world()->getRank() == 0) std::printf("done %ld\n", long(elastic.step())), std::fflush(stdout);
  }
  std::printf("%s after %s; longest step %.3f s\n",
              equals_plain_loop(net, history) ? "equals the plain loop" : "DIFFERS", history.c_str(), longest);
}
