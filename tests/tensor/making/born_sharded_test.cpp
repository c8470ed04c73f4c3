// Modules born sharded: parts only, and the parameters that plain ones have.
#include "serried/tensor/making/born_sharded.h"

#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/random.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_equal;

Placements by_rows(at::IntArrayRef) {
  return {Shard(0)};
}

// Parameters and buffers of the module that `make` gives, on one device with seed 7.
template <class Make>
void expect_like_plain(const Make& make) {
  at::manual_seed(7);
  const auto expected = make();
  for (const int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group&) {
      const DeviceMesh mesh = init_device_mesh("cpu", {world_size});
      manual_seed(7, mesh);
      const auto born = [&] {
        const BornSharded guard(mesh, by_rows);
        return make();
      }();
      const auto plain = expected->named_parameters();
      ASSERT_EQ(born->named_parameters().size(), plain.size());
      for (const auto& item : born->named_parameters()) {
        ASSERT_TRUE(is_dtensor(item.value())) << item.key();
        EXPECT_TRUE(item.value().requires_grad()) << item.key();
        EXPECT_EQ(DTensor(item.value()).placements(), Placements{Shard(0)}) << item.key();
        expect_equal(DTensor(item.value()).full_tensor().detach(), plain[item.key()].detach(), item.key());
      }
    });
  }
}

TEST(BornSharded, LinearHasThePlainParameters) {
  expect_like_plain([] { return torch::nn::Linear(7, 5); });
}

TEST(BornSharded, ConvolutionEmbeddingAndLstmHaveThePlainParameters) {
  expect_like_plain([] { return torch::nn::Conv2d(3, 5, 3); });
  expect_like_plain([] { return torch::nn::Embedding(11, 6); });
  expect_like_plain([] { return torch::nn::LSTM(4, 3); });
  expect_like_plain([] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})); });
}

TEST(BornSharded, TensorsOutsideTheScopeArePlain) {
  run_ranks(2, [](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const at::Tensor outer = torch::ones({4});
    {
      const BornSharded guard(mesh, by_rows);
      EXPECT_TRUE(is_dtensor(torch::ones({4})));
      EXPECT_FALSE(is_dtensor(torch::ones_like(outer)));
    }
    EXPECT_FALSE(is_dtensor(torch::ones({4})));
  });
}

TEST(BornSharded, EveryFactoryGivesWhatThePlainOneGives) {
  const std::vector<std::function<at::Tensor()>> factories = {[] {
                                                                return torch::zeros({5, 3});
                                                              },
                                                              [] {
                                                                return torch::ones({5, 3}, at::kLong);
                                                              },
                                                              [] {
                                                                return torch::full({5, 3}, 3);
                                                              },
                                                              [] {
                                                                return torch::full({5, 3}, 2.5);
                                                              },
                                                              [] {
                                                                return torch::rand({5, 3});
                                                              },
                                                              [] {
                                                                return torch::randn({5, 7});
                                                              },
                                                              [] {
                                                                return torch::randint(9, {5, 3});
                                                              },
                                                              [] {
                                                                return torch::randint(-3, 9, {5, 3}, at::kInt);
                                                              },
                                                              [] {
                                                                return torch::normal(1., 2., {5, 3});
                                                              },
                                                              [] { return torch::randperm(7); },
                                                              [] { return torch::arange(7); },
                                                              [] { return torch::linspace(0, 1, 5); },
                                                              [] { return torch::eye(5); }};
  for (size_t i = 0; i < factories.size(); ++i) {
    SCOPED_TRACE(i);
    at::manual_seed(7);
    const at::Tensor expected = factories[i]();
    run_ranks(3, [&](const Group&) {
      const DeviceMesh mesh = init_device_mesh("cpu", {3});
      manual_seed(7, mesh);
      at::Tensor made;
      {
        const BornSharded guard(mesh, by_rows);
        made = factories[i]();
      }
      ASSERT_TRUE(is_dtensor(made));
      expect_equal(DTensor(made).full_tensor(), expected);
    });
  }
}

TEST(BornSharded, NestsAndTensorsWithoutDimsAreReplicated) {
  run_ranks(2, [](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const BornSharded outer(mesh, by_rows);
    {
      const BornSharded inner(mesh, [](at::IntArrayRef) -> Placements { return {Replicate()}; });
      EXPECT_EQ(DTensor(torch::zeros({4})).placements(), Placements{Replicate()});
    }
    EXPECT_EQ(DTensor(torch::zeros({4})).placements(), Placements{Shard(0)});
    EXPECT_EQ(DTensor(torch::zeros({})).placements(), Placements{Replicate()});
  });
}

TEST(BornSharded, AnEmptyFunctionRaises) {
  run_ranks(1, [](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1});
    EXPECT_EQ(error_text<c10::ValueError>([&] { const BornSharded guard(mesh, {}); }),
              "[BornSharded] the placement function is empty\n  fix: pass a function from sizes to placements, one per "
              "axis of the mesh\n  at:  rank 0/1");
    EXPECT_FALSE(is_dtensor(torch::zeros({2})));
  });
}

}  // namespace
}  // namespace serried
