// Parameters that get other memory after the module was wrapped: training goes on as in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "serried/graph/capture.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/optimizer_in_backward.h"
#include "serried/parallel/join.h"
#include "serried/parallel/sync_batchnorm.h"
#include "serried/parallel/zero.h"
#include "tests/parallel/ddp/changing_net.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::Changing;
using testing::changing_batch;
using testing::changing_net;
using testing::changing_options;
using testing::ChangingSgd;
using testing::error_text;
using testing::expect_close;
using testing::expect_same_on_all_ranks;
using testing::expect_trained_alike;
using ::testing::HasSubstr;
using testing::load_bytes;
using testing::rows_for;
using testing::saved_bytes;
using testing::train_step;

using Change = std::function<void(Changing&)>;

struct NamedChange {
  const char* name;
  Change change;
};

/// What users do to a module between two steps, the same on every rank.
std::vector<NamedChange> changes() {
  return {
      {"torch::load", [](Changing& net) { load_bytes(net, saved_bytes(changing_net(7))); }},
      {"torch::load of a part",
       [](Changing& net) {
         std::stringstream file;
         torch::save(changing_net(7)->fc2, file);
         torch::load(net->fc2, file);
       }},
      {"to double and back",
       [](Changing& net) {
         net->to(at::kDouble);
         net->to(at::kFloat);
       }},
      {"to double", [](Changing& net) { net->to(at::kDouble); }},
      {"a part to double and back",
       [](Changing& net) {
         net->fc1->to(at::kDouble);
         net->fc1->to(at::kFloat);
       }},
      {"set_data",
       [](Changing& net) {
         for (const at::Tensor& p : net->parameters()) p.set_data(p.detach() * 0.5);
       }},
      {"set_data in another memory format",
       [](Changing& net) { net->fc1->weight.set_data(net->fc1->weight.detach().t().contiguous().t()); }},
  };
}

/// Steps of `ddp` and, with the whole batch, of plain LibTorch; `change` comes after the third.
void expect_trains_on(const Group& group, DistributedDataParallelOptions options, const NamedChange& change,
                      const std::string& what) {
  Changing plain = changing_net(), net = changing_net();
  options.process_group = group;
  DistributedDataParallel ddp(net, options);
  ChangingSgd plain_optimizer(plain->parameters(), changing_options()), optimizer(ddp.parameters(), changing_options());
  for (int step = 0; step < 7; ++step) {
    if (step == 3) {
      change.change(plain);
      change.change(net);
    }
    const at::Tensor batch = changing_batch(group->getSize(), step, plain->fc2->weight.scalar_type());
    train_step(plain, plain_optimizer, batch);
    train_step(ddp, optimizer, rows_for(batch, group));
  }
  expect_trained_alike(net, plain, group, what + ", " + change.name);
}

class ChangedParameters : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, ChangedParameters, ::testing::ValuesIn(testing::settings({1, 2, 3})),
                         testing::name_of);

TEST_P(ChangedParameters, TrainingGoesOnAsInOneProcess) {
  const std::vector<std::pair<const char*, DistributedDataParallelOptions>> variants = {
      {"defaults", {}},
      {"many buckets", {.bucket_caps_mb = {0.0001}}},
      {"no views", {.gradient_as_bucket_view = false}},
      {"find_unused_parameters", {.find_unused_parameters = true}},
      {"static_graph", {.static_graph = true}},
      {"batched_grad_copy", {.batched_grad_copy = true}},
      {"delay_all_reduce", {.delay_all_reduce = {{"fc2.weight", "fc2.bias"}, "fc1.weight"}}},
      {"reduced in double", {.mixed_precision = {.reduce_dtype = at::kDouble}}},
      {"no init_sync", {.init_sync = false}},
  };
  on_ranks([&](const Group& group) {
    for (const auto& [name, options] : variants) {
      for (const NamedChange& change : changes()) expect_trains_on(group, options, change, name);
    }
  });
}

// Forward and backward run in double, so that plain LibTorch in float is a close reference.
TEST_P(ChangedParameters, MixedPrecisionGoesOn) {
  on_ranks([&](const Group& group) {
    for (const NamedChange& change : changes()) {
      expect_trains_on(group, {.mixed_precision = {.param_dtype = at::kDouble}}, change, "mixed precision");
    }
  });
}

TEST(ChangedParametersOfDdp, GradientsThatAddUpAreKept) {
  run_ranks(2, [](const Group& group) {
    for (const bool as_view : {true, false}) {
      Changing plain = changing_net(), net = changing_net();
      DistributedDataParallel ddp(net, {.process_group = group, .gradient_as_bucket_view = as_view});
      for (int step = 0; step < 4; ++step) {
        if (step == 2) {
          load_bytes(plain, saved_bytes(changing_net(3)));
          load_bytes(net, saved_bytes(changing_net(3)));
        }
        const at::Tensor batch = changing_batch(2, step, at::kFloat);
        plain(batch).pow(2).mean().backward();
        if (step == 2) {
          const auto guard = ddp.no_sync();
          ddp(rows_for(batch, group)).pow(2).mean().backward();
          continue;
        }
        ddp(rows_for(batch, group)).pow(2).mean().backward();
      }
      for (const auto& item : net->named_parameters()) {
        expect_close(item.value().grad(), plain->named_parameters()[item.key()].grad(), item.key());
      }
    }
  });
}

TEST(ChangedParametersOfDdp, RanksThatLoadDifferentFilesTakeTheFirstOnes) {
  run_ranks(3, [](const Group& group) {
    Changing plain = changing_net(10), net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp(rows_for(changing_batch(3, 0, at::kFloat), group)).sum().backward();
    load_bytes(net, saved_bytes(changing_net(10 + group->getRank())));
    ChangingSgd plain_optimizer(plain->parameters(), changing_options()),
        optimizer(ddp.parameters(), changing_options());
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = changing_batch(3, step, at::kFloat);
      train_step(plain, plain_optimizer, batch);
      train_step(ddp, optimizer, rows_for(batch, group));
    }
    expect_trained_alike(net, plain, group, "rank 0's file");
  });
}

// As parameters do that lie in one flat tensor.
TEST(ChangedParametersOfDdp, OtherPlacesInOneStorageAreNoticed) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor weight = net->fc1->weight;
    const int64_t numel = weight.numel();
    const at::Tensor flat = torch::full({3 * numel}, 0.25);
    const auto step = [&](int64_t place, double value) {
      const at::Tensor there = at::empty({0}).set_(flat.storage(), place * numel, weight.sizes(), {});
      there.fill_(value);
      weight.set_data(there);
      ddp(rows_for(changing_batch(2, 0, at::kFloat), group));
    };
    step(0, 0.25);
    step(2, 0.1 * (group->getRank() + 1));
    EXPECT_TRUE(weight.detach().eq(0.1F).all().item<bool>()) << weight;  // rank 0's
  });
}

// A rank that has joined takes what the others have loaded.
TEST(ChangedParametersOfDdp, RanksWithoutInputFollow) {
  run_ranks(3, [](const Group& group) {
    Changing plain = changing_net(), net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    ChangingSgd plain_optimizer(plain->parameters(), 0.1), optimizer(ddp.parameters(), 0.1);
    const int num_steps = group->getRank() == 0 ? 1 : 4;
    join({&ddp},
         [&] {
           for (int step = 0; step < num_steps; ++step) {
             if (step == 2) load_bytes(net, saved_bytes(changing_net(7)));
             optimizer.zero_grad();
             ddp(rows_for(changing_batch(3, step, at::kFloat), group)).pow(2).mean().backward();
             optimizer.step();
           }
         },
         {.divide_by_initial_world_size = false});
    for (int step = 0; step < 4; ++step) {
      if (step == 2) load_bytes(plain, saved_bytes(changing_net(7)));
      plain_optimizer.zero_grad();
      const at::Tensor batch = changing_batch(3, step, at::kFloat);
      plain(step == 0 ? batch : batch.narrow(0, 2, 4)).pow(2).mean().backward();
      plain_optimizer.step();
    }
    expect_trained_alike(net, plain, group, "join");
  });
}

TEST(ChangedParametersOfDdp, OneRankThatLoadsAloneIsNoticed) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    const auto step = [&] { ddp(at::ones({2, 5})).sum().backward(); };
    step();
    if (group->getRank() == 0) load_bytes(net, saved_bytes(changing_net(3)));
    const std::string text = error_text<c10::DistBackendError>(step);
    EXPECT_THAT(text, HasSubstr("ranks called different collectives"));
    if (group->getRank() == 1) return;
    EXPECT_THAT(text,
                HasSubstr("\n  in:  a forward of DistributedDataParallel that found parameters in other memory, as "
                          "after torch::load, to() or set_data(): every rank calls those"));
  });
}

TEST(ChangedParametersOfDdp, ABackwardThroughForwardsFromBeforeAndAfterIsNotAveragedInPart) {
  run_ranks(2, [](const Group& group) {
    Changing net = changing_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor x = at::ones({2, 5}) * (group->getRank() + 1);
    ddp(x).sum().backward();
    const at::Tensor before = ddp(x).sum();
    for (const at::Tensor& p : net->parameters()) p.set_data(p.detach().to(at::kDouble));
    const at::Tensor after = ddp(x.to(at::kDouble)).sum();
    EXPECT_THROW((before + after).backward(), c10::Error);
  });
}

TEST(ChangedParametersOfDdp, HooksThatRememberGoOn) {
  run_ranks(2, [](const Group& group) {
    for (const NamedChange& change : changes()) {
      Changing net = changing_net();
      DistributedDataParallel ddp(net, {.process_group = group, .bucket_caps_mb = {0.0001}});
      ddp.register_comm_hook(hooks::power_sgd({.rank = 2, .start_iter = 2, .min_compression_rate = 1}));
      ChangingSgd optimizer(ddp.parameters(), changing_options());
      for (int step = 0; step < 12; ++step) {
        if (step == 6) change.change(net);
        const at::Tensor batch = changing_batch(2, step, net->fc2->weight.scalar_type());
        train_step(ddp, optimizer, rows_for(batch, group));
      }
      EXPECT_TRUE(at::isfinite(net->fc1->weight).all().item<bool>()) << change.name;
      for (const at::Tensor& parameter : net->parameters()) expect_same_on_all_ranks(parameter.detach(), group);
    }
  });
}

TEST(ChangedParametersOfDdp, OptimizersInBackwardGoOn) {
  run_ranks(2, [](const Group& group) {
    for (const NamedChange& change : changes()) {
      Changing plain = changing_net(), net = changing_net();
      DistributedDataParallel ddp(net, {.process_group = group, .bucket_caps_mb = {0.0001}});
      ChangingSgd plain_optimizer(plain->parameters(), changing_options());
      const auto optimizers = optimizer_in_backward(
          ddp, [](auto parameters) { return std::make_unique<ChangingSgd>(parameters, changing_options()); });
      for (int step = 0; step < 6; ++step) {
        if (step == 3) {
          change.change(plain);
          change.change(net);
        }
        const at::Tensor batch = changing_batch(2, step, plain->fc2->weight.scalar_type());
        train_step(plain, plain_optimizer, batch);
        ddp(rows_for(batch, group)).pow(2).mean().backward();
      }
      EXPECT_EQ(optimizers.size(), 4U);
      expect_trained_alike(net, plain, group, change.name);
    }
  });
}

TEST(ChangedParametersOfDdp, ZeroRedundancyOptimizerGoesOn) {
  using Zero = ZeroRedundancyOptimizer<torch::optim::SGD>;
  run_ranks(3, [](const Group& group) {
    for (const auto& [as_views, overlaps] : {std::pair{false, false}, {true, false}, {false, true}}) {
      for (const NamedChange& change : changes()) {
        Changing plain = changing_net(), net = changing_net();
        DistributedDataParallel ddp(net, {.process_group = group});
        ChangingSgd plain_optimizer(plain->parameters(), changing_options());
        Zero zero(ddp.parameters(), changing_options(),
                  {.process_group = group, .parameters_as_bucket_view = as_views, .overlap_with_ddp = overlaps});
        if (overlaps) ddp.register_comm_hook(hooks::with_zero_step(hooks::allreduce(), ddp, zero));
        for (int step = 0; step < 6; ++step) {
          if (step == 3) {
            change.change(plain);
            change.change(net);
          }
          const at::Tensor batch = changing_batch(3, step, plain->fc2->weight.scalar_type());
          train_step(plain, plain_optimizer, batch);
          train_step(ddp, zero, rows_for(batch, group));
        }
        expect_trained_alike(net, plain, group,
                             c10::str(change.name, as_views ? ", views" : "", overlaps ? ", overlap" : ""));
      }
    }
  });
}

TEST(ChangedParametersOfDdp, SyncBatchNormGoesOn) {
  const auto make = [](int seed) {
    return seeded(seed, [] {
      return torch::nn::Sequential(torch::nn::Linear(5, 6), torch::nn::BatchNorm1d(6), torch::nn::Linear(6, 2));
    });
  };
  run_ranks(2, [&](const Group& group) {
    torch::nn::Sequential plain = make(0), net = make(0);
    convert_sync_batchnorm(*net, group);
    DistributedDataParallel ddp(net, {.process_group = group});
    ChangingSgd plain_optimizer(plain->parameters(), changing_options()),
        optimizer(ddp.parameters(), changing_options());
    for (int step = 0; step < 9; ++step) {
      if (step == 3) {
        std::stringstream file;
        torch::save(make(4), file);
        torch::load(plain, file);
        file.seekg(0);
        torch::load(net, file);
      }
      if (step == 6) {
        plain->to(at::kDouble);
        net->to(at::kDouble);
      }
      const at::Tensor batch = changing_batch(2, step, plain->parameters()[0].scalar_type());
      plain_optimizer.zero_grad();
      optimizer.zero_grad();
      plain->forward(batch).pow(2).mean().backward();
      ddp(rows_for(batch, group)).pow(2).mean().backward();
      plain_optimizer.step();
      optimizer.step();
    }
    for (const auto& item : net->named_parameters()) {
      expect_close(item.value().detach().to(at::kFloat), plain->named_parameters()[item.key()].detach().to(at::kFloat),
                   item.key());
    }
    for (const auto& item : net->named_buffers()) {
      expect_close(item.value().to(at::kFloat), plain->named_buffers()[item.key()].to(at::kFloat), item.key());
    }
  });
}

TEST(ChangedParametersOfDdp, ACapturedStepGoesOn) {
  run_ranks(2, [](const Group& group) {
    for (const NamedChange& change : changes()) {
      Changing plain = changing_net(), net = changing_net();
      DistributedDataParallel ddp(net, {.process_group = group});
      ChangingSgd plain_optimizer(plain->parameters(), changing_options()),
          optimizer(ddp.parameters(), changing_options());
      auto train = capture(
          [&](const at::Tensor& x) {
            optimizer.zero_grad();
            ddp(x).pow(2).mean().backward();
            optimizer.step();
          },
          {.optimizers = {&optimizer}});
      for (int step = 0; step < 20; ++step) {
        if (step == 9) {
          EXPECT_GE(train.replays(), 3);
          change.change(plain);
          change.change(net);
        }
        const at::Tensor batch = changing_batch(2, step, plain->fc2->weight.scalar_type());
        train_step(plain, plain_optimizer, batch);
        train(rows_for(batch, group));
      }
      EXPECT_GE(train.replays(), 6) << change.name;
      expect_trained_alike(net, plain, group, change.name);
    }
  });
}

}  // namespace
}  // namespace serried
