// fully_shard against plain LibTorch: the same numbers, for models of every kind.
#include "serried/parallel/fsdp/fully_shard.h"

#include <gtest/gtest.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/meta.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using namespace sharded;

void expect_all_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                      const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str(what, ", parameter ", i));
}

void expect_all_within(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                       const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    ASSERT_EQ(actual[i].sizes(), expected[i].sizes());
    if (expected[i].numel() == 0) continue;
    EXPECT_LE((actual[i] - expected[i]).abs().max().item<double>(), 1e-9) << what << ", parameter " << i;
  }
}

// What one process gets on the batches of all ranks.
std::vector<at::Tensor> train_alone(Net& net, const std::vector<int64_t>& salts, int num_steps,
                                    const MakeOptimizer& make_optimizer = adamw) {
  const auto optimizer = make_optimizer(net.parameters());
  for (int step = 0; step < num_steps; ++step) {
    optimizer->zero_grad();
    at::Tensor loss = net.loss(salts[0] + 10 * step);
    for (size_t i = 1; i < salts.size(); ++i) loss = loss + net.loss(salts[i] + 10 * step);
    (loss / double(salts.size())).backward();
    optimizer->step();
  }
  return values_of(net);
}

std::vector<at::Tensor> train_sharded(Net& net, int64_t salt, int num_steps,
                                      const MakeOptimizer& make_optimizer = adamw) {
  const auto optimizer = make_optimizer(net.parameters());
  for (int step = 0; step < num_steps; ++step) {
    optimizer->zero_grad();
    net.loss(salt + 10 * step).backward();
    optimizer->step();
  }
  return values_of(net);
}

TEST(FullyShard, ParametersAreDTensorsOfGlobalSizesAndGradientsLieLikeThem) {
  run_ranks(3, [](const Group& group) {
    const NetPtr net = make([] { return std::make_shared<Mlp>(); });
    const std::vector<at::Tensor> before = values_of(*net);
    const at::Tensor weight = net->parameters()[0];
    shard_all(*net);
    ASSERT_TRUE(is_dtensor(weight));
    EXPECT_EQ(weight.sizes(), at::IntArrayRef({7, 5}));
    EXPECT_EQ(to_string(DTensor(weight).placements()), "S0");
    EXPECT_EQ(DTensor(weight.detach()).to_local().size(0), group->getRank() < 2 ? 3 : 1);
    expect_all_equal(values_of(*net), before, "after fully_shard");
    const at::Tensor loss = net->loss(1);
    EXPECT_FALSE(is_dtensor(loss));
    loss.backward();
    ASSERT_TRUE(is_dtensor(weight.grad()));
    EXPECT_EQ(weight.grad().sizes(), weight.sizes());
    EXPECT_EQ(to_string(DTensor(weight.grad()).placements()), "S0");
  });
}

TEST(FullyShard, TheSameBatchOnEachRankTrainsBitwiseLikePlain) {
  for (const NamedNet& named : all_nets()) {
    for (int world : {1, 2, 4}) {
      run_ranks(world, [&](const Group&) {
        const NetPtr plain = make(named.make), net = make(named.make);
        shard_all(*net);
        expect_all_equal(train_sharded(*net, 3, 3), train_alone(*plain, {3}, 3),
                         c10::str(named.name, " on ", world, " ranks"));
      });
    }
  }
}

TEST(FullyShard, DifferentBatchesTrainLikeOneProcessOnAllOfThem) {
  for (const NamedNet& named : all_nets()) {
    if (named.name == "Conv") continue;  // its batch norm sees each rank's batch
    for (int world : {2, 3, 4}) {
      run_ranks(world, [&](const Group& group) {
        const NetPtr plain = make(named.make, at::kDouble), net = make(named.make, at::kDouble);
        shard_all(*net);
        std::vector<int64_t> salts;
        for (int r = 0; r < world; ++r) salts.push_back(r);
        expect_all_within(train_sharded(*net, group->getRank(), 3), train_alone(*plain, salts, 3),
                          c10::str(named.name, " on ", world, " ranks"));
      });
    }
  }
}

TEST(FullyShard, EveryOptimizerTrainsOnTheParts) {
  using torch::optim::Optimizer;
  using Parameters = std::vector<at::Tensor>;
  const std::vector<std::pair<std::string, MakeOptimizer>> optimizers = {
      {"SGD",
       [](Parameters p) -> std::unique_ptr<Optimizer> {
         return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
       }},
      {"Adam",
       [](Parameters p) -> std::unique_ptr<Optimizer> {
         return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.05).amsgrad(true));
       }},
      {"Adagrad",
       [](Parameters p) -> std::unique_ptr<Optimizer> {
         return std::make_unique<torch::optim::Adagrad>(p, torch::optim::AdagradOptions(0.05));
       }},
      {"RMSprop",
       [](Parameters p) -> std::unique_ptr<Optimizer> {
         return std::make_unique<torch::optim::RMSprop>(p, torch::optim::RMSpropOptions(0.01).momentum(0.5));
       }},
      {"serried::AdamW",
       [](Parameters p) -> std::unique_ptr<Optimizer> {
         return std::make_unique<serried::AdamW>(p, torch::optim::AdamWOptions(0.05));
       }},
      {"AdamW", adamw}};
  for (const auto& [name, make_optimizer] : optimizers) {
    run_ranks(2, [&, name = name, make_optimizer = make_optimizer](const Group&) {
      const auto make_mlp = [] { return std::make_shared<Mlp>(); };
      const NetPtr plain = make(make_mlp), net = make(make_mlp);
      const FullyShardHandle handle = shard_all(*net);
      expect_all_equal(train_sharded(*net, 3, 3, make_optimizer), train_alone(*plain, {3}, 3, make_optimizer), name);
      EXPECT_EQ(handle.usage().num_gathers, 3 * 6) << name << " gathers";
    });
  }
}

TEST(FullyShard, AccumulatesWithAndWithoutNoSync) {
  for (bool no_sync : {false, true}) {
    run_ranks(3, [&](const Group& group) {
      const auto make_gpt = [] { return std::make_shared<Gpt>(); };
      const NetPtr plain = make(make_gpt, at::kDouble), net = make(make_gpt, at::kDouble);
      const FullyShardHandle handle = shard_all(*net);
      for (int step = 0; step < 2; ++step) {
        for (int micro = 0; micro < 3; ++micro) {
          const auto guard = handle.no_sync(no_sync && micro < 2);
          CommDebugMode comm;
          net->loss(group->getRank() + 7 * micro).backward();
          EXPECT_EQ(comm.count("reduce_scatter"), no_sync && micro < 2 ? 0 : 4);
          for (int r = 0; r < 3; ++r) (plain->loss(r + 7 * micro) / 3).backward();
        }
      }
      for (size_t i = 0; i < plain->parameters().size(); ++i) {
        const at::Tensor expected = plain->parameters()[i].grad();
        const at::Tensor actual = DTensor(net->parameters()[i].grad()).full_tensor();
        EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-9) << "parameter " << i;
      }
    });
  }
}

// What only earlier backwards reached is reduced by the next one that reduces.
TEST(FullyShard, KeptGradientsOfBlocksThatTheLastBackwardDoesNotReachAreReduced) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear a = seeded(1, [] { return torch::nn::Linear(3, 2); }),
                      b = seeded(2, [] { return torch::nn::Linear(3, 2); });
    struct Pair : torch::nn::Module {};
    auto both = std::make_shared<Pair>();
    both->register_module("a", a);
    both->register_module("b", b);
    fully_shard(*a);
    fully_shard(*b);
    const FullyShardHandle handle = fully_shard(*both);
    const at::Tensor x = torch::ones({1, 3}) * (group->getRank() + 1);
    {
      const auto guard = handle.no_sync();
      a(x).sum().backward();
      EXPECT_FALSE(a->weight.grad().defined());
    }
    b(x).sum().backward();
    for (const auto& layer : {a, b}) {
      ASSERT_TRUE(layer->weight.grad().defined());
      expect_equal(DTensor(layer->weight.grad()).full_tensor(), torch::full({2, 3}, 1.5f));
    }
  });
}

TEST(FullyShard, FrozenParametersStayAndMayBeThawed) {
  run_ranks(2, [](const Group&) {
    const auto make_mlp = [] { return std::make_shared<Mlp>(); };
    const NetPtr plain = make(make_mlp), net = make(make_mlp);
    shard_all(*net);
    for (Net* each : {plain.get(), net.get()}) {
      for (const auto& item : each->named_parameters()) item.value().requires_grad_(item.key() != "second.weight");
      for (const at::Tensor& p : each->layers()[0]->parameters()) p.requires_grad_(false);
    }
    expect_all_equal(train_sharded(*net, 3, 2), train_alone(*plain, {3}, 2), "frozen");
    EXPECT_FALSE(net->parameters()[0].grad().defined());
    for (Net* each : {plain.get(), net.get()}) {
      for (const at::Tensor& p : each->parameters()) p.requires_grad_(true);
    }
    expect_all_equal(train_sharded(*net, 3, 2), train_alone(*plain, {3}, 2), "thawed");
    EXPECT_TRUE(is_dtensor(net->parameters()[0].grad()));
  });
}

struct TwoWays : torch::nn::Module {
  torch::nn::Linear left{nullptr}, right{nullptr};
  TwoWays() {
    left = register_module("left", torch::nn::Linear(3, 5));
    right = register_module("right", torch::nn::Linear(3, 5));
  }
};

TEST(FullyShard, AParameterThatNoRankUsesGetsNoGradientAndOneThatSomeUseGetsTheAverage) {
  run_ranks(3, [](const Group& group) {
    const auto net = seeded(1, [] { return std::make_shared<TwoWays>(); });
    fully_shard(*net);
    const at::Tensor x = torch::ones({1, 3});
    net->left(x).sum().backward();
    EXPECT_FALSE(net->right->weight.grad().defined());
    expect_close(DTensor(net->left->weight.grad()).full_tensor(), torch::ones({5, 3}));
    net->zero_grad();
    at::Tensor y = net->left(x).sum();
    if (group->getRank() == 1) y = y + net->right(3 * x).sum();
    y.backward();
    ASSERT_TRUE(net->right->weight.grad().defined()) << "rank " << group->getRank();
    expect_close(DTensor(net->right->weight.grad()).full_tensor(), torch::ones({5, 3}));
    expect_close(DTensor(net->right->bias.grad()).full_tensor(), torch::full({5}, 1 / 3.f));
  });
}

TEST(FullyShard, EvaluatesWithoutGradientsAndInInferenceModeAndThenTrains) {
  for (const NamedNet& named : all_nets()) {
    run_ranks(2, [&](const Group&) {
      const NetPtr plain = make(named.make), net = make(named.make);
      shard_all(*net);
      plain->eval();
      net->eval();
      for (int i = 0; i < 2; ++i) {
        {
          const c10::InferenceMode inference;
          expect_equal(net->loss(5), plain->loss(5), named.name + " in InferenceMode");
        }
        {
          const at::NoGradGuard no_grad;
          expect_equal(net->loss(5), plain->loss(5), named.name + " without gradients");
        }
        plain->train();
        net->train();
        expect_all_equal(train_sharded(*net, 3, 2), train_alone(*plain, {3}, 2), named.name);
      }
    });
  }
}

TEST(FullyShard, ClipsByTheNormOfAllGradients) {
  run_ranks(4, [](const Group&) {
    const auto make_gpt = [] { return std::make_shared<Gpt>(); };
    const NetPtr plain = make(make_gpt, at::kDouble), net = make(make_gpt, at::kDouble);
    shard_all(*net);
    const auto a = adamw(net->parameters()), b = adamw(plain->parameters());
    for (int step = 0; step < 20; ++step) {
      a->zero_grad();
      b->zero_grad();
      net->loss(step).backward();
      plain->loss(step).backward();
      const double norm = clip_grad_norm_(net->parameters(), 0.5);
      const double expected = torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.5);
      EXPECT_NEAR(norm, expected, 1e-9);
      a->step();
      b->step();
    }
    expect_all_within(values_of(*net), values_of(*plain), "after 20 clipped steps");
  });
}

struct Odd : torch::nn::Module {
  at::Tensor scale, matrix, empty, vector;
  Odd() {
    scale = register_parameter("scale", torch::full({}, 1.5, at::kDouble));
    matrix = register_parameter("matrix", models::values({3, 5}, 1));
    empty = register_parameter("empty", torch::zeros({0, 4}, at::kDouble));
    vector = register_parameter("vector", models::values({5}, 2));
  }
  at::Tensor loss(int64_t salt) {
    const at::Tensor x = models::values({4, 3}, salt).to(at::kDouble);
    return ((x.mm(matrix) * scale + vector).square().mean() + 0.1 * matrix.square().sum() + empty.sum() +
            (vector * scale).pow(2).sum());
  }
};

TEST(FullyShard, NumbersOtherDimsEmptyParametersAndPenalties) {
  for (int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](const Group& group) {
      Odd plain, net;
      for (Odd* each : {&plain, &net}) each->to(at::kDouble);
      fully_shard(net, {.shard_placement_fn = [](const at::Tensor& p) -> std::optional<Placement> {
                    return p.dim() == 2 && p.size(0) == 3 ? std::optional<Placement>(Shard(1)) : std::nullopt;
                  }});
      EXPECT_EQ(to_string(DTensor(net.matrix).placements()), "S1");
      EXPECT_EQ(to_string(DTensor(net.scale).placements()), "R");
      torch::optim::SGD a(net.parameters(), 0.1), b(plain.parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        a.zero_grad();
        b.zero_grad();
        net.loss(group->getRank() + 10 * step).backward();
        for (int r = 0; r < world; ++r) (plain.loss(r + 10 * step) / world).backward();
        a.step();
        b.step();
      }
      expect_all_within(values_of(net), values_of(plain), c10::str(world, " ranks"));
    });
  }
}

TEST(FullyShard, IgnoredParametersStayPlain) {
  run_ranks(2, [](const Group&) {
    const auto net = seeded(1, [] { return std::make_shared<TwoWays>(); });
    fully_shard(*net, {.ignored_params = {net->right->weight, net->right->bias}});
    EXPECT_TRUE(is_dtensor(net->left->weight));
    EXPECT_FALSE(is_dtensor(net->right->weight));
    (net->left(torch::ones({1, 3})) + net->right(torch::ones({1, 3}))).sum().backward();
    EXPECT_TRUE(is_dtensor(net->left->weight.grad()));
    EXPECT_FALSE(is_dtensor(net->right->weight.grad()));
  });
}

TEST(FullyShard, BackwardTowardsChosenTensors) {
  run_ranks(2, [](const Group& group) {
    const auto net = seeded(1, [] { return std::make_shared<TwoWays>(); });
    fully_shard(*net);
    const at::Tensor x = torch::full({1, 3}, float(group->getRank() + 1));
    // This rank's own, whole, and nobody's .grad changes.
    const auto own = torch::autograd::grad({net->left(x).sum()}, {net->left->weight});
    EXPECT_FALSE(is_dtensor(own[0]));
    expect_equal(own[0], torch::full({5, 3}, float(group->getRank() + 1)));
    EXPECT_FALSE(net->left->weight.grad().defined());
    at::Tensor y = net->left(x).sum();
    y.backward({}, std::nullopt, false, std::vector<at::Tensor>{net->left->weight});
    expect_equal(DTensor(net->left->weight.grad()).full_tensor(), torch::full({5, 3}, 1.5f));
    EXPECT_FALSE(net->left->bias.grad().defined());
  });
}

TEST(FullyShard, AFailedBackwardLeavesNothingBehind) {
  run_ranks(2, [](const Group&) {
    const auto make_mlp = [] { return std::make_shared<Mlp>(); };
    const NetPtr plain = make(make_mlp), net = make(make_mlp);
    const FullyShardHandle handle = shard_all(*net);
    {
      const at::Tensor first = net->as<Mlp>()->first(torch::ones({2, 5}));
      first.register_hook([](const at::Tensor& g) -> at::Tensor { throw std::runtime_error("no more"); });
      at::Tensor y = net->as<Mlp>()->second(first).sum();
      EXPECT_THROW(y.backward(), std::runtime_error);
    }
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    EXPECT_EQ(handle.usage().gradient_bytes, 0);
    net->zero_grad();
    expect_all_equal(train_sharded(*net, 3, 2), train_alone(*plain, {3}, 2), "after a failure");
  });
}

TEST(FullyShard, AWriteBetweenForwardAndBackwardRaisesAsItDoesPlain) {
  run_ranks(2, [](const Group&) {
    const auto net = seeded(1, [] { return std::make_shared<TwoWays>(); });
    fully_shard(*net);
    at::Tensor y = net->left(torch::ones({1, 3}, at::requires_grad())).sum();
    {
      const at::NoGradGuard no_grad;
      net->left->weight.mul_(2);
    }
    EXPECT_NE(error_text<c10::Error>([&] { y.backward(); }).find("modified by an inplace operation"),
              std::string::npos);
  });
}

TEST(FullyShard, WritesThroughPartsAreSeenByTheNextUse) {
  run_ranks(2, [](const Group&) {
    torch::nn::Linear layer = seeded(1, [] { return torch::nn::Linear(3, 5); });
    const FullyShardHandle handle = fully_shard(*layer);
    const at::Tensor x = torch::ones({1, 3});
    const at::NoGradGuard no_grad;
    handle.unshard();
    layer(x);
    DTensor(layer->weight).to_local().fill_(2);
    layer->bias.zero_();
    expect_equal(layer(x), torch::full({1, 5}, 6.f));
    layer->weight.data().mul_(2);
    expect_equal(layer(x), torch::full({1, 5}, 12.f));
    handle.reshard();
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
  });
}

// Each function on a whole plain tensor and on a sharded parameter.
TEST(FullyShard, OpsAndViewsOfAParameterGiveWhatTheyGiveOnPlainTensors) {
  using Fn = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<std::pair<std::string, Fn>> functions = {
      {"t", [](const at::Tensor& w) { return w.t() * 1; }},
      {"select", [](const at::Tensor& w) { return w.select(0, 3) + 1; }},
      {"slice", [](const at::Tensor& w) { return w.slice(0, 1, 6, 2).sum(1); }},
      {"split", [](const at::Tensor& w) { return w.split(3)[1].matmul(torch::ones({4}, w.scalar_type())); }},
      {"chunk of t", [](const at::Tensor& w) { return w.t().chunk(2)[1].sum(0); }},
      {"unbind", [](const at::Tensor& w) { return w.unbind(1)[2] * 2; }},
      {"view",
       [](const at::Tensor& w) {
         return w.view({4, 7}).sum(0);
       }},
      {"reshape of t", [](const at::Tensor& w) { return w.t().reshape({-1}) * 1; }},
      {"contiguous of t", [](const at::Tensor& w) { return w.t().contiguous(); }},
      {"expand",
       [](const at::Tensor& w) {
         return w.unsqueeze(0).expand({2, 7, 4}).clone();
       }},
      {"cat",
       [](const at::Tensor& w) {
         return at::cat({w, torch::ones({1, 4}, w.scalar_type())});
       }},
      {"stack of views",
       [](const at::Tensor& w) {
         return at::stack({w[0], w[6], w.t().select(1, 2)});
       }},
      {"index",
       [](const at::Tensor& w) {
         return w.index({torch::tensor({0, 2})});
       }},
      {"sum", [](const at::Tensor& w) { return w.sum(0) + torch::ones({4}, w.scalar_type()); }},
      {"where", [](const at::Tensor& w) { return torch::where(w > 0, w, -w) * 1; }},
      {"to",
       [](const at::Tensor& w) {
         return w.to(at::kFloat).to(w.scalar_type()) + torch::zeros({7, 4}, at::kDouble);
       }},
      {"mm with itself", [](const at::Tensor& w) { return w.mm(w.t()); }},
      {"norm", [](const at::Tensor& w) { return w / w.norm(2, {1}, true); }},
      {"square times a number", [](const at::Tensor& w) { return (w.square() * torch::tensor(2.0)).sum(); }},
      {"normed rows, used",
       [](const at::Tensor& w) {
         return torch::ones({2, 4}, at::kDouble).mm((w / w.norm(2, {1}, true)).t());
       }},
      {"softmax", [](const at::Tensor& w) { return w.softmax(0) * 1; }},
      {"max", [](const at::Tensor& w) { return std::get<0>(w.max(0)); }},
      {"pow", [](const at::Tensor& w) { return w.pow(3).sum() * 1; }},
      {"diagonal", [](const at::Tensor& w) { return w.diagonal().clone(); }},
      {"as_strided",
       [](const at::Tensor& w) {
         return w.as_strided({3, 2}, {4, 1}, 2) * 1;
       }},
      {"zeros_like",
       [](const at::Tensor& w) {
         return torch::zeros_like(w) + torch::ones({7, 4}, at::kDouble) * w;
       }},
  };
  run_ranks(3, [&](const Group& group) {
    const at::Tensor value = models::values({7, 4}, 3).to(at::kDouble);
    struct One : torch::nn::Module {
      at::Tensor w;
    } net;
    net.w = net.register_parameter("w", value.clone());
    fully_shard(net);
    for (const auto& [name, fn] : functions) {
      const at::Tensor plain = value.clone().requires_grad_();
      const at::Tensor expected = fn(plain), actual = fn(net.w);
      const at::Tensor result = is_dtensor(actual) ? DTensor(actual.detach()).full_tensor() : actual;
      EXPECT_LE((result - expected).abs().max().item<double>(), 1e-12) << name;
      ASSERT_EQ(is_dtensor(actual), false) << name;
      (expected.sum() * (group->getRank() + 1)).backward();
      (actual.sum() * (group->getRank() + 1)).backward();
      const at::Tensor grad = plain.grad() / (group->getRank() + 1) * 2;
      EXPECT_LE((DTensor(net.w.grad()).full_tensor() - grad).abs().max().item<double>(), 1e-12) << name;
      net.zero_grad();
      const at::NoGradGuard no_grad;
      const at::Tensor without = fn(net.w);
      const at::Tensor whole = is_dtensor(without) ? DTensor(without).full_tensor() : without;
      EXPECT_LE((whole - expected).abs().max().item<double>(), 1e-12) << name << " without gradients";
    }
  });
}

TEST(FullyShard, ParametersAreWrittenAsPlainOnesAre) {
  using Fn = std::function<void(const at::Tensor&)>;
  const std::vector<std::pair<std::string, Fn>> functions = {
      {"fill_", [](const at::Tensor& w) { w.fill_(3); }},
      {"copy_",
       [](const at::Tensor& w) {
         w.copy_(models::values({7, 4}, 9));
       }},
      {"copy_ of a row", [](const at::Tensor& w) { w.copy_(models::values({4}, 9)); }},
      {"add_ plain",
       [](const at::Tensor& w) {
         w.add_(models::values({7, 4}, 9).to(at::kDouble), 2);
       }},
      {"mul_ of a number", [](const at::Tensor& w) { w.mul_(torch::tensor(2.5, at::kDouble)); }},
      {"row", [](const at::Tensor& w) { w[3].zero_(); }},
      {"column", [](const at::Tensor& w) { w.select(1, 2).fill_(5); }},
      {"t", [](const at::Tensor& w) { w.t().mul_(models::values({7}, 2).to(at::kDouble)); }},
      {"index_put_",
       [](const at::Tensor& w) {
         w.index_put_({torch::tensor({1, 5})}, torch::ones({4}, at::kDouble));
       }},
      {"masked_fill_", [](const at::Tensor& w) { w.masked_fill_(w > 0, -1); }},
      {"uniform", [](const at::Tensor& w) { torch::nn::init::constant_(w, 0.5); }},
  };
  run_ranks(3, [&](const Group&) {
    const at::NoGradGuard no_grad;
    struct One : torch::nn::Module {
      at::Tensor w;
    } net;
    net.w = net.register_parameter("w", models::values({7, 4}, 3).to(at::kDouble));
    at::Tensor plain = models::values({7, 4}, 3).to(at::kDouble);
    fully_shard(net);
    for (const auto& [name, fn] : functions) {
      (net.w * torch::ones({7, 4}, at::kDouble)).sum();  // gathered before
      fn(plain);
      fn(net.w);
      expect_close(DTensor(net.w).full_tensor(), plain, name);
      expect_close(net.w * torch::ones({7, 4}, at::kDouble), plain, name);
    }
  });
}

}  // namespace
}  // namespace serried::testing
