// DistributedDataParallel on inputs of different lengths trains as one process on all of them.
#include "serried/parallel/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/parallel/sync_batchnorm.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using ::testing::HasSubstr;
using testing::OnRanks;

/// How many batches each of up to four ranks has.
using Lengths = std::vector<int>;
const std::vector<Lengths> kLengths = {{3, 0, 5, 2}, {0, 4, 1, 4}, {2, 2, 2, 2}};

struct UnevenImpl : torch::nn::Module {
  UnevenImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::gelu(fc1(x))); }
  torch::nn::Linear fc1{5, 7}, fc2{7, 3};
};
TORCH_MODULE(Uneven);

Uneven uneven_net() {
  return seeded(0, [] { return Uneven(); });
}

at::Tensor uneven_batch(int rank, int step) {
  return seeded(100 * rank + step + 1, [] { return at::randn({2, 5}); });
}

int longest(const Lengths& lengths, int world_size) {
  return *std::max_element(lengths.begin(), lengths.begin() + world_size);
}

std::vector<int> ranks_with_input(const Lengths& lengths, int world_size, int step) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) {
    if (step < lengths[rank]) ranks.push_back(rank);
  }
  return ranks;
}

/// One process: in each step the batches of all ranks that still have one.
Uneven trained_alone(const Lengths& lengths, int world_size, bool divide_by_world) {
  Uneven net = uneven_net();
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  for (int step = 0; step < longest(lengths, world_size); ++step) {
    std::vector<at::Tensor> batches;
    for (int rank : ranks_with_input(lengths, world_size, step)) batches.push_back(uneven_batch(rank, step));
    optimizer.zero_grad();
    const double share = divide_by_world ? double(batches.size()) / world_size : 1;
    (net(at::cat(batches)).pow(2).mean() * share).backward();
    optimizer.step();
  }
  return net;
}

void expect_model(torch::nn::Module& actual, torch::nn::Module& expected) {
  const auto wanted = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    expect_close(item.value().detach(), wanted[item.key()].detach(), item.key());
  }
}

class DdpJoin : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, DdpJoin, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

TEST_P(DdpJoin, TheModelIsThatOfOneProcessWithAllInputs) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    for (const Lengths& lengths : kLengths) {
      for (const bool divide_by_world : {true, false}) {
        for (const bool as_view : {true, false}) {
          Uneven net = uneven_net();
          DistributedDataParallel ddp(net, {.process_group = group, .gradient_as_bucket_view = as_view});
          torch::optim::SGD optimizer(ddp.parameters(), 0.1);
          const auto train = [&] {
            for (int step = 0; step < lengths[rank]; ++step) {
              optimizer.zero_grad();
              ddp(uneven_batch(rank, step)).pow(2).mean().backward();
              optimizer.step();
            }
          };
          join({&ddp}, train, {.divide_by_initial_world_size = divide_by_world});
          expect_model(*net, *trained_alone(lengths, world_size(), divide_by_world));
          EXPECT_TRUE(ddp.logging_data().to_map().at("join_uneven_inputs").toBool());
        }
      }
    }
  });
}

TEST_P(DdpJoin, TrainingGoesOnEvenlyAfterwards) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    Uneven net = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    const auto train = [&](int num_steps) {
      for (int step = 0; step < num_steps; ++step) {
        ddp.zero_grad();
        ddp(uneven_batch(rank, step)).pow(2).mean().backward();
      }
    };
    join({&ddp}, [&] { train(rank + 1); }, {.divide_by_initial_world_size = false});
    train(1);
    Uneven alone = uneven_net();
    std::vector<at::Tensor> batches;
    for (int r = 0; r < world_size(); ++r) batches.push_back(uneven_batch(r, 0));
    alone(at::cat(batches)).pow(2).mean().backward();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      expect_close(net->parameters()[i].grad(), alone->parameters()[i].grad());
    }
  });
}

// Joined ranks have what an optimizer that is spread over the ranks needs.
TEST_P(DdpJoin, JoinedRanksGetTheGradientsToo) {
  on_ranks([&](const Group& group) {
    Uneven net = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    const auto train = [&] {
      if (group->getRank() == 0) ddp(uneven_batch(0, 0)).pow(2).mean().backward();
    };
    join({&ddp}, train, {.divide_by_initial_world_size = false});
    Uneven alone = uneven_net();
    alone(uneven_batch(0, 0)).pow(2).mean().backward();
    expect_close(net->fc1->weight.grad(), alone->fc1->weight.grad());
  });
}

TEST_P(DdpJoin, BucketsAreRebuiltAsAnActiveRankFindsBest) {
  on_ranks([&](const Group& group) {
    const auto buckets_after = [&](bool first_is_idle) {
      Uneven net = uneven_net();
      DistributedDataParallel ddp(net, {.process_group = group, .bucket_caps_mb = {0.0001}});
      const auto train = [&] {
        if (first_is_idle && group->getRank() == 0 && world_size() > 1) return;
        for (int step = 0; step < 3; ++step) ddp(uneven_batch(0, step)).pow(2).mean().backward();
      };
      join({&ddp}, train);
      EXPECT_TRUE(ddp.reducer().has_rebuilt_buckets());
      std::vector<std::vector<size_t>> members;
      for (const auto& bucket : ddp.reducer().buckets()) members.push_back(bucket.members);
      return members;
    };
    EXPECT_EQ(buckets_after(true), buckets_after(false));
  });
}

TEST_P(DdpJoin, NoSyncWorksInside) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    const Lengths lengths = {2, 0, 3, 1};
    const auto micro_batch = [](int rank, int step, int i) { return uneven_batch(rank, 3 * step + i); };
    Uneven net = uneven_net(), alone = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    torch::optim::SGD optimizer(ddp.parameters(), 0.1), optimizer_alone(alone->parameters(), 0.1);
    join({&ddp}, [&] {
      for (int step = 0; step < lengths[rank]; ++step) {
        optimizer.zero_grad();
        for (int i = 0; i < 2; ++i) {
          auto guard = ddp.no_sync();
          ddp(micro_batch(rank, step, i)).pow(2).mean().backward();
        }
        ddp(micro_batch(rank, step, 2)).pow(2).mean().backward();
        optimizer.step();
      }
    });
    for (int step = 0; step < longest(lengths, world_size()); ++step) {
      optimizer_alone.zero_grad();
      for (int active : ranks_with_input(lengths, world_size(), step)) {
        for (int i = 0; i < 3; ++i) {
          (alone(micro_batch(active, step, i)).pow(2).mean() / world_size()).backward();
        }
      }
      optimizer_alone.step();
    }
    expect_model(*net, *alone);
  });
}

TEST_P(DdpJoin, AForwardNeedNotHaveABackward) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    const Lengths lengths = {1, 3, 0, 2};
    Uneven net = uneven_net(), alone = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    torch::optim::SGD optimizer(ddp.parameters(), 0.1), optimizer_alone(alone->parameters(), 0.1);
    join({&ddp}, [&] {
      for (int step = 0; step < lengths[rank]; ++step) {
        optimizer.zero_grad();
        const at::Tensor first = ddp(uneven_batch(rank, step)), second = ddp(uneven_batch(rank, step + 10));
        (first.pow(2).mean() + second.mean()).backward();
        optimizer.step();
        at::NoGradGuard no_grad;
        ddp(uneven_batch(rank, step));
      }
    });
    for (int step = 0; step < longest(lengths, world_size()); ++step) {
      optimizer_alone.zero_grad();
      for (int active : ranks_with_input(lengths, world_size(), step)) {
        const at::Tensor loss =
            alone(uneven_batch(active, step)).pow(2).mean() + alone(uneven_batch(active, step + 10)).mean();
        (loss / world_size()).backward();
      }
      optimizer_alone.step();
    }
    expect_model(*net, *alone);
  });
}

/// A buffer that adds up what each forward is given.
struct CountingImpl : torch::nn::Module {
  CountingImpl() {
    register_module("fc", fc);
    total = register_buffer("total", at::zeros({1}));
  }
  at::Tensor forward(double amount) {
    at::NoGradGuard no_grad;
    total.add_(amount);
    at::AutoGradMode grad(true);
    return fc(at::ones({1, 2}));
  }
  torch::nn::Linear fc{2, 1};
  at::Tensor total;
};
TORCH_MODULE(Counting);

double amount_of(int rank, int step) {
  return 10 * step + rank + 1;
}

TEST_P(DdpJoin, BuffersComeFromTheHighestActiveRank) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    for (const Lengths& lengths : kLengths) {
      Counting net = seeded(1, [] { return Counting(); });
      DistributedDataParallel ddp(net, {.process_group = group});
      join({&ddp}, [&] {
        for (int step = 0; step < lengths[rank]; ++step) ddp(amount_of(rank, step)).sum().backward();
      });
      std::vector<double> totals(world_size());
      for (int step = 0; step < longest(lengths, world_size()); ++step) {
        const std::vector<int> active = ranks_with_input(lengths, world_size(), step);
        const double shared = totals[active.back()];
        for (int r : active) totals[r] = shared + amount_of(r, step);
      }
      const int last = ranks_with_input(lengths, world_size(), longest(lengths, world_size()) - 1).back();
      EXPECT_EQ(net->total.item<double>(), totals[last]);
    }
  });
}

TEST_P(DdpJoin, BufferHooksRunOnJoinedRanks) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank(), world = world_size();
    // Before forward, which changes the buffers, it has to be done; after it, it may go on until backward ends.
    const auto average = [](bool waits) -> BufferHook {
      return [waits](const Group& of, const std::map<std::string, at::Tensor>& buffers) {
        std::vector<HookFuture> futures;
        for (const auto& [name, buffer] : buffers) {
          buffer.div_(of->getSize());
          std::vector<at::Tensor> tensors = {buffer};
          futures.push_back(of->allreduce(tensors)->getFuture());
          if (waits) futures.back()->waitAndThrow();
        }
        return futures;
      };
    };
    const Lengths lengths = {1, 0, 4, 2};
    for (const auto location : {BufferHookLocation::pre_forward, BufferHookLocation::post_forward}) {
      Counting net = seeded(1, [] { return Counting(); });
      DistributedDataParallel ddp(net, {.process_group = group});
      ddp.register_buffer_hook(average(location == BufferHookLocation::pre_forward), location);
      join({&ddp}, [&] {
        for (int step = 0; step < lengths[rank]; ++step) ddp(amount_of(rank, step)).sum().backward();
      });
      std::vector<double> totals(world);
      const auto share = [&] {
        double mean = 0;
        for (double total : totals) mean += total / world;
        totals.assign(world, mean);
      };
      for (int step = 0; step < longest(lengths, world); ++step) {
        if (location == BufferHookLocation::pre_forward) share();
        for (int r : ranks_with_input(lengths, world, step)) totals[r] += amount_of(r, step);
        if (location == BufferHookLocation::post_forward) share();
      }
      const int last = ranks_with_input(lengths, world, longest(lengths, world) - 1).back();
      EXPECT_NEAR(net->total.item<double>(), totals[last], 1e-4);
    }
  });
}

/// LeftOut that a call may leave out.
struct LeftOutImpl : torch::nn::Module {
  LeftOutImpl() {
    register_module("a", a);
    register_module("b", b);
    register_module("c", c);
  }
  at::Tensor forward(const at::Tensor& x, bool use_a) {
    const at::Tensor y = c(x);
    return use_a ? y + a(x) : y;
  }
  torch::nn::Linear a{3, 2}, b{3, 2}, c{3, 2};  // b is never used
};
TORCH_MODULE(LeftOut);

TEST_P(DdpJoin, UnusedParametersAreAgreedOn) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank(), world = world_size();
    for (const bool skip : {false, true}) {
      LeftOut net = seeded(3, [] { return LeftOut(); });
      DistributedDataParallel ddp(
          net, {.process_group = group, .find_unused_parameters = true, .skip_unused_allreduce = skip});
      // The last rank alone uses a; it has two batches, the others one.
      const bool is_last = rank == world - 1;
      join({&ddp}, [&] {
        for (int step = 0; step < (is_last ? 2 : 1); ++step) {
          ddp.zero_grad();
          ddp(at::ones({1, 3}), is_last && !skip).sum().backward();
        }
      });
      EXPECT_FALSE(net->b->weight.grad().defined());
      EXPECT_EQ(net->a->weight.grad().defined(), !skip);
      if (!skip) expect_close(net->a->weight.grad(), at::full({2, 3}, 1.0 / world));
      expect_close(net->c->weight.grad(), at::full({2, 3}, 1.0 / world));
    }
  });
}

TEST_P(DdpJoin, AStaticGraphMayBeginWithARankThatHasNoInput) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank(), world = world_size();
    LeftOut net = seeded(3, [] { return LeftOut(); });
    DistributedDataParallel ddp(net, {.process_group = group, .static_graph = true});
    const auto train = [&](bool idle, int num_steps) {
      join({&ddp}, [&] {
        for (int step = 0; step < num_steps && !idle; ++step) {
          ddp.zero_grad();
          (ddp(at::ones({1, 3}), true) + ddp(at::ones({1, 3}), true)).sum().backward();
        }
      });
    };
    train(rank == 0 && world > 1, 3);
    const double num_active = world > 1 ? world - 1 : 1;
    expect_close(net->c->weight.grad(), at::full({2, 3}, 2 * num_active / world));
    EXPECT_FALSE(net->b->weight.grad().defined());
    train(false, 1);
    expect_close(net->c->weight.grad(), at::full({2, 3}, 2.0));
    EXPECT_FALSE(net->b->weight.grad().defined());
  });
}

TEST_P(DdpJoin, ZerosGoThroughTheCommunicationHook) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank();
    Uneven net = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    int num_calls = 0;
    double largest = 0;
    ddp.register_comm_hook([&](c10d::GradBucket& bucket) {
      ++num_calls;
      largest = std::max(largest, bucket.getBuffer().abs().max().item<double>());
      std::vector<at::Tensor> tensors = {bucket.getBuffer()};
      return group->allreduce(tensors)->getFuture();
    });
    join({&ddp}, [&] {
      for (int step = 0; step < rank; ++step) {
        ddp.zero_grad();
        ddp(uneven_batch(rank, step)).pow(2).mean().backward();
      }
    });
    const int num_iterations = world_size() - 1;
    EXPECT_EQ(num_calls, num_iterations);
    EXPECT_EQ(largest > 0, rank > 0);
    if (num_iterations == 0) return;
    Uneven alone = uneven_net();
    alone(uneven_batch(num_iterations, num_iterations - 1)).pow(2).mean().backward();
    expect_close(net->fc1->weight.grad(), alone->fc1->weight.grad());
  });
}

TEST_P(DdpJoin, SparseGradientsAreShadowed) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank(), world = world_size();
    torch::nn::Embedding table =
        seeded(5, [] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(6, 3).sparse(true)); });
    DistributedDataParallel ddp(table, {.process_group = group});
    join({&ddp}, [&] {
      for (int step = 0; step <= rank; ++step) {
        ddp.zero_grad();
        ddp(at::tensor({int64_t(rank), int64_t(4)})).sum().backward();
      }
    });
    // The last iteration was the last rank's alone.
    at::Tensor expected = at::zeros({6, 3});
    expected[world - 1] += 1.0 / world;
    expected[4] += 1.0 / world;
    expect_close(table->weight.grad().to_dense(), expected);
  });
}

TEST_P(DdpJoin, EarlyTerminationIsRaisedOnEveryRank) {
  on_ranks([&](const Group& group) {
    if (world_size() == 1) return;
    const int rank = group->getRank();
    Uneven net = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    int num_steps = 0;
    const auto train = [&] {
      for (int step = 0; step < (rank == 1 ? 2 : 4); ++step) {
        ddp(uneven_batch(rank, step)).pow(2).mean().backward();
        ++num_steps;
      }
    };
    const std::string text = error_text<c10::Error>([&] { join({&ddp}, train, {.throw_on_early_termination = true}); });
    EXPECT_THAT(text, HasSubstr(c10::str("[join] no more input on rank 1, while ", world_size() - 1, " of ",
                                         world_size(), " ranks have some\n  fix: stop training here on every rank")));
    EXPECT_EQ(num_steps, 2);
    // Nothing is left over.
    ddp(uneven_batch(rank, 0)).pow(2).mean().backward();
  });
}

TEST_P(DdpJoin, EvenInputsDoNotTerminateEarly) {
  on_ranks([&](const Group& group) {
    Uneven net = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    int num_steps = 0;
    join({&ddp},
         [&] {
           for (; num_steps < 3; ++num_steps) ddp(uneven_batch(0, num_steps)).pow(2).mean().backward();
         },
         {.throw_on_early_termination = true});
    EXPECT_EQ(num_steps, 3);
  });
}

TEST_P(DdpJoin, MixedPrecisionIsShadowed) {
  on_ranks([&](const Group& group) {
    const int rank = group->getRank(), world = world_size();
    Uneven net = uneven_net();
    DistributedDataParallel ddp(net, {.process_group = group, .mixed_precision = {.param_dtype = at::kBFloat16}});
    join({&ddp},
         [&] {
           for (int step = 0; step <= rank; ++step) {
             ddp.zero_grad();
             ddp(uneven_batch(rank, step)).pow(2).mean().backward();
           }
         },
         {.divide_by_initial_world_size = false});
    // The last iteration was the last rank's alone.
    Uneven alone = uneven_net();
    alone->to(at::kBFloat16);
    alone(uneven_batch(world - 1, world - 1).to(at::kBFloat16)).pow(2).mean().backward();
    for (size_t i = 0; i < net->parameters().size(); ++i) {
      expect_close(net->parameters()[i].grad(), alone->parameters()[i].grad().to(at::kFloat));
    }
  });
}

TEST_P(DdpJoin, DelayedReductionsAreRefused) {
  on_ranks([&](const Group& group) {
    Uneven net = uneven_net();
    DistributedDataParallel ddp(
        net, {.process_group = group, .delay_all_reduce = {.parameters = {"fc2.weight"}, .trigger = "fc1.weight"}});
    EXPECT_THAT(error_text<c10::ValueError>([&] { join({&ddp}, [] { FAIL(); }); }),
                HasSubstr("[join] delay_all_reduce reduces at a point of backward that only ranks with input know"));
  });
}

TEST_P(DdpJoin, SyncBatchNormNeedsInputOnEveryRank) {
  on_ranks([&](const Group& group) {
    torch::nn::Sequential net(torch::nn::Linear(3, 4), SyncBatchNorm(torch::nn::BatchNormOptions(4), group));
    DistributedDataParallel ddp(net, {.process_group = group});
    const std::string text = error_text<c10::ValueError>([&] { join({&ddp}, [] { FAIL(); }); });
    EXPECT_THAT(text, HasSubstr("[join] the module has SyncBatchNorm, whose statistics need the input of every rank"));
    EXPECT_THAT(text, HasSubstr("fix: pass throw_on_early_termination = true"));
    join({&ddp}, [] {}, {.throw_on_early_termination = true});
  });
}

}  // namespace
}  // namespace serried
