// ZeroRedundancyOptimizer in join: ranks without input go on updating the parameters they own.
#include "serried/parallel/join.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/zero.h"
#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried::zero_join_test {
namespace {

using testing::expect_close;
using testing::expect_equal;
using torch::optim::AdamW;
using torch::optim::SGD;
using torch::optim::SGDOptions;

/// How many batches each of up to four ranks has.
using Lengths = std::vector<int>;
const std::vector<Lengths> kLengths = {{3, 0, 5, 2}, {0, 4, 1, 4}, {5, 1, 0, 2}, {2, 2, 2, 2}};

torch::nn::Sequential make_net() {
  return seeded(0, [] {
    return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::GELU(), torch::nn::Linear(7, 6),
                                 torch::nn::Linear(6, 3));
  });
}
at::Tensor batch_of(int rank, int step) {
  return seeded(100 * rank + step + 1, [] { return at::randn({2, 5}); });
}

/// One process: in each step the batches of all ranks that still have one; the learning rate halves after two steps.
torch::nn::Sequential trained_alone(const Lengths& lengths, int world_size, bool divide_by_world) {
  torch::nn::Sequential net = make_net();
  SGD optimizer(net->parameters(), SGDOptions(0.1).momentum(0.9));
  torch::optim::StepLR schedule(optimizer, 2, 0.5);
  const int num_steps = *std::max_element(lengths.begin(), lengths.begin() + world_size);
  for (int step = 0; step < num_steps; ++step) {
    std::vector<at::Tensor> batches;
    for (int rank = 0; rank < world_size; ++rank) {
      if (step < lengths[rank]) batches.push_back(batch_of(rank, step));
    }
    const double share = divide_by_world ? double(batches.size()) / world_size : 1;
    optimizer.zero_grad();
    (net->forward(at::cat(batches)).pow(2).mean() * share).backward();
    optimizer.step();
    schedule.step();
  }
  return net;
}

void expect_close_models(const torch::nn::Sequential& actual, const torch::nn::Sequential& expected) {
  for (size_t i = 0; i < expected->parameters().size(); ++i) {
    expect_close(actual->parameters()[i].detach(), expected->parameters()[i].detach(), c10::str("parameter ", i));
  }
}

class ZeroJoin : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, ZeroJoin, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

// Ranks that have joined do not step their schedulers: they learn the rates of the others.
TEST_P(ZeroJoin, TheModelIsThatOfOneProcessWithAllInputs) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    for (const Lengths& lengths : kLengths) {
      for (const bool divide_by_world : {true, false}) {
        torch::nn::Sequential net = make_net();
        DistributedDataParallel ddp(net, {.process_group = group});
        ZeroRedundancyOptimizer<SGD> zero(ddp.parameters(), SGDOptions(0.1).momentum(0.9), {.process_group = group});
        torch::optim::StepLR schedule(zero, 2, 0.5);
        const auto train = [&] {
          for (int step = 0; step < lengths[rank]; ++step) {
            zero.zero_grad();
            ddp(batch_of(rank, step)).pow(2).mean().backward();
            zero.step();
            schedule.step();
          }
        };
        join({&ddp, &zero}, train, {.divide_by_initial_world_size = divide_by_world});
        expect_close_models(net, trained_alone(lengths, world_size(), divide_by_world));
      }
    }
  });
}

TEST_P(ZeroJoin, GivesTheSameBitsAsAnOrdinaryOptimizer) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    for (const Lengths& lengths : kLengths) {
      const auto train = [&](auto& ddp, auto& optimizer, std::vector<Joinable*> joinables) {
        join(joinables, [&] {
          for (int step = 0; step < lengths[rank]; ++step) {
            optimizer.step([&] {
              optimizer.zero_grad();
              const at::Tensor loss = ddp(batch_of(rank, step)).pow(2).mean();
              loss.backward();
              return loss;
            });
          }
        });
      };
      torch::nn::Sequential expected = make_net(), net = make_net();
      DistributedDataParallel plain_ddp(expected, {.process_group = group}), ddp(net, {.process_group = group});
      AdamW plain(plain_ddp.parameters(), 0.01);
      train(plain_ddp, plain, {&plain_ddp});
      ZeroRedundancyOptimizer<AdamW> zero(ddp.parameters(), 0.01,
                                          {.process_group = group, .parameters_as_bucket_view = true});
      train(ddp, zero, {&ddp, &zero});
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        expect_equal(net->parameters()[i].detach(), expected->parameters()[i].detach());
      }
    }
  });
}

// The hook runs on ranks that have joined, too, so the optimizer need not be named.
TEST_P(ZeroJoin, StepsInBackwardAreFollowed) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    for (const Lengths& lengths : kLengths) {
      for (const bool is_named : {true, false}) {
        torch::nn::Sequential net = make_net(), expected = make_net();
        DistributedDataParallel ddp(net, {.process_group = group, .bucket_caps_mb = {0.0001}});
        ZeroRedundancyOptimizer<SGD> zero(ddp.parameters(), 0.1, {.process_group = group, .overlap_with_ddp = true});
        ddp.register_comm_hook(is_named ? hooks::with_zero_step(hooks::allreduce(), ddp, zero)
                                        : hooks::with_zero_step_interleaved(hooks::allreduce(), ddp, zero));
        std::vector<Joinable*> joinables = {&ddp};
        if (is_named) joinables.push_back(&zero);
        join(joinables, [&] {
          for (int step = 0; step < lengths[rank]; ++step) {
            ddp.zero_grad();
            ddp(batch_of(rank, step)).pow(2).mean().backward();
            zero.step();
          }
        });
        SGD plain(expected->parameters(), 0.1);
        for (int step = 0; step < 5; ++step) {
          plain.zero_grad();
          for (int r = 0; r < world_size(); ++r) {
            if (step < lengths[r]) (expected->forward(batch_of(r, step)).pow(2).mean() / world_size()).backward();
          }
          plain.step();
        }
        expect_close_models(net, expected);
      }
    }
  });
}

TEST_P(ZeroJoin, AnOptimizerAloneJoins) {
  on_ranks([&](const Group& group) {
    const at::Tensor a = at::ones({3}).requires_grad_(), b = at::ones({2}).requires_grad_();
    ZeroRedundancyOptimizer<SGD> zero(std::vector<at::Tensor>{a, b}, 0.5, {.process_group = group});
    const auto give_gradients = [&] {
      for (const at::Tensor& p : {a, b}) p.mutable_grad() = at::ones_like(p);
    };
    give_gradients();  // those of ranks that join at once, too
    join({&zero}, [&] {
      for (int step = 0; step < group->getRank(); ++step) zero.step();
    });
    expect_close(a.detach(), at::full({3}, 1 - 0.5 * (world_size() - 1)));
    expect_close(b.detach(), at::full({2}, 1 - 0.5 * (world_size() - 1)));
    give_gradients();
    zero.step();  // evenly again
    expect_close(b.detach(), at::full({2}, 1 - 0.5 * world_size()));
  });
}

}  // namespace
}  // namespace serried::zero_join_test
