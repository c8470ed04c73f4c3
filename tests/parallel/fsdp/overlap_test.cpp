// Blocks that are gathered ahead and gradients that are reduced meanwhile: the same numbers, and two of each at most.
#include <gtest/gtest.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/tensor/debug/comm_debug.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using namespace sharded;

constexpr int kGptLayers = 4;

struct Sharded {
  NetPtr net;
  std::vector<FullyShardHandle> layers;
  FullyShardHandle root;

  int64_t layer_bytes(int world) const { return layers[0].whole_bytes() + world * 64; }
  int64_t root_bytes(int world) const { return root.whole_bytes() + world * 64; }
};

Sharded sharded_gpt(const FullyShardOptions& options, at::ScalarType dtype = at::kFloat) {
  const NetPtr net = make([] { return std::make_shared<Gpt>(kGptLayers); }, dtype);
  std::vector<FullyShardHandle> layers;
  for (const auto& layer : net->layers()) layers.push_back(fully_shard(*layer, options));
  return {net, layers, fully_shard(*net, options)};
}

void step_with(Net& net, torch::optim::Optimizer& optimizer, int64_t salt) {
  optimizer.zero_grad();
  net.loss(salt).backward();
  optimizer.step();
}

void expect_same_values(const Net& net, const Net& other) {
  const auto actual = values_of(net), expected = values_of(other);
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str("parameter ", i));
}

TEST(FullyShardOverlap, TrainsBitwiseAsWithoutAndSendsTheSame) {
  for (int world : {1, 2, 3, 4}) {
    run_ranks(world, [&](const Group& group) {
      for (const NamedNet& named : all_nets()) {
        const NetPtr net = make(named.make), other = make(named.make);
        const FullyShardHandle handle = shard_all(*net, {.overlap = true});
        shard_all(*other, {.overlap = false});
        const auto optimizer = adamw(net->parameters()), other_optimizer = adamw(other->parameters());
        for (int step = 0; step < 4; ++step) {
          CommDebugMode comm;
          step_with(*net, *optimizer, 10 * step + group->getRank());
          const int64_t num_gathers = comm.count("all_gather"), num_reductions = comm.count("reduce_scatter");
          step_with(*other, *other_optimizer, 10 * step + group->getRank());
          EXPECT_EQ(comm.count("all_gather"), 2 * num_gathers) << named.name;
          EXPECT_EQ(comm.count("reduce_scatter"), 2 * num_reductions) << named.name;
        }
        expect_same_values(*net, *other);
        const FullyShardUsage usage = handle.usage();
        EXPECT_EQ(usage.gathered_bytes + usage.gradient_bytes, 0) << named.name;
      }
    });
  }
}

TEST(FullyShardOverlap, OnEveryBackend) {
  for (const std::string backend : {"shm", "gloo"}) {
    run_ranks(2,
              [](const Group& group) {
                const Sharded model = sharded_gpt({.overlap = true}), other = sharded_gpt({.overlap = false});
                const auto optimizer = adamw(model.net->parameters()), other_optimizer = adamw(other.net->parameters());
                for (int step = 0; step < 3; ++step) {
                  step_with(*model.net, *optimizer, 10 * step + group->getRank());
                  step_with(*other.net, *other_optimizer, 10 * step + group->getRank());
                }
                expect_same_values(*model.net, *other.net);
                EXPECT_EQ(model.root.usage().gathered_bytes, 0);
              },
              {.backend = backend});
  }
}

TEST(FullyShardOverlap, FromTheSecondStepOnTheNextBlockComesAheadAndTwoAreWholeBesideTheRoot) {
  for (int world : {2, 3}) {
    run_ranks(world, [&](const Group&) {
      const Sharded model = sharded_gpt({.overlap = true});
      const auto optimizer = adamw(model.net->parameters());
      for (int step = 0; step < 3; ++step) {
        step_with(*model.net, *optimizer, step);
        const FullyShardUsage usage = model.root.usage();
        const int64_t num_layers = step == 0 ? 1 : 2;
        EXPECT_EQ(usage.peak_gathered_bytes, num_layers * model.layer_bytes(world) + model.root_bytes(world)) << step;
        EXPECT_EQ(usage.gathered_bytes, 0);
        EXPECT_EQ(usage.gradient_bytes, 0);
      }
    });
  }
}

TEST(FullyShardOverlap, TwoBuffersOfGradientsAtMost) {
  run_ranks(2, [](const Group&) {
    std::array<int64_t, 2> peaks{};
    for (const bool overlap : {false, true}) {
      const Sharded model = sharded_gpt({.overlap = overlap});
      model.net->loss(0).backward();
      peaks[overlap] = model.root.usage().peak_gradient_bytes;
      for (const at::Tensor& p : model.net->parameters()) EXPECT_TRUE(p.grad().defined());
    }
    EXPECT_GT(peaks[1], 0);
    EXPECT_LE(peaks[1], 2 * peaks[0]);
  });
}

TEST(FullyShardOverlap, WithoutGradientsNothingComesAhead) {
  run_ranks(2, [](const Group&) {
    const Sharded model = sharded_gpt({.overlap = true});
    const NetPtr plain = make([] { return std::make_shared<Gpt>(kGptLayers); });
    const at::NoGradGuard no_grad;
    for (int pass = 0; pass < 4; ++pass) expect_equal(model.net->loss(pass), plain->loss(pass));
    EXPECT_EQ(model.root.usage().peak_gathered_bytes, model.layer_bytes(2) + model.root_bytes(2));
  });
}

/// Runs its layers in the order it is told.
struct Winding final : Net {
  torch::nn::ModuleList parts{nullptr};
  std::vector<int64_t> way;

  Winding() {
    parts = register_module("parts", torch::nn::ModuleList());
    for (int i = 0; i < 4; ++i) parts->push_back(torch::nn::Linear(5, 5));
  }
  at::Tensor loss(int64_t salt) override {
    at::Tensor x = input({3, 5}, salt);
    for (const int64_t i : way) x = torch::tanh(parts[size_t(i)]->as<torch::nn::Linear>()->forward(x));
    return x.square().mean();
  }
  std::vector<std::shared_ptr<torch::nn::Module>> layers() override { return {parts->begin(), parts->end()}; }
};

TEST(FullyShardOverlap, WaysThatChangeAreFollowed) {
  for (int world : {2, 3}) {
    run_ranks(world, [](const Group&) {
      const auto net = std::static_pointer_cast<Winding>(make([] { return std::make_shared<Winding>(); }));
      const auto other = std::static_pointer_cast<Winding>(make([] { return std::make_shared<Winding>(); }));
      std::vector<FullyShardHandle> handles;
      for (const auto& layer : net->layers()) handles.push_back(fully_shard(*layer, {.overlap = true}));
      const FullyShardHandle& handle = handles[0];
      shard_all(*other, {.overlap = false});
      const auto optimizer = adamw(net->parameters()), other_optimizer = adamw(other->parameters());
      const std::vector<std::vector<int64_t>> ways = {{0, 1, 2, 3}, {0, 1, 2, 3}, {0, 2, 1, 3}, {0, 1}, {0, 1},
                                                      {3, 0, 3, 1}, {3, 0, 3, 1}, {3, 0, 3, 1}, {1},    {2, 2, 3}};
      for (size_t step = 0; step < ways.size(); ++step) {
        net->way = other->way = ways[step];
        step_with(*net, *optimizer, int64_t(step));
        step_with(*other, *other_optimizer, int64_t(step));
        const FullyShardUsage usage = handle.usage();
        EXPECT_EQ(usage.gathered_bytes + usage.gradient_bytes, 0) << step;
        EXPECT_LE(usage.peak_gathered_bytes, 2 * (handle.whole_bytes() + 64 * 3)) << step;
      }
      expect_same_values(*net, *other);
    });
  }
}

TEST(FullyShardOverlap, ListsOfModulesComeAheadHoweverManyCoresThereAre) {
  run_ranks(2, [](const Group&) {
    const Sharded model = sharded_gpt({.overlap = false});
    const NetPtr plain = make([] { return std::make_shared<Gpt>(kGptLayers); });
    const auto optimizer = adamw(model.net->parameters()), plain_optimizer = adamw(plain->parameters());
    model.layers[0].set_modules_to_forward_prefetch({model.layers[1], model.layers[2]});
    model.layers[3].set_modules_to_backward_prefetch({model.layers[2]});
    for (int step = 0; step < 3; ++step) {
      CommDebugMode comm;
      step_with(*model.net, *optimizer, step);
      step_with(*plain, *plain_optimizer, step);
      EXPECT_EQ(comm.count("all_gather"), 2 * (kGptLayers + 1) - 2);
      // The first layer, and both that were asked for, already with the first step.
      EXPECT_EQ(model.root.usage().peak_gathered_bytes, 3 * model.layer_bytes(2) + model.root_bytes(2));
    }
    expect_same_values(*model.net, *plain);
    model.layers[0].set_modules_to_forward_prefetch({});
    model.layers[3].set_modules_to_backward_prefetch({});
    step_with(*model.net, *optimizer, 1);
    EXPECT_EQ(model.root.usage().peak_gathered_bytes, model.layer_bytes(2) + model.root_bytes(2));
  });
}

TEST(FullyShardOverlap, AccumulatesReplicatesAndComputesInLowPrecision) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, {.group = group});
    for (const MixedPrecision& precision :
         {MixedPrecision{}, MixedPrecision{.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}) {
      std::vector<NetPtr> nets;
      for (const bool overlap : {true, false}) {
        const Sharded model = sharded_gpt({.mesh = mesh, .mixed_precision = precision, .overlap = overlap});
        const auto optimizer = adamw(model.net->parameters());
        for (int step = 0; step < 3; ++step) {
          optimizer->zero_grad();
          for (int micro = 0; micro < 2; ++micro) {
            const auto guard = model.root.no_sync(micro == 0);
            model.net->loss(20 * step + 10 * micro + group->getRank()).backward();
          }
          optimizer->step();
        }
        EXPECT_EQ(model.root.usage().gathered_bytes, 0);
        nets.push_back(model.net);
      }
      expect_same_values(*nets[0], *nets[1]);
    }
  });
}

struct CountGradients final : torch::autograd::PostAccumulateGradHook {
  explicit CountGradients(int64_t& num_calls_) : num_calls(num_calls_) {}
  void operator()(const torch::autograd::Variable& parameter) override {
    if (parameter.grad().defined()) ++num_calls;
  }
  int64_t& num_calls;
};

TEST(FullyShardOverlap, HooksOfParametersSeeReducedGradientsBeforeBackwardEnds) {
  run_ranks(2, [](const Group&) {
    const Sharded model = sharded_gpt({.overlap = true});
    int64_t num_calls = 0;
    for (const at::Tensor& p : model.net->parameters()) {
      torch::autograd::impl::set_post_acc_grad_hooks(p, std::make_unique<CountGradients>(num_calls));
    }
    model.net->loss(1).backward();
    EXPECT_EQ(num_calls, int64_t(model.net->parameters().size()));
  });
}

TEST(FullyShardOverlap, AnExceptionInForwardLeavesNothingThatTheNextStepCouldTakeForItsOwn) {
  run_ranks(2, [](const Group&) {
    const auto net = std::static_pointer_cast<Winding>(make([] { return std::make_shared<Winding>(); }));
    const NetPtr plain = make([] { return std::make_shared<Winding>(); });
    net->way = std::static_pointer_cast<Winding>(plain)->way = {0, 1, 2, 3};
    const FullyShardHandle handle = shard_all(*net, {.overlap = true});
    const auto optimizer = adamw(net->parameters()), plain_optimizer = adamw(plain->parameters());
    for (int step = 0; step < 4; ++step) {
      step_with(*net, *optimizer, step);
      step_with(*plain, *plain_optimizer, step);
      net->way = {0, 1, 17};
      EXPECT_ANY_THROW(net->loss(step));
      net->way = {0, 1, 2, 3};
    }
    step_with(*net, *optimizer, 9);
    step_with(*plain, *plain_optimizer, 9);
    expect_same_values(*net, *plain);
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
  });
}

TEST(FullyShardOverlap, AGroupThatFailsWhileABlockIsOnItsWayIsToldWithTheBlocksName) {
  run_ranks(2, [](const Group& group) {
    const Group mine = split_group(group, {{0, 1}});
    const DeviceMesh mesh = DeviceMesh::from_group(mine);
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter{c10::intrusive_ptr<c10::TensorImpl>()};
    {
      const Sharded model = sharded_gpt({.mesh = mesh, .overlap = true});
      parameter = c10::weak_intrusive_ptr<c10::TensorImpl>(model.net->parameters()[0].getIntrusivePtr());
      if (group->getRank() == 0) model.layers[2].unshard({.async = true});
      if (group->getRank() == 1) mine->getBackend(at::kCPU)->abort();
      const std::string text = error_text<c10::DistBackendError>([&] { model.layers[2].unshard(); });
      EXPECT_NE(text.find("was gathered"), std::string::npos) << text;
      EXPECT_EQ(model.root.usage().gathered_bytes, 0);
    }
    EXPECT_TRUE(parameter.expired());
  });
}

TEST(FullyShardOverlap, AReductionThatFailsIsRaisedByBackwardAndLeavesNothingBehind) {
  run_ranks(2, [](const Group& group) {
    const Group mine = split_group(group, {{0, 1}});
    const auto net = std::static_pointer_cast<Winding>(make([] { return std::make_shared<Winding>(); }));
    net->way = {0, 1};
    const FullyShardHandle handle =
        shard_all(*net, {.mesh = DeviceMesh::from_group(mine), .reshard_after_forward = false, .overlap = true});
    const at::Tensor loss = net->loss(1);
    barrier(group);
    if (group->getRank() == 1) mine->getBackend(at::kCPU)->abort();
    EXPECT_THROW(loss.backward(), c10::DistBackendError);
    EXPECT_EQ(handle.usage().gradient_bytes, 0);
    EXPECT_EQ(handle.usage().gathered_bytes, 0);
    for (const at::Tensor& p : net->parameters()) EXPECT_FALSE(p.grad().defined());
  });
}

}  // namespace
}  // namespace serried::testing
