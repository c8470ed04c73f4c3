// What a step puts back, what Elastic refuses, and how it is without a launcher that keeps others alive.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/elastic/elastic.h"
#include "serried/elastic/generations.h"
#include "serried/graph/capture.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/sampler.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/thread_job.h"

namespace serried {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using testing::error_text;
using testing::expect_equal;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Killed;
using testing::ThreadJob;

/// A rank alone: of a table that can change, so that nothing has to be launched.
class Alone : public detail::Generations {
 public:
  explicit Alone(int world_size = 1) { tell_table({.generation = 0, .rank = 0, .world_size = world_size}); }
  bool can_change() const override { return true; }
  void place(const detail::GenerationTable& table, GroupOptions& options) override {
    options.store = c10::make_intrusive<detail::RanksStore>(1s);
    options.rank = table.rank;
    options.world_size = table.world_size;
  }
};

ElasticOptions alone() {
  return {.backend = "threads", .generations = std::make_shared<Alone>()};
}

TEST(Elastic, StepsAreCountedWhenTheyAreCommitted) {
  Elastic elastic(alone());
  EXPECT_EQ(elastic.world()->getSize(), 1);
  EXPECT_EQ(elastic.step(), 0);
  elastic.set_step(7);
  std::vector<bool> said;
  for (const bool fine : {true, false, true}) elastic.run([&] { said.push_back(elastic.commit(fine)); });
  EXPECT_THAT(said, ElementsAre(true, false, true));
  EXPECT_EQ(elastic.step(), 9);
}

TEST(Elastic, WhatIsMisusedIsRefused) {
  Elastic elastic(alone());
  const auto refused = [](auto&& fn) { return error_text<c10::ValueError>(fn); };
  EXPECT_THAT(refused([] { Elastic({.min_ranks = 0}); }), HasSubstr("[Elastic] min_ranks is 0\n  fix: pass 1 or more"));
  EXPECT_THAT(refused([&] { elastic.commit(); }), HasSubstr("[Elastic::commit] called outside of run"));
  EXPECT_THAT(refused([&] { elastic.set_step(-1); }), HasSubstr("[Elastic::set_step] step is -1"));
  EXPECT_THAT(refused([&] { elastic.on_change(nullptr); }), HasSubstr("[Elastic::on_change] the function is empty"));
  EXPECT_THAT(refused([&] { elastic.run(nullptr); }), HasSubstr("[Elastic::run] the function is empty"));
  EXPECT_THAT(refused([&] { elastic.run([] {}); }),
              HasSubstr("[Elastic::run] step 0 ended without commit()\n  fix: end it with if (elastic.commit())"));
  EXPECT_THAT(refused([&] { elastic.run([&] { elastic.commit(), elastic.commit(); }); }),
              HasSubstr("[Elastic::commit] called twice in one step"));
  EXPECT_THAT(refused([&] { elastic.run([&] { elastic.run([] {}); }); }), HasSubstr("called inside of another run"));
  EXPECT_THAT(refused([&] { elastic.set_step(3); }), HasSubstr("the first run has begun"));
  int64_t late = 0;
  EXPECT_THAT(refused([&] { elastic.keep("late", &late); }), HasSubstr("[Elastic::keep] the first run has begun"));
  EXPECT_EQ(elastic.step(), 0);
}

TEST(Elastic, WhatCannotBeHealedIsNotKept) {
  run_ranks(2, [](const Group& group) {
    Elastic elastic(alone());
    const auto refused = [](auto&& fn) { return error_text<c10::ValueError>(fn); };
    torch::nn::Linear cut(4, 4);
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    distribute_parameter(cut->weight, mesh, {Shard(0)});
    EXPECT_THAT(refused([&] { elastic.keep("model", cut); }), HasSubstr("[Elastic::keep] \"model.weight\" is "));
    EXPECT_THAT(
        refused([&] { elastic.keep("model", cut); }),
        HasSubstr("if one is lost, no other rank can go on with its part\n  fix: keep what every rank has whole"));
    torch::nn::Linear net(4, 4);
    ZeroRedundancyOptimizer<torch::optim::SGD> zero(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9),
                                                    {.process_group = group});
    EXPECT_THAT(refused([&] { elastic.keep("optimizer", zero); }),
                HasSubstr("the state of \"optimizer\" is spread over the ranks, as ZeroRedundancyOptimizer's is"));
    EXPECT_THAT(refused([&] { elastic.keep("random", checkpoint::random_state()); }),
                HasSubstr("\"random\" differs from rank to rank"));
    EXPECT_THAT(refused([&] { elastic.keep("constant", 3); }), HasSubstr("[Elastic::keep] "));
    elastic.keep("net", net);
    EXPECT_THAT(refused([&] { elastic.keep("net", net); }), HasSubstr("the name \"net\" is there twice"));
  });
}

TEST(Elastic, ARefusedStepPutsBackBuffersValuesOptionsAndGenerators) {
  Elastic elastic(alone());
  torch::nn::BatchNorm1d norm(3);
  torch::optim::SGD optimizer(norm->parameters(), torch::optim::SGDOptions(0.5));
  int64_t seen = 4;
  elastic.keep("model", norm);
  elastic.keep("optimizer", optimizer);
  elastic.keep("seen", &seen);
  torch::manual_seed(5);
  std::vector<at::Tensor> inputs;
  const auto step = [&](bool fine) {
    elastic.run([&] {
      inputs.push_back(at::randn({4, 3}));
      norm(inputs.back()).square().sum().backward();
      ++seen;
      optimizer.param_groups()[0].options().set_lr(0.25);
      elastic.commit(fine);
    });
  };
  step(false);
  EXPECT_EQ(seen, 4);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
  expect_equal(norm->running_mean, at::zeros({3}));
  EXPECT_FALSE(norm->weight.grad().defined());
  step(true);
  expect_equal(inputs[1], inputs[0]);
  EXPECT_EQ(seen, 5);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.25);
  EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 1);
}

TEST(Elastic, OtherExceptionsPassThrough) {
  Elastic elastic(alone());
  EXPECT_THROW(elastic.run([] { throw std::logic_error("mine"); }), std::logic_error);
  elastic.run([&] { elastic.commit(); });
  EXPECT_EQ(elastic.step(), 1);
}

TEST(Elastic, AnErrorOfCommunicationThatNoLossExplainsIsRaisedAfterAWhile) {
  ElasticOptions options = alone();
  options.loss_timeout = 10ms;
  Elastic elastic(options);
  const auto fails = [] { throw c10::DistBackendError("the network is gone"); };
  EXPECT_THAT(error_text<c10::DistBackendError>([&] { elastic.run(fails); }), HasSubstr("the network is gone"));
}

TEST(Elastic, TooFewRanksAreWaitedForAndThenAnError) {
  ElasticOptions options{
      .min_ranks = 3, .backend = "threads", .join_timeout = 20ms, .generations = std::make_shared<Alone>(2)};
  Elastic elastic(options);
  EXPECT_THAT(error_text<c10::DistBackendError>([&] { elastic.run([] {}); }),
              HasSubstr("[Elastic] waited 20 ms: 2 ranks are there, and min_ranks is 3\n  fix: start more ranks, raise "
                        ".join_timeout, or lower .min_ranks"));
}

TEST(Elastic, BelowMinRanksTheOthersWaitWithTheirState) {
  std::vector<int> sizes;
  std::mutex mutex;
  ThreadJob job([&](ThreadJob::Rank& rank) {
    Elastic elastic({.min_ranks = 2, .backend = "threads", .generations = rank.generations()});
    int64_t sum = 0;
    elastic.keep("sum", &sum);
    while (elastic.step() < 4) {
      elastic.run([&] {
        if (elastic.step() == 2 && rank.id() == 0) throw Killed();
        if (!elastic.commit()) return;
        sum += elastic.step();
        const std::lock_guard<std::mutex> lock(mutex);
        if (elastic.world()->getRank() == 0) sizes.push_back(elastic.world()->getSize());
      });
    }
    EXPECT_EQ(sum, 0 + 1 + 2 + 3);
  });
  job.start(2);
  while (job.num_living() == 2) std::this_thread::yield();
  job.add();
  job.wait();
  EXPECT_THAT(job.failures(), IsEmpty());
  EXPECT_THAT(sizes, ElementsAre(2, 2, 2, 2));
}

/// A table that stays, as where no launcher keeps others alive.
class Fixed final : public Alone {
 public:
  bool can_change() const override { return false; }
};

TEST(Elastic, WithAFixedTableALossRaisesAtOnce) {
  ElasticOptions options = alone();
  options.generations = std::make_shared<Fixed>();
  options.loss_timeout = 1h;
  Elastic elastic(options);
  elastic.run([&] { elastic.commit(); });
  const auto fails = [] { throw c10::DistBackendError("rank 1 is dead"); };
  EXPECT_THAT(error_text<c10::DistBackendError>([&] { elastic.run(fails); }), HasSubstr("rank 1 is dead"));
  EXPECT_EQ(elastic.step(), 1);
}

TEST(Elastic, GroupsThatAStepMadeEndWithTheGeneration) {
  std::atomic<int> num_steps = 0;
  ThreadJob job([&](ThreadJob::Rank& rank) {
    Elastic elastic({.backend = "threads", .generations = rank.generations()});
    Group pair;
    elastic.on_change([&](const Group& world) {
      pair = world->getSize() == 4 ? split_group(world, {{0, 1}, {2, 3}}) : world;
    });
    while (elastic.step() < 2) {
      elastic.run([&] {
        if (rank.id() == 2 && elastic.step() == 1) throw Killed();
        // Rank 3 hears of the death here, 0 and 1 in commit(), where rank 3 does not come.
        barrier(pair);
        num_steps += elastic.commit();
      });
    }
  });
  job.start(4);
  job.wait();
  EXPECT_THAT(job.failures(), IsEmpty());
  EXPECT_EQ(num_steps, 4 + 3);
}

TEST(Elastic, CapturedStepsAreMadeAnewForAnotherWorld) {
  ThreadJob job([&](ThreadJob::Rank& rank) {
    Elastic elastic({.backend = "threads", .generations = rank.generations()});
    torch::nn::Linear net = seeded(1, [] { return torch::nn::Linear(2, 1); });
    elastic.keep("model", net);
    DistributedDataParallel ddp(net, {.process_group = elastic.world()});
    const auto train = [&](const at::Tensor& x) {
      net->zero_grad();
      ddp(x).sum().backward();
      return all_reduce(x, elastic.world());
    };
    std::optional<Captured<decltype(train)>> step;
    elastic.on_change([&](const Group& world) {
      ddp.set_process_group(world);
      step.emplace(train, CaptureOptions());
    });
    while (elastic.step() < 12) {
      elastic.run([&] {
        if (rank.id() == 0 && elastic.step() == 6) throw Killed();
        const at::Tensor sum = (*step)(at::full({1, 2}, rank.id() + 1.0));
        const double all = elastic.world()->getSize() == 3 ? 1 + 2 + 3 : 2 + 3;
        expect_equal(sum, at::full({1, 2}, all));
        expect_equal(net->weight.grad(), at::full({1, 2}, all / elastic.world()->getSize()));
        elastic.commit();
      });
      if (elastic.step() % 6 == 0) EXPECT_GT(step->replays(), 0) << step->last_recapture_reason();
    }
  });
  job.start(3);
  job.wait();
  EXPECT_THAT(job.failures(), IsEmpty());
  EXPECT_EQ(job.num_living(), 0);
}

}  // namespace
}  // namespace serried
