// Random ops on DTensors through the dispatcher: initialisation, dropout and their like.
#include "serried/tensor/making/factories.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_equal;

struct Layout {
  Sizes mesh;
  Placements placements;
};

std::vector<Layout> layouts() {
  return {{{1}, {Replicate()}}, {{2}, {Replicate()}}, {{2}, {Shard(0)}},
          {{3}, {Shard(1)}},    {{4}, {Shard(0)}},    {{2, 2}, {Shard(0), Shard(1)}}};
}

using OnLayout = std::function<at::Tensor(const DeviceMesh&, const Placements&)>;

// The whole result of `fn` on every layout, generators seeded with 7; all ranks must have the same.
void expect_on_all(const OnLayout& fn, std::optional<at::Tensor> expected = {}) {
  for (const Layout& layout : layouts()) {
    SCOPED_TRACE(to_string(layout.placements));
    int64_t world_size = 1;
    for (const int64_t n : layout.mesh) world_size *= n;
    std::vector<at::Tensor> results(world_size);
    run_ranks(int(world_size), [&](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", layout.mesh);
      manual_seed(7, mesh);
      results[group->getRank()] = DTensor(fn(mesh, layout.placements)).full_tensor().detach().clone();
    });
    if (!expected) expected = results.front();
    for (const at::Tensor& result : results) expect_equal(result, *expected);
  }
}

at::Tensor plain(const std::function<void(at::Tensor&)>& init, at::ScalarType dtype = at::kFloat) {
  at::Tensor t = at::zeros({5, 9}, dtype);
  at::manual_seed(7);
  init(t);
  return t;
}

TEST(Init, InPlaceOpsEqualOneDevice) {
  const std::vector<std::function<void(at::Tensor&)>> inits = {
      [](at::Tensor& t) { t.normal_(1, 2); },   [](at::Tensor& t) { t.uniform_(-1, 1); },
      [](at::Tensor& t) { t.exponential_(2); }, [](at::Tensor& t) { t.cauchy_(); },
      [](at::Tensor& t) { t.log_normal_(); },   [](at::Tensor& t) { t.geometric_(0.5); },
      [](at::Tensor& t) { t.random_(); },       [](at::Tensor& t) { t.random_(50); },
      [](at::Tensor& t) { t.random_(-5, 50); }};
  for (const auto& init : inits) {
    const at::Tensor expected = plain(init);
    expect_on_all(
        [&](const DeviceMesh& mesh, const Placements& placements) {
          at::Tensor t = zeros({5, 9}, mesh, placements);
          init(t);
          return t;
        },
        expected);
  }
}

TEST(Init, FunctionsOfNnInitEqualOneDevice) {
  const std::vector<std::function<void(at::Tensor&)>> inits = {
      [](at::Tensor& t) { torch::nn::init::kaiming_uniform_(t, std::sqrt(5)); },
      [](at::Tensor& t) { torch::nn::init::kaiming_normal_(t); },
      [](at::Tensor& t) { torch::nn::init::xavier_uniform_(t); },
      [](at::Tensor& t) { torch::nn::init::xavier_normal_(t, 0.5); },
      [](at::Tensor& t) { torch::nn::init::normal_(t, 1, 0.1); },
      [](at::Tensor& t) { torch::nn::init::uniform_(t, 1, 2); },
      [](at::Tensor& t) { torch::nn::init::constant_(t, 3); }};
  for (const auto& init : inits) {
    const at::Tensor expected = plain(init);
    expect_on_all(
        [&](const DeviceMesh& mesh, const Placements& placements) {
          at::Tensor t = zeros({5, 9}, mesh, placements, at::TensorOptions().requires_grad(true));
          init(t);
          return t;
        },
        expected);
  }
}

TEST(Init, APartialTensorRaises) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"});
    DTensor t = zeros({5, 9}, mesh, {Partial()});
    EXPECT_EQ(error_text<c10::ValueError>([&] { t.normal_(); }),
              c10::str("[aten::normal_] random numbers cannot be placed as f32[5,9] P on ", mesh.to_string(),
                       "\n  fix: place the tensor with Replicate or Shard instead of Partial\n  at:  rank ",
                       group->getRank(), "/2"));
  });
}

TEST(Init, ACopiedViewRaises) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"});
    const DTensor t = zeros({3, 2}, mesh, {Shard(0)});
    const at::Tensor view = t.select(0, 1);
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { view.uniform_(); }),
        c10::str("[aten::uniform_] \"self\" f32[2] R on ", mesh.to_string(),
                 " is a view across a cut dim: its data was gathered, so writing to it would not reach the tensor "
                 "it is a view of\n  fix: write to the tensor itself, or redistribute it so that the viewed dim "
                 "is whole\n  at:  rank ",
                 group->getRank(), "/2"));
  });
}

TEST(Init, AGivenGeneratorIsUsedAndMovedOn) {
  const at::Tensor expected = at::randn({5, 9}, at::detail::createCPUGenerator(3));
  expect_on_all(
      [&](const DeviceMesh& mesh, const Placements& placements) {
        at::Tensor t = zeros({5, 9}, mesh, placements);
        const at::Tensor before = rank_generator().get_state();
        t.normal_(0, 1, at::detail::createCPUGenerator(3));
        EXPECT_TRUE(at::equal(rank_generator().get_state(), before));
        return t;
      },
      expected);
}

// Ops inside a step: no plain counterpart, but one result for all layouts.
TEST(StepOps, GiveTheSameNumbersOnEveryMeshAndPlacement) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> ops = {
      [](const at::Tensor& t) { return at::rand_like(t); },
      [](const at::Tensor& t) { return at::randn_like(t, at::kDouble); },
      [](const at::Tensor& t) { return at::randint_like(t, 3, 50); },
      [](const at::Tensor& t) { return at::bernoulli(t, 0.3); },
      [](const at::Tensor& t) { return at::bernoulli(t.mul(0.5)); },
      [](const at::Tensor& t) { return at::empty_like(t).bernoulli_(0.3); },
      [](const at::Tensor& t) { return at::empty_like(t).bernoulli_(t.mul(0.5)); },
      [](const at::Tensor& t) { return at::dropout(t, 0.4, true); },
      [](const at::Tensor& t) { return at::alpha_dropout(t, 0.4, true); },
      [](const at::Tensor& t) { return at::feature_dropout(t, 0.4, true); },
      [](const at::Tensor& t) { return std::get<0>(at::native_dropout(t, 0.4, true)); },
      [](const at::Tensor& t) { return std::get<1>(at::native_dropout(t, 0.4, true)); },
      [](const at::Tensor& t) { return at::rrelu(t.neg(), 0.1, 0.4, true); },
      [](const at::Tensor& t) { return at::normal(t, 2.); },
      [](const at::Tensor& t) { return at::normal(1., t); },
      [](const at::Tensor& t) { return at::normal(t, t); },
      [](const at::Tensor& t) { return at::poisson(t); },
      [](const at::Tensor& t) { return at::multinomial(t, 2); }};
  for (size_t i = 0; i < ops.size(); ++i) {
    SCOPED_TRACE(i);
    expect_on_all([&](const DeviceMesh& mesh, const Placements& placements) {
      return ops[i](ones({5, 9}, mesh, placements));
    });
  }
}

TEST(StepOps, DropoutOfAPartialEqualsThatOfItsValue) {
  at::Tensor expected;
  run_ranks(1, [&](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1});
    manual_seed(7, mesh);
    expected = DTensor(at::dropout(ones({5, 9}, mesh), 0.4, true)).full_tensor();
  });
  run_ranks(2, [&](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    manual_seed(7, mesh);
    expect_equal(DTensor(at::dropout(ones({5, 9}, mesh, {Partial()}), 0.4, true)).full_tensor(), expected);
  });
}

TEST(StepOps, DropoutScalesAndItsGradientIsTheMask) {
  run_ranks(3, [](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    manual_seed(7, mesh);
    const DTensor x = ones({40, 9}, mesh, {Shard(0)}, at::TensorOptions().requires_grad(true));
    const at::Tensor y = at::dropout(x, 0.25, true);
    y.sum().backward();
    const at::Tensor values = DTensor(y).full_tensor().detach();
    expect_equal(DTensor(x.grad()).full_tensor(), values);
    EXPECT_NEAR(values.gt(0).to(at::kFloat).mean().item<double>(), 0.75, 0.1);
    expect_equal(values.max(), at::scalar_tensor(1.f / 0.75f));
  });
}

TEST(StepOps, SuccessiveDropoutsDiffer) {
  run_ranks(2, [](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    manual_seed(7, mesh);
    const DTensor x = ones({8, 8}, mesh, {Shard(0)});
    const at::Tensor first = DTensor(at::dropout(x, 0.5, true)).full_tensor();
    EXPECT_FALSE(at::equal(first, DTensor(at::dropout(x, 0.5, true)).full_tensor()));
  });
}

TEST(StepOps, BadArgumentsRaise) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const std::string at_rank = c10::str("\n  at:  rank ", group->getRank(), "/2");
    DTensor x = ones({4, 4}, mesh, {Shard(0)});
    EXPECT_EQ(error_text<c10::ValueError>([&] { x.bernoulli_(1.5); }),
              "[aten::bernoulli_] p is 1.5\n  fix: pass a probability from 0 to 1" + at_rank);
    EXPECT_EQ(error_text<c10::ValueError>([&] { at::bernoulli(at::mul(x, 2)); }),
              "[aten::bernoulli] some elements of p are not probabilities\n  fix: pass values from 0 to 1, for example "
              "through sigmoid" +
                  at_rank);
    EXPECT_EQ(error_text<c10::ValueError>([&] { at::randint_like(x, 5, 5); }),
              "[randint_like] there is no integer from 5 up to but not 5\n  fix: pass low < high" + at_rank);
    EXPECT_EQ(error_text<c10::ValueError>([&] { at::normal(x, -1.); }),
              "[normal] std is -1\n  fix: pass a standard deviation of 0 or more" + at_rank);
  });
}

}  // namespace
}  // namespace serried
