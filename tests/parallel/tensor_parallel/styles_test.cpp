// Styles on a stock GPT and on single modules: values, gradients, placements and the exact number of collectives.
#include "serried/parallel/tensor_parallel/styles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/constrain.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/tensor_parallel/gpt.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using gpt::Batch;
using gpt::Gpt;
using gpt::GptOptions;
using ::testing::ElementsAre;
using ::testing::Pair;
using Counts = std::map<std::string, int64_t>;

DTensor replicated(const at::Tensor& t, const DeviceMesh& mesh) {
  return DTensor::from_local(t, mesh, {Replicate()});
}

// One step against one process: loss and gradients.
void expect_one_step(const DeviceMesh& mesh, const GptOptions& options, const ParallelPlan& plan) {
  Gpt whole = gpt::make_gpt(options);
  Gpt net = gpt::make_gpt(options);
  parallelize_module(*net, mesh, plan);
  const Batch batch = gpt::batch_of(0);
  const double expected = gpt::train_once(whole, batch);
  const at::Tensor loss = gpt::loss_of(net(batch.ids), replicated(batch.targets, mesh));
  loss.backward();
  EXPECT_NEAR(full(loss).item<double>(), expected, 1e-9);
  gpt::expect_gradients_of(*whole, *net);
}

TEST(Styles, AStockGptTrainsAsOneProcessDoes) {
  for (int64_t ranks : {1, 2, 3, 4}) {
    on_mesh({ranks}, [](const DeviceMesh& mesh) {
      expect_one_step(mesh, {}, gpt::tensor_plan());
      expect_one_step(mesh, {}, gpt::sequence_plan());
    });
  }
}

TEST(Styles, FusedProjectionsTrainAsOneProcessDoes) {
  const GptOptions fused{.fused = true};
  for (int64_t ranks : {1, 2, 3, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      expect_one_step(mesh, fused, gpt::tensor_plan(fused));
      expect_one_step(mesh, fused, gpt::sequence_plan(fused));
    });
  }
}

TEST(Styles, GroupedQueriesTrainAsOneProcessDoes) {
  const GptOptions grouped{.width = 24, .heads = 6, .kv_heads = 3};
  for (int64_t ranks : {1, 2, 3, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) { expect_one_step(mesh, grouped, gpt::tensor_plan(grouped)); });
  }
}

TEST(Styles, ATableThatIsTheHeadHasTwoRoles) {
  const GptOptions tied{.tied = true};
  for (int64_t ranks : {1, 2, 3}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      expect_one_step(mesh, tied, gpt::tensor_plan(tied));
      expect_one_step(mesh, tied, gpt::sequence_plan(tied));
    });
  }
}

struct Traffic {
  Counts forward, backward;
};

// Of a step whose loss is parallel: two and one all-reduce of that are its own.
Traffic traffic_of(const DeviceMesh& mesh, const GptOptions& options, const ParallelPlan& plan) {
  Gpt net = gpt::make_gpt(options);
  parallelize_module(*net, mesh, plan);
  const Batch batch = gpt::batch_of(0);
  const at::Tensor targets = replicated(batch.targets, mesh);
  Traffic traffic;
  at::Tensor logits;
  {
    const CommDebugMode comm;
    logits = net(batch.ids);
    traffic.forward = comm.counts();
  }
  const at::Tensor loss = gpt::loss_of(logits, targets);
  const CommDebugMode comm;
  loss.backward();
  traffic.backward = comm.counts();
  return traffic;
}

TEST(Styles, TensorParallelReducesTwicePerBlockEachWayAndOnce) {
  for (bool fused : {false, true}) {
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      for (int64_t layers : {1, 2, 3}) {
        const GptOptions options{.layers = layers, .fused = fused};
        const Traffic traffic = traffic_of(mesh, options, gpt::tensor_plan(options));
        EXPECT_EQ(traffic.forward, (Counts{{"all_reduce", 2 * layers + 1}}));
        EXPECT_EQ(traffic.backward, (Counts{{"all_reduce", 2 * layers + 1 + 1}})) << "the last is the loss's";
      }
    });
  }
}

TEST(Styles, SequenceParallelGathersAndScattersAsOftenAndJoinsTheGradientsOfNorms) {
  for (bool fused : {false, true}) {
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      for (int64_t layers : {1, 2, 3}) {
        const GptOptions options{.layers = layers, .fused = fused};
        const Traffic traffic = traffic_of(mesh, options, gpt::sequence_plan(options));
        const int64_t moves = 2 * layers + 1;
        EXPECT_EQ(traffic.forward, (Counts{{"all_gather", moves}, {"reduce_scatter", moves}}));
        EXPECT_EQ(traffic.backward, (Counts{{"all_gather", moves}, {"all_reduce", 2}, {"reduce_scatter", moves}}))
            << "one all-reduce is the loss's, one that of all replicated parameters";
      }
    });
  }
}

TEST(Styles, FusedProjectionsComeApartWithoutMovingAnything) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor whole = seeded(5, [] { return torch::randn({2, 3, 12}, at::kDouble); });
    const at::Tensor weights = seeded(6, [] { return torch::randn({3, 2, 3, 4}, at::kDouble); });
    using Pieces = std::vector<at::Tensor>;
    const std::map<std::string, std::function<Pieces(const at::Tensor&)>> ways = {
        {"split", [](const at::Tensor& x) { return x.split(4, 2); }},
        {"split of sizes",
         [](const at::Tensor& x) {
           return x.split_with_sizes({4, 4, 4}, -1);
         }},
        {"chunk", [](const at::Tensor& x) { return x.chunk(3, -1); }},
        {"tensor_split", [](const at::Tensor& x) { return x.tensor_split(3, 2); }},
        {"slice",
         [](const at::Tensor& x) {
           return Pieces{x.slice(2, 0, 4), x.slice(2, 4, 8), x.slice(-1, -4)};
         }},
        {"narrow",
         [](const at::Tensor& x) {
           return Pieces{x.narrow(2, 0, 4), x.narrow(2, 4, 4), x.narrow(-1, 8, 4)};
         }},
        {"view", [](const at::Tensor& x) {
           return x.view({2, 3, 3, 4}).unbind(2);
         }}};
    for (const auto& [name, way] : ways) {
      const at::Tensor leaf = whole.clone().requires_grad_();
      const at::Tensor x = place(whole, mesh, {StridedShard(2, 3)}).detach().requires_grad_();
      at::Tensor expected = at::zeros({}, at::kDouble), loss;
      for (size_t i = 0; i < 3; ++i) expected = expected + (way(leaf)[i] * weights[int64_t(i)]).square().sum();
      expected.backward();
      const CommDebugMode comm;
      const Pieces pieces = way(x);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(DTensor(pieces[i]).placements(), (Placements{Shard(2)})) << name;
        const at::Tensor part = (pieces[i] * place(weights[int64_t(i)], mesh, {Shard(2)})).square().sum();
        loss = loss.defined() ? loss + part : part;
      }
      loss.backward();
      EXPECT_EQ(comm.counts(), Counts{}) << name << comm.report();
      EXPECT_EQ(to_string(DTensor(x.grad()).placements()), "S2/3") << name;
      expect_close(full(x.grad()), leaf.grad(), name);
    }
  });
}

TEST(Styles, FusedProjectionsThatDoNotDivideAreGatheredAndRight) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    torch::nn::Linear whole = seeded(3, [] { return torch::nn::Linear(4, 15); });
    torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(4, 15); });
    whole->to(at::kDouble);
    net->to(at::kDouble);
    parallelize_module(*net, mesh, {{"", ColwiseParallel({.fused = 3})}});
    EXPECT_EQ(to_string(DTensor(net->weight).placements()), "S0/3");
    const at::Tensor x = seeded(4, [] { return torch::randn({2, 3, 4}, at::kDouble); });
    const auto loss = [](const at::Tensor& y) {
      const std::vector<at::Tensor> parts = y.split(5, 2);
      return (parts[0] * parts[1] + parts[2].exp()).sum();
    };
    loss(whole(x)).backward();
    loss(net(x)).backward();
    gpt::expect_gradients_of(*whole, *net);
  });
}

TEST(Styles, GroupedQueriesMoveNothingWhereRanksDivideBothHeadCounts) {
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const GptOptions grouped{.layers = 1, .heads = 6, .kv_heads = 3};
    const Traffic traffic = traffic_of(mesh, grouped, gpt::tensor_plan(grouped));
    EXPECT_EQ(traffic.forward, (Counts{{"all_reduce", 3}}));
    EXPECT_EQ(traffic.backward, (Counts{{"all_reduce", 4}}));
  });
}

TEST(Styles, AModuleWithoutAStyleTakesPlainInputsAsReplicated) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    torch::nn::Sequential net(torch::nn::Linear(6, 4), torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
    net->to(at::kDouble);
    parallelize_module(*net, mesh, {});
    const at::Tensor y = net->forward(at::ones({2, 6}, at::kDouble));
    EXPECT_EQ(DTensor(y).placements(), (Placements{Replicate()}));
  });
}

TEST(Styles, LinearTakesAPlainTensorInTheLayoutOfItsStyle) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const auto make = [] {
      torch::nn::Linear linear = seeded(3, [] { return torch::nn::Linear(7, 5); });
      linear->to(at::kDouble);
      return linear;
    };
    const at::Tensor x = seeded(4, [] { return torch::randn({3, 7}, at::kDouble); });
    torch::nn::Linear whole = make();
    const at::Tensor leaf = x.clone().requires_grad_();
    const at::Tensor expected = whole(leaf);
    expected.square().sum().backward();
    {
      torch::nn::Linear linear = make();
      parallelize_module(*linear, mesh, {{"", ColwiseParallel()}});
      const at::Tensor mine = x.clone().requires_grad_();
      const at::Tensor y = linear(mine);
      EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(1)}));
      expect_close(full(y), expected);
      full(y.square().sum()).backward();
      expect_close(mine.grad(), leaf.grad());
    }
    {
      torch::nn::Linear linear = make();
      parallelize_module(*linear, mesh, {{"", RowwiseParallel()}});
      const int64_t begin = mesh.get_local_rank() == 0 ? 0 : 4, size = mesh.get_local_rank() == 0 ? 4 : 3;
      const at::Tensor mine = x.narrow(1, begin, size).clone().requires_grad_();
      const at::Tensor y = linear(mine);
      EXPECT_EQ(DTensor(y).placements(), (Placements{Replicate()}));
      expect_close(full(y), expected);
      full(y.square().sum()).backward();
      expect_close(mine.grad(), leaf.grad().narrow(1, begin, size));
    }
  });
}

TEST(Styles, OutputsLieAsAsked) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = seeded(4, [] { return torch::randn({2, 3, 6}, at::kDouble); });
    torch::nn::Linear whole = seeded(3, [] { return torch::nn::Linear(6, 5); });
    whole->to(at::kDouble);
    const at::Tensor expected = whole(x);
    for (const Placement& output : {Replicate(), Shard(0), Shard(1), Shard(2), Shard(-1)}) {
      for (const ParallelStyle& style :
           std::vector<ParallelStyle>{ColwiseParallel({.output = {output}}), RowwiseParallel({.output = {output}})}) {
        torch::nn::Linear linear = seeded(3, [] { return torch::nn::Linear(6, 5); });
        linear->to(at::kDouble);
        parallelize_module(*linear, mesh, {{"", style}});
        const at::Tensor y = linear(replicated(x, mesh));
        EXPECT_EQ(DTensor(y).placements(), checked_placements("", {output}, 3, 1));
        expect_close(full(y), expected);
      }
    }
  });
}

TEST(Styles, TwoDimensionalInputsWorkToo) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    torch::nn::Sequential whole = seeded(
        3, [] { return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::ReLU(), torch::nn::Linear(7, 4)); });
    torch::nn::Sequential net = seeded(
        3, [] { return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::ReLU(), torch::nn::Linear(7, 4)); });
    whole->to(at::kDouble);
    net->to(at::kDouble);
    parallelize_module(*net, mesh, {{"0", ColwiseParallel()}, {"2", RowwiseParallel()}});
    const at::Tensor x = seeded(4, [] { return torch::randn({3, 5}, at::kDouble); });
    whole->forward(x).square().sum().backward();
    const CommDebugMode comm;
    net->forward(x).square().sum().backward();
    gpt::expect_gradients_of(*whole, *net);
    EXPECT_LE(comm.count("all_reduce"), 1 + 8) << "reading the gradients counts";
  });
}

TEST(Styles, EmbeddingsAreCutByColumnsAndByRows) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor ids = torch::tensor({{0, 3, 6}, {5, 5, 1}}, at::kLong);
    for (const bool by_rows : {false, true}) {
      torch::nn::Embedding whole = seeded(3, [] { return torch::nn::Embedding(7, 5); });
      torch::nn::Embedding table = seeded(3, [] { return torch::nn::Embedding(7, 5); });
      whole->to(at::kDouble);
      table->to(at::kDouble);
      const ParallelStyle style = by_rows ? ParallelStyle(RowwiseParallel()) : ParallelStyle(ColwiseParallel());
      parallelize_module(*table, mesh, {{"", style}});
      const at::Tensor y = table(ids);
      EXPECT_EQ(DTensor(y).placements(), (Placements{by_rows ? Replicate() : Shard(2)}));
      expect_close(full(y), whole(ids));
      y.square().sum().backward();
      whole(ids).square().sum().backward();
      gpt::expect_gradients_of(*whole, *table);
    }
  });
}

TEST(Styles, NormsKeepTheTokensCut) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = seeded(4, [] { return torch::randn({2, 5, 6}, at::kDouble); });
    torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({6})), whole(torch::nn::LayerNormOptions({6}));
    norm->to(at::kDouble);
    whole->to(at::kDouble);
    parallelize_module(*norm, mesh, {{"", SequenceParallel()}});
    const at::Tensor y = norm(replicated(x, mesh));
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(1)}));
    y.square().sum().backward();
    whole(x).square().sum().backward();
    gpt::expect_gradients_of(*whole, *norm);

    torch::nn::GroupNorm groups(torch::nn::GroupNormOptions(3, 6)), whole_groups(torch::nn::GroupNormOptions(3, 6));
    groups->to(at::kDouble);
    whole_groups->to(at::kDouble);
    const at::Tensor image = seeded(4, [] { return torch::randn({3, 6, 4}, at::kDouble); });
    parallelize_module(*groups, mesh, {{"", SequenceParallel({.dim = 0})}});
    const at::Tensor z = groups(replicated(image, mesh));
    EXPECT_EQ(DTensor(z).placements(), (Placements{Shard(0)}));
    z.pow(3).sum().backward();
    whole_groups(image).pow(3).sum().backward();
    gpt::expect_gradients_of(*whole_groups, *groups);
  });
}

TEST(Styles, QueriesKeysAndValuesShareOneGather) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    struct Three : torch::nn::Module {
      Three() {
        for (const char* name : {"q", "k", "v"}) parts.push_back(register_module(name, torch::nn::Linear(4, 6)));
      }
      std::vector<torch::nn::Linear> parts;
    } net;
    parallelize_module(net, mesh, {{"[qkv]", ColwiseParallel()}});
    const at::Tensor x = place(torch::rand({2, 4, 4}), mesh, {Shard(1)}).detach().requires_grad_();
    for (const bool recorded : {true, false}) {
      const at::AutoGradMode mode(recorded);
      const CommDebugMode comm;
      for (torch::nn::Linear& part : net.parts) part(x);
      EXPECT_EQ(comm.counts(), (Counts{{"all_gather", 1}})) << recorded;
    }
    {
      const CommDebugMode comm;
      net.parts[0](x);
      {
        const at::NoGradGuard no_grad;
        x.add_(1);
      }
      net.parts[1](x);
      EXPECT_EQ(comm.counts(), (Counts{{"all_gather", 2}})) << "what was written since is gathered again";
    }
    const c10::InferenceMode inference;
    const at::Tensor unseen = x + 1;
    const at::Tensor before = full(net.parts[0](unseen));
    unseen.add_(1);
    EXPECT_FALSE(at::equal(before, full(net.parts[0](unseen)))) << "writes to inference tensors leave no trace";
  });
}

TEST(Styles, AUsersStyleIsAValueToo) {
  struct CutBias {
    void apply(torch::nn::Module& module, const DeviceMesh& mesh) const {
      distribute_parameter(module.as<torch::nn::Linear>()->bias, mesh, {Shard(0)});
    }
  };
  on_mesh({2}, [](const DeviceMesh& mesh) {
    torch::nn::Sequential net(torch::nn::Linear(4, 6));
    parallelize_module(*net, mesh, {{"0", CutBias()}});
    EXPECT_EQ(DTensor(net->ptr<torch::nn::LinearImpl>(0)->bias).placements(), (Placements{Shard(0)}));
    EXPECT_EQ(DTensor(net->ptr<torch::nn::LinearImpl>(0)->weight).placements(), (Placements{Replicate()}));
    EXPECT_NO_THROW(net->forward(at::ones({2, 4})));
  });
}

TEST(Styles, PrepareSaysWhatStylesLeaveOpen) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    torch::nn::Sequential net(torch::nn::Linear(4, 6), torch::nn::ReLU(), torch::nn::Linear(6, 4));
    parallelize_module(*net, mesh,
                       {{"", PrepareModuleInput({.desired = {Shard(0)}})},
                        {"2", PrepareModuleOutput({.desired = {Replicate()}})},
                        {"0", ColwiseParallel()}});
    const at::Tensor y = net->ptr<torch::nn::LinearImpl>(0)->forward(replicated(at::ones({4, 4}), mesh));
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(1)})) << "its style asks for a replicated input";
    const CommDebugMode comm;
    const at::Tensor z = net->ptr<torch::nn::LinearImpl>(2)->forward(y);
    EXPECT_EQ(DTensor(z).placements(), (Placements{Replicate()}));
    EXPECT_EQ(comm.counts(), (Counts{{"all_gather", 1}, {"all_to_all", 1}}));
  });
}

TEST(Constrain, BringsADTensorThereAndLetsPlainTensorsPass) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = at::ones({3, 4});
    EXPECT_TRUE(constrain(plain, {Shard(1)}).is_same(plain));
    EXPECT_FALSE(constrain(at::Tensor(), {Shard(1)}).defined());
    const at::Tensor x = place(torch::rand({3, 4}, at::kDouble), mesh, {Shard(0)}).detach().requires_grad_();
    const at::Tensor y = constrain(x, {Shard(-1)});
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(1)}));
    expect_equal(full(y.detach()), full(x.detach()));
    y.square().sum().backward();
    EXPECT_EQ(DTensor(x.grad()).placements(), (Placements{Shard(0)}));
    expect_close(full(x.grad()), 2 * full(x.detach()));
    EXPECT_THROW(constrain(x, {Shard(2)}), c10::IndexError);
    EXPECT_THROW(constrain(x, {Shard(0), Shard(1)}), c10::ValueError);
  });
}

TEST(Constrain, SumsUpTheGradientsOfAllConsumersOnce) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = place(torch::rand({4, 6}, at::kDouble), mesh, {Shard(1)});
    const at::Tensor x = place(torch::rand({3, 4}, at::kDouble), mesh, {Replicate()}).detach().requires_grad_();
    const at::Tensor y = constrain(x, {Replicate()});
    const at::Tensor loss = (y.mm(w).square() + y.mm(w).exp()).sum();
    const CommDebugMode comm;
    loss.backward();
    EXPECT_EQ(comm.counts(), (Counts{{"all_reduce", 1}}));
    EXPECT_EQ(DTensor(x.grad()).placements(), (Placements{Replicate()}));
  });
}

TEST(Styles, EmbeddingsWithMaxNormTakePlainIds) {
  for (const bool by_rows : {true, false}) {
    on_mesh({3}, [&](const DeviceMesh& mesh) {
      const auto make_table = [] {
        return seeded(2, [] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(7, 5).max_norm(0.9)); });
      };
      torch::nn::Embedding table = make_table(), whole = make_table();
      parallelize_module(*table, mesh, {{"", by_rows ? ParallelStyle(RowwiseParallel()) : ColwiseParallel()}});
      const at::Tensor ids = at::tensor({6, 1, 1, 3}, at::kLong);
      EXPECT_TRUE(at::allclose(full(table(ids)), whole(ids)));
      EXPECT_TRUE(at::allclose(full(table->weight), whole->weight));
    });
  }
}

TEST(Styles, HooksOfUsersSeeGradientsOfNormsSummedUp) {
  for (const bool is_sharded : {false, true}) {
    on_mesh({1, 2}, [&](const DeviceMesh& shape) {
      const DeviceMesh mesh = init_device_mesh("cpu", {1, 2}, {"dp", "tp"}, {.group = shape.root_group()});
      torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({4}));
      parallelize_module(*norm, mesh["tp"], {{"", SequenceParallel()}});
      if (is_sharded) fully_shard(*norm, {.mesh = mesh["dp"]});
      std::string seen;
      norm->weight.register_hook([&](const at::Tensor& grad) { seen = to_string(DTensor(grad).placements()); });
      const at::Tensor x = seeded(5, [] { return torch::randn({2, 6, 4}); });
      norm(distribute_tensor(x, mesh["tp"], {Shard(1)})).square().sum().backward();
      EXPECT_EQ(seen, "R");
    });
  }
}

}  // namespace
}  // namespace serried::testing
