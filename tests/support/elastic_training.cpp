// Ranks count where they are, and look at each place whether they die there.
#include "tests/support/elastic_training.h"

#include <gmock/gmock.h>

#include "serried/comm/collectives/observe.h"
#include "serried/comm/groups/ranks.h"
#include "serried/elastic/elastic.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"

namespace serried::testing {
namespace {

using namespace std::chrono_literals;

struct NetImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(6, 5));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(5, 3));
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(x))); }
};
TORCH_MODULE(Net);

Net net_of(int id) {
  return seeded(uint64_t(id), [] { return Net(); });
}

// The rows of rank `rank` in a step; how many there are differs.
at::Tensor batch(int64_t step, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(step * 100 + rank));
  return at::randn({2 + (step + rank) % 3, 6}, generator);
}

at::Tensor loss_of(const at::Tensor& output) {
  return output.square().mean() + output.sum() * 0.1;
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(std::vector<at::Tensor> parameters, bool adam) {
  if (adam) return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(0.01));
  return std::make_unique<torch::optim::SGD>(parameters,
                                             torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.01));
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : tensors) all.push_back(each.detach().clone());
  return all;
}

bool are_equal(const std::vector<at::Tensor>& some, const std::vector<at::Tensor>& others) {
  for (size_t i = 0; i < some.size(); ++i) {
    if (!at::equal(some[i].detach(), others[i].detach())) return false;
  }
  return some.size() == others.size();
}

}  // namespace

std::string to_string(Phase phase) {
  static constexpr const char* kNames[kNumPhases] = {"meeting_begins", "meeting",          "transfer",
                                                     "on_change",      "forward",          "bucket",
                                                     "commit",         "before_optimizer", "behind_optimizer"};
  return kNames[size_t(phase)];
}

/// Where one rank is.
class Training::Points {
 public:
  Points(Training& training, int id, std::function<int64_t()> step)
      : training_(training),
        id_(id),
        step_(std::move(step)),
        observer_([this](const observe::Call& call) { at_call(call); }) {}

  void enter(Phase phase) {
    if (phase != phase_) nth_ = 0;
    phase_ = phase;
    const bool has_calls = phase == Phase::meeting || phase == Phase::bucket || phase == Phase::commit;
    if (!has_calls) pass(phase);
  }

 private:
  void at_call(const observe::Call& call) {
    const std::string name = call.name;
    pass(phase_ == Phase::meeting && (name == "send" || name == "recv") ? Phase::transfer : phase_);
  }
  void pass(Phase phase) {
    if (training_.dies_here(phase, step_(), nth_++, id_)) throw Killed();
  }

  Training& training_;
  const int id_;
  const std::function<int64_t()> step_;
  Phase phase_ = Phase::meeting_begins;
  int nth_ = 0;
  const observe::Observer observer_;
};

Training::Training(TrainingOptions options)
    : options_(std::move(options)),
      job_([this](ThreadJob::Rank& rank) { train(rank); }),
      faults_(options_.faults),
      joins_(options_.joins) {}

void Training::run() {
  job_.start(options_.num_ranks);
  job_.wait();
  EXPECT_THAT(job_.failures(), ::testing::IsEmpty());
  ASSERT_FALSE(results_.empty()) << "no rank was left";
  expect_plain_loop();
}

void Training::train(ThreadJob::Rank& rank) {
  Net net = net_of(rank.id());
  const auto optimizer = optimizer_of(net->parameters(), options_.adam);
  Elastic elastic(
      {.min_ranks = options_.min_ranks, .backend = "threads", .timeout = 20s, .generations = rank.generations()});
  Points points(*this, rank.id(), [&] { return elastic.step(); });
  rank.before_meeting([&] {
    points.enter(Phase::meeting_begins);
    points.enter(Phase::meeting);
  });
  elastic.keep("model", *net);
  elastic.keep("optimizer", *optimizer);
  DistributedDataParallel ddp(net, {.process_group = elastic.world(), .bucket_cap_mb = 1e-5});
  elastic.on_change([&](const Group& world) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      veterans_.insert(rank.id());
    }
    points.enter(Phase::on_change);
    ddp.set_process_group(world);
  });
  while (elastic.step() < options_.num_steps) {
    elastic.run([&] {
      points.enter(Phase::forward);
      join_at(elastic.step());
      optimizer->zero_grad();
      const at::Tensor loss = loss_of(ddp(batch(elastic.step(), elastic.world()->getRank())));
      points.enter(Phase::bucket);
      loss.backward();
      points.enter(Phase::commit);
      if (!elastic.commit()) return;
      points.enter(Phase::before_optimizer);
      note_step(elastic.step(), elastic.world()->getSize(), net->parameters());
      optimizer->step();
      points.enter(Phase::behind_optimizer);
    });
  }
  std::lock_guard<std::mutex> lock(mutex_);
  results_[rank.id()] = copies(net->parameters());
}

bool Training::dies_here(Phase phase, int64_t step, int nth, int id) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto fault = std::find_if(faults_.begin(), faults_.end(), [&](const Fault& each) {
    return each.phase == phase && step >= each.step && nth >= each.nth && (each.id < 0 || each.id == id);
  });
  if (fault == faults_.end()) return false;
  // Somebody has to be left who has the state; and in the last step there is nobody to tell the end.
  if (step + 1 >= options_.num_steps || job_.num_living() < 2) return false;
  if (veterans_.contains(id) && veterans_.size() < 2) return false;
  faults_.erase(fault);
  veterans_.erase(id);
  const bool joins = options_.joins_at_loss.contains(num_kills_++);
  lock.unlock();
  if (joins) job_.add(options_.joins_come_first);
  return true;
}

void Training::join_at(int64_t step) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = joins_.find(step);
    if (found == joins_.end()) return;
    joins_.erase(found);
  }
  job_.add(options_.joins_come_first);
}

void Training::note_step(int64_t step, int world_size, const std::vector<at::Tensor>& before) {
  std::lock_guard<std::mutex> lock(mutex_);
  world_sizes_[step] = world_size;  // of one that is done again, the last time counts
  if (step == 0) start_ = copies(before);
}

std::vector<int> Training::members() const {
  std::vector<int> members;
  for (const auto& [step, world_size] : world_sizes_) members.push_back(world_size);
  return members;
}

void Training::expect_plain_loop() const {
  Net net = net_of(0);
  bool is_known = false;
  for (int id = 0; id < 64 && !is_known; ++id) is_known = are_equal(net_of(id)->parameters(), start_);
  EXPECT_TRUE(is_known) << "the training did not begin with the weights of a rank";
  const torch::NoGradGuard no_grad;
  for (size_t i = 0; i < start_.size(); ++i) net->parameters()[i].copy_(start_[i]);
  const auto optimizer = optimizer_of(net->parameters(), options_.adam);
  ASSERT_EQ(int64_t(world_sizes_.size()), options_.num_steps);
  for (const auto& [step, world_size] : world_sizes_) {
    std::vector<at::Tensor> sums;
    for (int rank = 0; rank < world_size; ++rank) {
      const torch::AutoGradMode with_grad(true);
      const auto grads = torch::autograd::grad({loss_of(net(batch(step, rank)))}, net->parameters());
      for (size_t i = 0; i < grads.size(); ++i) {
        if (rank == 0)
          sums.push_back(grads[i].clone());
        else
          sums[i].add_(grads[i]);
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) net->parameters()[i].mutable_grad() = sums[i].div(world_size);
    optimizer->step();
  }
  for (const auto& [id, result] : results_) {
    for (size_t i = 0; i < result.size(); ++i) {
      expect_equal(result[i], net->parameters()[i].detach(),
                   "parameter " + std::to_string(i) + " of rank " + std::to_string(id));
    }
  }
}

}  // namespace serried::testing
