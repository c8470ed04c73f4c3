// DistributedDataParallel gives every rank the gradients of the whole batch, whatever the module looks like.
#include "serried/parallel/ddp/ddp.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/reducer.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;
using testing::OnRanks;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::gelu(fc1(x))); }
  torch::nn::Linear fc1{5, 7}, fc2{7, 3};
};
TORCH_MODULE(Net);

Net seeded_net(int seed = 0) {
  return seeded(seed, [] { return Net(); });
}

/// Two rows per rank.
at::Tensor whole_batch(int world_size, int step = 0) {
  return seeded(100 + step, [&] { return at::randn({2 * world_size, 5}); });
}
at::Tensor part_of(const at::Tensor& batch, const Group& group) {
  return batch.narrow(0, 2 * group->getRank(), 2);
}

void expect_same_gradients(torch::nn::Module& actual, torch::nn::Module& expected) {
  const auto wanted = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    ASSERT_EQ(item.value().grad().defined(), wanted[item.key()].grad().defined()) << item.key();
    if (item.value().grad().defined()) expect_close(item.value().grad(), wanted[item.key()].grad(), item.key());
  }
}

class Ddp : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, Ddp, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})), testing::name_of);

TEST_P(Ddp, GradientsAreThoseOfTheWholeBatch) {
  on_ranks([&](const Group& group) {
    for (const bool as_view : {true, false}) {
      Net plain = seeded_net(), net = seeded_net();
      DistributedDataParallel ddp(net, {.process_group = group, .gradient_as_bucket_view = as_view});
      torch::optim::SGD plain_optimizer(plain->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 4; ++step) {
        const at::Tensor batch = whole_batch(world_size(), step);
        plain_optimizer.zero_grad();
        optimizer.zero_grad();
        plain(batch).pow(2).mean().backward();
        ddp(part_of(batch, group)).pow(2).mean().backward();
        expect_same_gradients(*net, *plain);
        plain_optimizer.step();
        optimizer.step();
      }
    }
  });
}

TEST_P(Ddp, GradientsAreTheSameBitsOnEveryRank) {
  on_ranks([&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      ddp(part_of(whole_batch(world_size(), step), group)).pow(2).mean().backward();
    }
    for (const at::Tensor& parameter : ddp.parameters()) {
      at::Tensor of_first = parameter.grad().clone();
      broadcast_(of_first, group);
      expect_equal(parameter.grad(), of_first);
    }
  });
}

TEST_P(Ddp, EveryRankStartsFromTheFirstOnesState) {
  on_ranks([&](const Group& group) {
    Net net = seeded_net(group->getRank());
    Net first = seeded_net(0);
    DistributedDataParallel ddp(net, {.process_group = group});
    expect_equal(net->fc1->weight.detach(), first->fc1->weight.detach());
    expect_equal(net->fc2->bias.detach(), first->fc2->bias.detach());
  });
}

TEST_P(Ddp, NoSyncAddsUpAndTheNextBackwardSharesTheSum) {
  on_ranks([&](const Group& group) {
    for (const bool as_view : {true, false}) {
      Net plain = seeded_net(), net = seeded_net();
      DistributedDataParallel ddp(net, {.process_group = group, .gradient_as_bucket_view = as_view});
      for (int round = 0; round < 2; ++round) {
        for (int step = 0; step < 3; ++step) {
          const at::Tensor batch = whole_batch(world_size(), step);
          plain(batch).pow(2).mean().backward();
          if (step < 2) {
            auto guard = ddp.no_sync();
            ddp(part_of(batch, group)).pow(2).mean().backward();
          } else {
            ddp(part_of(batch, group)).pow(2).mean().backward();
          }
        }
        expect_same_gradients(*net, *plain);
      }
    }
  });
}

TEST_P(Ddp, NoSyncTakesAConditionAndTheLastBatchNeedsNoBranch) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    const int num_batches = 3;
    for (int i = 0; i < num_batches; ++i) {
      const at::Tensor batch = whole_batch(world_size(), i);
      plain(batch).pow(2).mean().backward();
      auto guard = ddp.no_sync(i + 1 < num_batches);
      ddp(part_of(batch, group)).pow(2).mean().backward();
    }
    expect_same_gradients(*net, *plain);
  });
}

TEST_P(Ddp, GuardsOfNoSyncMoveAndEndInAnyOrder) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    int step = 0;
    const auto run_both = [&] {
      const at::Tensor batch = whole_batch(world_size(), step++);
      plain(batch).pow(2).mean().backward();
      ddp(part_of(batch, group)).pow(2).mean().backward();
    };
    std::optional<DataParallelBase::NoSync> first = ddp.no_sync();
    auto second = std::make_optional(ddp.no_sync());
    auto moved = std::move(*first);
    first.reset();  // nothing: it was moved away
    run_both();
    { auto ends = std::move(moved); }
    run_both();  // still inside the second
    second = ddp.no_sync(false);
    run_both();
    expect_same_gradients(*net, *plain);
  });
}

TEST(DdpMismatch, NamesTheBucketOrTheBuffersBeforeTheCollective) {
  run_ranks(2, [](const Group& group) {
    const auto error_of = [&](const Group& group, const std::function<void()>& call) {
      const at::Tensor x = at::ones({7});
      return error_text<c10::DistBackendError>([&] { group->getRank() == 0 ? all_reduce_(x, group) : call(); });
    };
    const Group first = split_group(group, {{0, 1}}), second = split_group(group, {{0, 1}});
    torch::nn::Linear linear(4, 3);
    DistributedDataParallel ddp(linear, {.process_group = first});
    const at::Tensor loss = ddp(at::ones({2, 4})).sum();
    EXPECT_THAT(
        error_of(first, [&] { loss.backward(); }),
        ::testing::ContainsRegex("rank 0 #[0-9]+ all_reduce f32\\[7\\] sum, rank 1 DDP bucket 0: #[0-9]+ all_reduce "
                                 "f32\\[15\\] avg"));
    torch::nn::BatchNorm1d norm(4);
    DistributedDataParallel with_buffers(norm, {.process_group = second});
    EXPECT_THAT(
        error_of(second,
                 [&] {
                   with_buffers(at::ones({2, 4}));
                 }),
        ::testing::ContainsRegex("rank 0 #[0-9]+ all_reduce f32\\[7\\] sum, rank 1 DDP's buffers: #[0-9]+ broadcast "));
  });
}

TEST_P(Ddp, GradientsMayBeZeroedInPlace) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = whole_batch(world_size(), step);
      plain->zero_grad();
      optimizer.zero_grad(/*set_to_none=*/false);
      plain(batch).pow(2).mean().backward();
      ddp(part_of(batch, group)).pow(2).mean().backward();
      expect_same_gradients(*net, *plain);
    }
  });
}

TEST_P(Ddp, GradientsZeroedInPlaceMoveAlongWhenBucketsAreRebuilt) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 0.0001});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor batch = whole_batch(world_size(), step);
      plain->zero_grad();
      // Leaves other tensors on the same memory.
      net->zero_grad(/*set_to_none=*/false);
      plain(batch).pow(2).mean().backward();
      ddp(part_of(batch, group)).pow(2).mean().backward();
      expect_same_gradients(*net, *plain);
    }
    EXPECT_TRUE(ddp.reducer().has_rebuilt_buckets());
  });
}

TEST_P(Ddp, SeveralForwardsMayComeBeforeBackward) {
  on_ranks([&](const Group& group) {
    Net plain = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor a = whole_batch(world_size(), 1), b = whole_batch(world_size(), 2);
    for (int step = 0; step < 2; ++step) {
      plain->zero_grad();
      ddp.zero_grad();
      (plain(a).pow(2).mean() + plain(b).pow(2).mean()).backward();
      const at::Tensor first = ddp(part_of(a, group)), second = ddp(part_of(b, group));
      (first.pow(2).mean() + second.pow(2).mean()).backward();
      expect_same_gradients(*net, *plain);
    }
    const at::Tensor first = ddp(part_of(a, group)), second = ddp(part_of(b, group));
    plain->zero_grad();
    ddp.zero_grad();
    plain(a).pow(2).mean().backward();
    plain(b).pow(2).mean().backward();
    first.pow(2).mean().backward();
    second.pow(2).mean().backward();
    expect_same_gradients(*net, *plain);
  });
}

TEST(DdpOutputs, ASharedPointerIsWrappedToo) {
  run_ranks(2, [](const Group& group) {
    auto net = seeded(0, [] { return std::make_shared<NetImpl>(); });
    DistributedDataParallel ddp(net, {.process_group = group});
    EXPECT_EQ(ddp.module(), net);
    EXPECT_EQ(ddp.forward(at::ones({2, 5})).sizes(), (std::vector<int64_t>{2, 3}));
    EXPECT_EQ(ddp.named_parameters().keys()[0], "module.fc1.weight");
    ddp(at::ones({2, 5})).sum().backward();
  });
}

TEST(DdpOutputs, StockModulesAndSequentialsAreWrapped) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Sequential sequential(torch::nn::Linear(3, 4), torch::nn::ReLU(), torch::nn::Linear(4, 2));
    DistributedDataParallel ddp(sequential, {.process_group = group});
    ddp(at::ones({2, 3})).sum().backward();
    EXPECT_TRUE(ddp.parameters()[0].grad().defined());
    torch::nn::LSTM lstm(torch::nn::LSTMOptions(3, 4));
    DistributedDataParallel recurrent(lstm, {.process_group = group});
    auto [output, state] = recurrent(at::ones({5, 2, 3}));
    output.sum().backward();
    EXPECT_TRUE(recurrent.parameters()[0].grad().defined());
  });
}

struct Answer {
  at::Tensor logits;
  std::optional<at::Tensor> hidden;
  template <class Fn>
  void visit_tensors(Fn& fn) {
    fn(logits);
    if (hidden) fn(*hidden);
  }
};

struct ManyOutputsImpl : torch::nn::Module {
  ManyOutputsImpl() { register_module("fc", fc); }
  auto forward(const at::Tensor& x, int kind, const std::string& name) {
    const at::Tensor y = fc(x);
    return std::make_tuple(Answer{y, y * 2}, std::vector<at::Tensor>{y + 1},
                           std::map<std::string, at::Tensor>{{name, y}}, kind, std::optional<double>(2.0),
                           std::make_pair(y, true));
  }
  torch::nn::Linear fc{3, 3};
};
TORCH_MODULE(ManyOutputs);

TEST(DdpOutputs, WhateverForwardReturnsIsSearchedForTensors) {
  run_ranks(2, [](const Group& group) {
    ManyOutputs net = seeded(0, [] { return ManyOutputs(); });
    DistributedDataParallel ddp(net, {.process_group = group});
    auto output = ddp(at::ones({1, 3}) * (group->getRank() + 1), 7, "loss");
    EXPECT_EQ(std::get<3>(output), 7);
    int count = 0;
    auto counter = [&](at::Tensor&) { ++count; };
    detail::for_each_tensor(output, counter);
    EXPECT_EQ(count, 5);
    std::get<2>(output).at("loss").sum().backward();
    expect_close(net->fc->weight.grad(), at::full({3, 3}, 1.5));
  });
}

TEST(DdpErrors, AModuleWithoutGradientsIsRefused) {
  run_ranks(2, [](const Group& group) {
    Net net;
    for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
    EXPECT_THAT(error_text<c10::ValueError>([&] { DistributedDataParallel ddp(net, {.process_group = group}); }),
                HasSubstr("requires a gradient"));
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  Net other;
                  DistributedDataParallel ddp(other, {.process_group = group, .ignore = {"fc3.weight"}});
                }),
                HasSubstr("\"fc3.weight\" is neither a parameter nor a buffer"));
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  Net other;
                  DistributedDataParallel ddp(other, {.process_group = group, .bucket_cap_mb = 0});
                }),
                HasSubstr("a bucket of 0 MiB holds nothing"));
  });
}

TEST(DdpErrors, DifferentModelsNameTheParameterAndBothRanks) {
  run_ranks(3, [](const Group& group) {
    torch::nn::Linear net(4, group->getRank() == 2 ? 6 : 5);
    EXPECT_THAT(error_text<c10::ValueError>([&] { DistributedDataParallel ddp(net, {.process_group = group}); }),
                ::testing::AllOf(HasSubstr("parameter 0 is"), HasSubstr("on rank 0: weight [5, 4]"),
                                 HasSubstr("on rank 2: weight [6, 4]"), HasSubstr("fix: build the same module")));
  });
}

}  // namespace
}  // namespace serried
