// ZeroRedundancyOptimizer steps inside backward with the same bits as an ordinary optimizer after it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <sstream>

#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/zero.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried::zero_in_backward_test {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using ZeroAdam = ZeroRedundancyOptimizer<AdamW>;
using WithZeroStep = CommHook (*)(CommHook, DataParallelBase&, detail::ZeroOptimizer&);

const std::vector<WithZeroStep> kBothHooks = {hooks::with_zero_step, hooks::with_zero_step_interleaved};

/// Some parameters are used in every second step only, some never, and one has another memory format.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("conv", conv);
    register_module("body", body);
    register_module("head", head);
    register_module("sometimes", sometimes);
    register_module("never", never);
    conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor forward(const at::Tensor& x, bool with_all = true) {
    const at::Tensor hidden = torch::gelu(body(torch::gelu(conv(x)).flatten(1)));
    return with_all ? head(hidden) + sometimes(hidden) : head(hidden);
  }
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(2, 3, 2)};
  torch::nn::Linear body{12, 7}, head{7, 3}, sometimes{7, 3}, never{2, 2};
};
TORCH_MODULE(Net);

Net seeded_net() {
  return seeded(0, [] { return Net(); });
}
at::Tensor batch_of(int rank, int step) {
  return seeded(100 * rank + step + 1, [] { return at::randn({2, 2, 3, 3}); });
}

DistributedDataParallelOptions small_buckets(const Group& group) {
  return {.process_group = group, .bucket_caps_mb = {0.0002}, .find_unused_parameters = true};
}
ZeroOptions overlapped(const Group& group) {
  return {.process_group = group, .overlap_with_ddp = true};
}

// The learning rate changes on the way, as a scheduler would do it.
void train(DataParallelBase& ddp, torch::optim::Optimizer& optimizer, const std::function<void(int)>& backward) {
  for (int step = 0; step < 5; ++step) {
    if (step == 3) optimizer.param_groups()[0].options().set_lr(0.02);
    ddp.zero_grad();
    backward(step);
    optimizer.step();
  }
}

/// Five steps with unused parameters, of an ordinary optimizer after backward.
Net trained_afterwards(const DistributedDataParallelOptions& options, const CommHook& hook = hooks::allreduce()) {
  Net net = seeded_net();
  DistributedDataParallel ddp(net, options);
  ddp.register_comm_hook(hook);
  AdamW optimizer(ddp.parameters(), AdamWOptions(0.01));
  train(ddp, optimizer, [&](int step) { ddp(batch_of(ddp.rank(), step), step % 2 == 0).pow(2).mean().backward(); });
  return net;
}
Net trained_in_backward(const DistributedDataParallelOptions& options, WithZeroStep with_zero_step,
                        const CommHook& hook = hooks::allreduce()) {
  Net net = seeded_net();
  DistributedDataParallel ddp(net, options);
  ZeroAdam zero(ddp.parameters(), AdamWOptions(0.01), overlapped(options.process_group));
  ddp.register_comm_hook(with_zero_step(hook, ddp, zero));
  train(ddp, zero, [&](int step) { ddp(batch_of(ddp.rank(), step), step % 2 == 0).pow(2).mean().backward(); });
  return net;
}

void expect_same_model(torch::nn::Module& actual, torch::nn::Module& expected) {
  const auto wanted = expected.named_parameters();
  for (const auto& item : actual.named_parameters()) {
    expect_equal(item.value().detach(), wanted[item.key()].detach(), item.key());
  }
}

class ZeroInBackward : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, ZeroInBackward, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})),
                         testing::name_of);

TEST_P(ZeroInBackward, GivesTheSameBitsAsStepsAfterwards) {
  on_ranks([&](const Group& group) {
    for (const bool as_view : {true, false}) {
      DistributedDataParallelOptions options = small_buckets(group);
      options.gradient_as_bucket_view = as_view;
      Net expected = trained_afterwards(options);
      for (const WithZeroStep with_zero_step : kBothHooks) {
        Net net = trained_in_backward(options, with_zero_step);
        expect_same_model(*net, *expected);
        // Not touched by weight decay, neither.
        expect_equal(net->never->weight.detach(), seeded_net()->never->weight.detach());
      }
    }
  });
}

TEST_P(ZeroInBackward, TrainsAsOneProcessWithTheWholeBatchFromTheFirstStepOn) {
  using torch::optim::SGDOptions;
  on_ranks([&](const Group& group) {
    for (const WithZeroStep with_zero_step : kBothHooks) {
      Net net = seeded_net(), alone = seeded_net();
      DistributedDataParallel ddp(
          net, {.process_group = group, .bucket_caps_mb = {0.0002}, .ignore = {"never.weight", "never.bias"}});
      ZeroRedundancyOptimizer<torch::optim::SGD> zero(ddp.data_parallel_parameters(), SGDOptions(0.1).momentum(0.9),
                                                      overlapped(group));
      ddp.register_comm_hook(with_zero_step(hooks::allreduce(), ddp, zero));
      torch::optim::SGD plain(alone->parameters(), SGDOptions(0.1).momentum(0.9));
      for (int step = 0; step < 4; ++step) {
        ddp.zero_grad();
        ddp(batch_of(group->getRank(), step)).pow(2).mean().backward();
        std::vector<at::Tensor> batches;
        for (int rank = 0; rank < world_size(); ++rank) batches.push_back(batch_of(rank, step));
        plain.zero_grad();
        alone(at::cat(batches)).pow(2).mean().backward();
        plain.step();
        for (size_t i = 0; i < net->parameters().size(); ++i) {
          expect_close(net->parameters()[i].detach(), alone->parameters()[i].detach(), c10::str("step ", step));
        }
      }
    }
  });
}

TEST_P(ZeroInBackward, WrapsAnyHook) {
  on_ranks([&](const Group& group) {
    // Its result lies in memory of its own.
    const CommHook elsewhere([group](c10d::GradBucket& bucket) {
      std::vector<at::Tensor> tensors = {bucket.getBuffer() / group->getSize()};
      return group->allreduce(tensors)->getFuture();
    });
    for (const CommHook& hook : {hooks::fp16_compress(), elsewhere}) {
      Net expected = trained_afterwards(small_buckets(group), hook);
      for (const WithZeroStep with_zero_step : kBothHooks) {
        expect_same_model(*trained_in_backward(small_buckets(group), with_zero_step, hook), *expected);
      }
    }
  });
}

TEST(ZeroStep, FollowsStaticGraphsAndReducedPrecision) {
  run_ranks(3, [](const Group& group) {
    DistributedDataParallelOptions reduced = small_buckets(group);
    reduced.mixed_precision.reduce_dtype = at::kBFloat16;
    DistributedDataParallelOptions batched = small_buckets(group);
    batched.batched_grad_copy = true;
    for (const auto& options : {reduced, batched}) {
      Net expected = trained_afterwards(options);
      for (const auto& hook : kBothHooks) expect_same_model(*trained_in_backward(options, hook), *expected);
    }
    const auto backward = [](auto& ddp, int step) { ddp(batch_of(ddp.rank(), step)).pow(2).mean().backward(); };
    const DistributedDataParallelOptions is_static = {
        .process_group = group, .bucket_caps_mb = {0.0002}, .static_graph = true};
    Net expected = seeded_net();
    DistributedDataParallel ddp(expected, is_static);
    ddp.register_comm_hook(hooks::allreduce());
    AdamW optimizer(ddp.parameters(), AdamWOptions(0.01));
    train(ddp, optimizer, [&](int step) { backward(ddp, step); });
    for (const WithZeroStep with_zero_step : kBothHooks) {
      Net net = seeded_net();
      DistributedDataParallel overlapping(net, is_static);
      ZeroAdam zero(overlapping.parameters(), AdamWOptions(0.01), overlapped(group));
      overlapping.register_comm_hook(with_zero_step(hooks::allreduce(), overlapping, zero));
      train(overlapping, zero, [&](int step) { backward(overlapping, step); });
      expect_same_model(*net, *expected);
    }
  });
}

TEST(ZeroStep, GradientsAddUpUntilTheyAreShared) {
  run_ranks(2, [](const Group& group) {
    const auto backward = [](auto& ddp, int step) {
      {
        const auto guard = ddp.no_sync();
        ddp(batch_of(ddp.rank(), step)).pow(2).mean().backward();
      }
      ddp(batch_of(ddp.rank(), step + 10)).pow(2).mean().backward();
    };
    Net expected = seeded_net(), net = seeded_net();
    DistributedDataParallel ddp(expected, small_buckets(group)), overlapping(net, small_buckets(group));
    AdamW optimizer(ddp.parameters(), AdamWOptions(0.01));
    ddp.register_comm_hook(hooks::allreduce());
    train(ddp, optimizer, [&](int step) { backward(ddp, step); });
    ZeroAdam zero(overlapping.parameters(), AdamWOptions(0.01), overlapped(group));
    overlapping.register_comm_hook(hooks::with_zero_step_interleaved(hooks::allreduce(), overlapping, zero));
    train(overlapping, zero, [&](int step) { backward(overlapping, step); });
    expect_same_model(*net, *expected);
  });
}

TEST(ZeroStep, LeavesOtherParametersToTheirOwnOptimizer) {
  run_ranks(2, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, small_buckets(group));
    ZeroAdam zero(net->head->parameters(), 0.1, overlapped(group));
    ddp.register_comm_hook(hooks::with_zero_step(hooks::allreduce(), ddp, zero));
    ddp(batch_of(0, 0)).pow(2).mean().backward();
    expect_equal(net->body->weight.detach(), seeded_net()->body->weight.detach());
    EXPECT_FALSE(net->head->weight.detach().equal(seeded_net()->head->weight.detach()));
    EXPECT_TRUE(net->body->weight.grad().defined());
  });
}

TEST(ZeroStep, ItsStateIsSpreadAndCanBeSaved) {
  std::vector<size_t> num_states(2);
  std::string saved;
  Net alone = seeded_net();
  AdamW plain(alone->parameters(), 0.1);
  const auto loss = [](auto& net) { return net(batch_of(0, 0)).pow(2).mean(); };
  loss(alone).backward();
  plain.step();
  run_ranks(2, [&](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, small_buckets(group));
    ZeroAdam zero(ddp.parameters(), 0.1, overlapped(group));
    ddp.register_comm_hook(hooks::with_zero_step(hooks::noop(), ddp, zero));
    loss(ddp).backward();
    num_states[size_t(group->getRank())] = zero.local_optimizer().state().size();
    for (const auto& [parameter, state] : zero.local_optimizer().state()) {
      EXPECT_EQ(zero.local_optimizer().param_groups().size(), 1u);
      const auto& own = zero.local_optimizer().param_groups()[0].params();
      EXPECT_TRUE(std::any_of(own.begin(), own.end(),
                              [key = parameter](const at::Tensor& p) { return p.unsafeGetTensorImpl() == key; }));
    }
    zero.consolidate_state_dict(1);
    if (group->getRank() != 1) return;
    std::ostringstream bytes;
    torch::save(zero, bytes);
    saved = bytes.str();
  });
  EXPECT_EQ(num_states[0] + num_states[1], 8u);  // all but those of `never`
  AdamW loaded(alone->parameters(), 0.5);
  std::istringstream bytes(saved);
  torch::load(loaded, bytes);
  using State = torch::optim::AdamWParamState;
  for (const auto& [parameter, state] : plain.state()) {
    expect_close(static_cast<const State&>(*loaded.state().at(parameter)).exp_avg(),
                 static_cast<const State&>(*state).exp_avg());
  }
}

TEST(ZeroStep, StepRunsOnlyTheClosure) {
  run_ranks(2, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, small_buckets(group));
    ZeroAdam zero(ddp.parameters(), 0.1, overlapped(group));
    ddp.register_comm_hook(hooks::with_zero_step(hooks::allreduce(), ddp, zero));
    const auto loss = [&] { return ddp(batch_of(0, 0)).pow(2).mean(); };
    const double before = loss().item<double>();
    const at::Tensor seen = zero.step([&] {
      const at::Tensor value = loss();
      value.backward();
      return value;
    });
    EXPECT_EQ(seen.item<double>(), before);
    const at::Tensor weight = net->body->weight.detach().clone();
    EXPECT_FALSE(weight.equal(seeded_net()->body->weight.detach()));
    EXPECT_FALSE(zero.step().defined());
    expect_equal(net->body->weight.detach(), weight);
    EXPECT_EQ(ddp.logging_data().to_map().at("comm_hook").toStringRef(), "allreduce_with_zero_step");
  });
}

/// Throws in its second step: that of the second bucket.
struct Stumbling : torch::optim::SGD {
  using SGD::SGD;
  at::Tensor step(LossClosure closure = nullptr) override {
    if (++num_steps == 2) throw std::runtime_error("the optimizer stumbles");
    return SGD::step(std::move(closure));
  }
  int num_steps = 0;
};

TEST(ZeroStep, AnErrorOfTheOptimizerComesOutOfBackward) {
  for (const WithZeroStep with_zero_step : kBothHooks) {
    run_ranks(2, [&](const Group& group) {
      Net net = seeded_net();
      DistributedDataParallel ddp(net, small_buckets(group));
      ZeroRedundancyOptimizer<Stumbling> zero(ddp.parameters(), torch::optim::SGDOptions(0.1), overlapped(group));
      ddp.register_comm_hook(with_zero_step(hooks::allreduce(), ddp, zero));
      const auto backward = [&] { ddp(batch_of(0, 0)).pow(2).mean().backward(); };
      EXPECT_THAT(error_text<c10::DistBackendError>(backward), ::testing::HasSubstr("the optimizer stumbles"));
      ddp.zero_grad();
      backward();  // and the next one is fine
      EXPECT_FALSE(net->head->weight.detach().equal(seeded_net()->head->weight.detach()));
    });
  }
}

// Without the last line.
std::string hook_error(DataParallelBase& ddp, detail::ZeroOptimizer& zero) {
  const std::string text = error_text<c10::ValueError>([&] { hooks::with_zero_step(hooks::allreduce(), ddp, zero); });
  return text.substr(0, text.find("\n  at:"));
}

TEST(ZeroStepErrors, TheOptimizerAndTheHookMustKnowOfEachOther) {
  run_ranks(2, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, small_buckets(group));
    ZeroAdam plain(ddp.parameters(), 0.1, {.process_group = group});
    EXPECT_EQ(hook_error(ddp, plain),
              "[ZeroRedundancyOptimizer] a hook cannot make the steps of an optimizer that was made without "
              "overlap_with_ddp\n  fix: pass {.overlap_with_ddp = true} where the optimizer is made");
    ZeroAdam zero(ddp.parameters(), 0.1, overlapped(group));
    const std::string text = error_text<c10::ValueError>([&] { zero.step(); });
    EXPECT_EQ(text.substr(0, text.find("\n  at:")),
              "[ZeroRedundancyOptimizer] overlap_with_ddp is set, but no hook makes the steps\n  fix: call "
              "ddp.register_comm_hook(hooks::with_zero_step(hooks::allreduce(), ddp, optimizer))");
  });
}

TEST(ZeroStepErrors, GroupsMustBeTheSame) {
  run_ranks(2, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, small_buckets(group));
    const Group other = testing::sibling(group, "threads");
    ZeroAdam elsewhere(ddp.parameters(), 0.1, overlapped(other));
    const std::string expected =
        "[with_zero_step] the module and the optimizer have different groups\n  fix: make both with the same "
        "process_group; after set_process_group make a new optimizer";
    EXPECT_EQ(hook_error(ddp, elsewhere), expected);
    ZeroAdam zero(ddp.parameters(), 0.1, overlapped(group));
    ddp.register_comm_hook(hooks::with_zero_step(hooks::allreduce(), ddp, zero));
    ddp.set_process_group(other);
    const std::string text = error_text<c10::ValueError>([&] { ddp(batch_of(0, 0)).sum().backward(); });
    EXPECT_EQ(text.substr(0, text.find("\n  at:")), expected);
  });
}

TEST(ZeroStepErrors, EveryParameterMustBeInABucket) {
  run_ranks(2, [](const Group& group) {
    Net net = seeded_net();
    DistributedDataParallel ddp(net, {.process_group = group, .ignore = {"body.bias"}});
    ZeroAdam zero(net->body->parameters(), 0.1, overlapped(group));
    EXPECT_EQ(hook_error(ddp, zero),
              "[with_zero_step] parameter 1 of the optimizer, f32[7], is in no bucket of the module\n  fix: give the "
              "optimizer parameters that the module averages: not frozen, ignored, delayed or distributed ones");
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(5, 2).sparse(true));
    DistributedDataParallel sparse(table, {.process_group = group});
    ZeroAdam of_table(table->parameters(), 0.1, overlapped(group));
    EXPECT_EQ(hook_error(sparse, of_table),
              "[with_zero_step] the gradient of weight is sparse\n  fix: build its module with .sparse(false), or call "
              "step() after backward");
  });
}

TEST(ZeroStepErrors, OptionsThatHideParametersOrBucketsAreRefused) {
  run_ranks(1, [](const Group& group) {
    Net net = seeded_net();
    ZeroAdam zero(net->parameters(), 0.1, overlapped(group));
    {
      DistributedDataParallel lowered(net, {.process_group = group, .mixed_precision = {.param_dtype = at::kBFloat16}});
      EXPECT_EQ(hook_error(lowered, zero),
                "[with_zero_step] during backward the parameters are BFloat16, the optimizer's are of full precision\n"
                "  fix: leave out mixed_precision.param_dtype, or call step() after backward");
    }
    DistributedDataParallel skipping(net, {.process_group = group, .skip_unused_allreduce = true});
    EXPECT_EQ(hook_error(skipping, zero),
              "[with_zero_step] skip_unused_allreduce keeps buckets from the hook, the last one maybe, too\n"
              "  fix: leave out skip_unused_allreduce, or call step() after backward");
  });
}

}  // namespace
}  // namespace serried::zero_in_backward_test
