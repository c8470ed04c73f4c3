// A job that saves and ends, and another one on more ranks that goes on behind it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <mutex>

#include "serried/checkpoint/checkpoint.h"
#include "serried/comm/groups/ranks.h"
#include "serried/elastic/elastic.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/sampler.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/thread_job.h"

namespace serried {
namespace {

using checkpoint::state_of;
using ::testing::IsEmpty;
using testing::ThreadJob;

constexpr size_t kSamples = 30, kBatch = 6;  // of all ranks together
constexpr int64_t kStop = 7, kSteps = 13;    // in the middle of the second epoch of five steps, and of the third
constexpr uint64_t kSeed = 5;

torch::nn::Linear make_net() {
  torch::nn::Linear net = seeded(1, [] { return torch::nn::Linear(3, 2); });
  net->to(at::kDouble);
  return net;
}

at::Tensor inputs_of(const std::vector<size_t>& samples) {
  std::vector<double> numbers;
  for (const size_t sample : samples) {
    for (const double factor : {0.3, 0.7, 1.1}) numbers.push_back(std::sin(factor * double(sample)));
  }
  return torch::tensor(numbers, at::kDouble).view({-1, 3});
}

std::vector<size_t> next_of(DistributedSampler& sampler, size_t count) {
  if (const auto samples = sampler.next(count)) return *samples;
  sampler.set_epoch(sampler.epoch() + 1);
  sampler.reset();
  return sampler.next(count).value();
}

// What one process gets that never stops.
at::Tensor trained_without_a_stop() {
  torch::nn::Linear net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
  DistributedSampler sampler(kSamples, {.seed = kSeed, .num_replicas = 1, .rank = 0});
  sampler.reset();
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    net(inputs_of(next_of(sampler, kBatch))).square().mean().backward();
    optimizer.step();
  }
  return net->weight.detach().clone();
}

class Job {
 public:
  Job(std::string path, int num_ranks, int64_t first, int64_t last)
      : path_(std::move(path)), num_ranks_(num_ranks), first_(first), last_(last) {}

  /// The weights of each rank at its end.
  std::vector<at::Tensor> run() {
    ThreadJob job([this](ThreadJob::Rank& rank) { train(rank); });
    job.start(num_ranks_);
    job.wait();
    EXPECT_THAT(job.failures(), IsEmpty());
    return weights_;
  }

 private:
  void train(ThreadJob::Rank& rank) {
    Elastic elastic({.backend = "threads", .generations = rank.generations()});
    torch::nn::Linear net = make_net();
    torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05));
    DistributedSampler sampler(kSamples, {.seed = kSeed, .num_replicas = num_ranks_, .rank = rank.id()});
    int64_t step = 0;
    const checkpoint::Contents contents = {
        {"model", state_of(net)}, {"optim", state_of(optimizer)}, {"sampler", state_of(sampler)}, {"step", &step}};
    if (checkpoint::exists(path_)) checkpoint::load(path_, contents);
    EXPECT_EQ(step, first_);
    elastic.set_step(step);
    sampler.reset();
    elastic.keep("model", net);
    elastic.keep("optim", optimizer);
    DistributedDataParallel ddp(net, {.process_group = elastic.world()});
    elastic.on_change([&](const Group& world) { ddp.set_process_group(world); });
    while (elastic.step() < last_) {
      const std::vector<size_t> samples = next_of(sampler, kBatch / size_t(num_ranks_));
      elastic.run([&] {
        optimizer.zero_grad();
        ddp(inputs_of(samples)).square().mean().backward();
        if (elastic.commit()) optimizer.step();
      });
    }
    step = elastic.step();
    checkpoint::save(path_, contents, {.process_group = elastic.world()});
    const std::lock_guard<std::mutex> lock(mutex_);
    weights_.push_back(net->weight.detach().clone());
  }

  const std::string path_;
  const int num_ranks_;
  const int64_t first_, last_;
  std::mutex mutex_;
  std::vector<at::Tensor> weights_;
};

TEST(ElasticCheckpoint, FreshRanksGoOnBehindItAsIfThereHadBeenNoStop) {
  const testing::Folder folder;
  EXPECT_EQ(Job(folder / "c", 2, 0, kStop).run().size(), 2u);
  EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), kStop);
  const std::vector<at::Tensor> weights = Job(folder / "c", 3, kStop, kSteps).run();
  const at::Tensor expected = trained_without_a_stop();
  ASSERT_EQ(weights.size(), 3u);
  for (const at::Tensor& weight : weights) EXPECT_LE((weight - expected).abs().max().item<double>(), 1e-12);
  EXPECT_EQ(checkpoint::read_value(folder / "c", "step").toInt(), kSteps);
}

}  // namespace
}  // namespace serried
