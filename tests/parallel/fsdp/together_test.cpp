// fully_shard with replicas, tensor parallel, mixed precision and capture.
#include <gtest/gtest.h>

#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"

namespace serried::testing {
namespace {

using namespace sharded;

NetPtr gpt(at::ScalarType dtype = at::kFloat) {
  return make([] { return std::make_shared<Gpt>(); }, dtype);
}

void expect_gradients_within(const Net& net, const Net& plain, double tolerance) {
  for (size_t i = 0; i < plain.parameters().size(); ++i) {
    const at::Tensor expected = plain.parameters()[i].grad();
    const at::Tensor actual = DTensor(net.parameters()[i].grad()).full_tensor();
    EXPECT_LE((actual - expected).abs().max().item<double>(), tolerance) << "parameter " << i;
  }
}

TEST(FullyShardTogether, ReplicasOfShardsAverageOverAllRanks) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, {.group = group});
    const NetPtr plain = gpt(at::kDouble), net = gpt(at::kDouble);
    const FullyShardHandle handle = shard_all(*net, {.mesh = mesh});
    EXPECT_EQ(to_string(DTensor(net->parameters()[0]).placements()), "R S0");
    CommDebugMode comm;
    net->loss(group->getRank()).backward();
    EXPECT_EQ(comm.count("all_gather"), 6);
    EXPECT_EQ(comm.count("reduce_scatter"), 4);
    EXPECT_EQ(comm.count("all_reduce"), 4);
    for (int r = 0; r < 4; ++r) (plain->loss(r) / 4).backward();
    expect_gradients_within(*net, *plain, 1e-9);
    // The reduction over replicas may wait for the last of several backwards.
    handle.set_requires_all_reduce(false);
    net->loss(group->getRank() + 7).backward();
    EXPECT_EQ(comm.count("all_reduce"), 4);
    handle.set_requires_all_reduce(true);
    net->loss(group->getRank() + 9).backward();
    EXPECT_EQ(comm.count("all_reduce"), 8);
    for (int r = 0; r < 4; ++r) ((plain->loss(r + 7) + plain->loss(r + 9)) / 4).backward();
    expect_gradients_within(*net, *plain, 1e-9);
    adamw(net->parameters())->step();
    adamw(plain->parameters())->step();
    const auto actual = values_of(*net), expected = values_of(*plain);
    for (size_t i = 0; i < actual.size(); ++i) {
      EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), 1e-7) << "parameter " << i;
    }
  });
}

TEST(FullyShardTogether, GradientsAreDividedByTheFactorThatIsAskedFor) {
  for (const auto dtype : {at::kFloat, at::kHalf}) {
    run_ranks(4, [&](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, {.group = group});
      torch::nn::Linear layer = seeded(1, [] { return torch::nn::Linear(3, 5); });
      const FullyShardHandle handle = fully_shard(*layer, {.mesh = mesh, .mixed_precision = {.reduce_dtype = dtype}});
      const auto gradient = [&] {
        layer->zero_grad();
        layer(torch::full({1, 3}, float(group->getRank() + 1))).sum().backward();
        return DTensor(layer->weight.grad()).full_tensor();
      };
      expect_equal(gradient(), torch::full({5, 3}, 2.5f));
      handle.set_gradient_divide_factor(2.0);
      expect_equal(gradient(), torch::full({5, 3}, 5.f));
      handle.set_gradient_divide_factor(std::nullopt);
      expect_equal(gradient(), torch::full({5, 3}, 2.5f));
    });
  }
}

TEST(FullyShardTogether, InBf16LossAndGradientsAreThoseOfABf16Model) {
  run_ranks(2, [](const Group&) {
    const NetPtr plain = gpt(), net = gpt();
    plain->to(at::kBFloat16);
    shard_all(*net, {.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    EXPECT_EQ(net->parameters()[0].scalar_type(), at::kFloat);
    CommDebugMode comm;
    const at::Tensor loss = net->loss(3), expected = plain->loss(3);
    EXPECT_EQ(loss.scalar_type(), at::kBFloat16);
    expect_equal(loss, expected);
    loss.backward();
    expected.backward();
    EXPECT_EQ(comm.count("all_gather"), 6);
    EXPECT_EQ(comm.count("reduce_scatter"), 4);
    for (size_t i = 0; i < plain->parameters().size(); ++i) {
      const at::Tensor grad = net->parameters()[i].grad();
      ASSERT_EQ(grad.scalar_type(), at::kFloat);
      // The table's two gradients are added in float here, in bf16 there.
      if (i == 0) {
        EXPECT_TRUE(
            at::allclose(DTensor(grad).full_tensor(), plain->parameters()[i].grad().to(at::kFloat), 1e-2, 1e-3));
        continue;
      }
      expect_equal(DTensor(grad).full_tensor(), plain->parameters()[i].grad().to(at::kFloat),
                   c10::str("parameter ", i));
    }
    adamw(net->parameters())->step();
  });
}

struct TwoLayers : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  TwoLayers() {
    up = register_module("up", torch::nn::Linear(4, 7));
    down = register_module("down", torch::nn::Linear(7, 5));
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::gelu(up(x))); }
};

// Seven rows over two ranks, and those over three: axes cut one after the other.
TEST(FullyShardTogether, TensorParallelParametersAreCutFurther) {
  for (const Sizes& shape : {Sizes{2, 2}, Sizes{3, 2}}) {
    run_ranks(int(shape[0] * shape[1]), [&](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", shape, {"dp", "tp"}, {.group = group});
      const auto make_net = [] { return std::make_shared<TwoLayers>(); };
      const auto plain = seeded(3, make_net), net = seeded(3, make_net);
      plain->to(at::kDouble);
      net->to(at::kDouble);
      distribute_parameter(net->up->weight, mesh["tp"], {Shard(0)});
      distribute_parameter(net->up->bias, mesh["tp"], {Shard(0)});
      distribute_parameter(net->down->weight, mesh["tp"], {Shard(1)});
      distribute_parameter(net->down->bias, mesh["tp"], {Replicate()});
      fully_shard(*net->up, {.mesh = mesh["dp"]});
      fully_shard(*net->down, {.mesh = mesh["dp"]});
      EXPECT_EQ(to_string(DTensor(net->up->weight).placements()), "S0 S0");
      EXPECT_EQ(to_string(DTensor(net->down->weight).placements()), "S1 S0");
      torch::optim::AdamW a(net->parameters(), 0.05), b(plain->parameters(), 0.05);
      for (int step = 0; step < 3; ++step) {
        const auto batch = [&](int64_t dp) { return models::values({3, 4}, dp + 10 * step).to(at::kDouble); };
        a.zero_grad();
        b.zero_grad();
        const DTensor x = distribute_tensor(batch(mesh.get_local_rank("dp")), mesh["tp"]);
        net->forward(x).square().mean().backward();
        for (int64_t dp = 0; dp < shape[0]; ++dp) {
          (plain->forward(batch(dp)).square().mean() / double(shape[0])).backward();
        }
        EXPECT_NEAR(clip_grad_norm_(net->parameters(), 0.1),
                    torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1), 1e-9);
        a.step();
        b.step();
      }
      const auto actual = values_of(*net), expected = values_of(*plain);
      for (size_t i = 0; i < actual.size(); ++i) {
        EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), 1e-9) << "parameter " << i;
      }
    });
  }
}

TEST(FullyShardTogether, ACapturedStepTrainsBitwiseLikeAnEagerOne) {
  for (int world : {1, 2}) {
    run_ranks(world, [&](const Group& group) {
      const NetPtr eager = make([] { return std::make_shared<Mlp>(); }),
                   net = make([] { return std::make_shared<Mlp>(); });
      shard_all(*eager);
      shard_all(*net);
      serried::AdamW a(eager->parameters(), torch::optim::AdamWOptions(0.05));
      serried::AdamW b(net->parameters(), torch::optim::AdamWOptions(0.05));
      const auto train = [](Net& each, torch::optim::Optimizer& optimizer, const at::Tensor& x) {
        optimizer.zero_grad();
        const at::Tensor loss = each.as<Mlp>()->forward(x).square().mean();
        loss.backward();
        clip_grad_norm_(each.parameters(), 0.5);
        optimizer.step();
        return loss;
      };
      auto step = capture([&](const at::Tensor& x) { return train(*net, b, x); });
      for (int i = 0; i < 10; ++i) {
        const at::Tensor x = models::values({6, 5}, i + group->getRank());
        expect_equal(step(x), train(*eager, a, x), c10::str("step ", i));
      }
      EXPECT_GE(step.replays(), 6) << step.last_recapture_reason();
      const auto actual = values_of(*net), expected = values_of(*eager);
      for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str("parameter ", i));
      for (size_t i = 0; i < actual.size(); ++i) {
        expect_equal(DTensor(net->parameters()[i].grad()).full_tensor(),
                     DTensor(eager->parameters()[i].grad()).full_tensor(), c10::str("gradient ", i));
      }
      // Eager calls after replays see what these wrote.
      const at::NoGradGuard no_grad;
      expect_equal(net->loss(3), eager->loss(3));
    });
  }
}

TEST(FullyShardTogether, CapturedAccumulationIsRefused) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = make([] { return std::make_shared<Mlp>(); });
    const FullyShardHandle handle = shard_all(*net);
    auto step = capture([&](const at::Tensor& x) {
      const auto guard = handle.no_sync();
      const at::Tensor loss = net->as<Mlp>()->forward(x).square().mean();
      loss.backward();
      return loss;
    });
    std::string text;
    for (int i = 0; i < 3 && text.empty(); ++i) {
      try {
        step(torch::ones({2, 5}));
      } catch (const c10::Error& error) {
        text = error.what_without_backtrace();
      }
    }
    EXPECT_NE(text.find("under no_sync() or set_requires_all_reduce(false)"), std::string::npos) << text;
  });
}

// Each call finds no gradients, so that only what it leaves tells.
TEST(FullyShardTogether, ACapturedCallThatLeavesGradientsForTheNextIsRefused) {
  run_ranks(2, [](const Group&) {
    const NetPtr net = make([] { return std::make_shared<Mlp>(); });
    const FullyShardHandle handle = shard_all(*net);
    const auto backward = [&](const at::Tensor& x) { net->as<Mlp>()->forward(x).square().mean().backward(); };
    auto step = capture([&](const at::Tensor& x) {
      const auto guard = handle.no_sync();
      backward(x);
    });
    std::string text;
    for (int i = 0; i < 6 && text.empty(); ++i) {
      try {
        step(torch::ones({2, 5}));
      } catch (const c10::Error& error) {
        text = error.what_without_backtrace();
      }
      backward(torch::ones({2, 5}));
    }
    EXPECT_EQ(step.replays(), 0);
    EXPECT_NE(text.find("[capture]"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace serried::testing
