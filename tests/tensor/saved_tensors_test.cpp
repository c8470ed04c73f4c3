// Scopes that keep what autograd saves: which one is asked, and that nothing is asked without one.
#include "serried/tensor/saved_tensors.h"

#include <gtest/gtest.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include "tests/support/close.h"

namespace serried::testing {
namespace {

struct CountingKeeper final : detail::TensorKeeper {
  struct Hooks final : torch::autograd::SavedVariableHooks {
    explicit Hooks(CountingKeeper& owner_) : owner(owner_) {}
    void call_pack_hook(const at::Tensor& t) override {
      ++owner.packed;
      kept = t.tensor_data();
    }
    at::Tensor call_unpack_hook() override {
      ++owner.unpacked;
      return kept;
    }
    CountingKeeper& owner;
    at::Tensor kept;
  };
  detail::SavedHooks make_hooks() override { return std::make_unique<Hooks>(*this); }
  int packed = 0, unpacked = 0;
};

TEST(SavedTensors, TheEngineOfEveryBackwardIsOurs) {
  EXPECT_NE(&torch::autograd::Engine::get_default_engine(), &torch::autograd::Engine::get_base_engine());
  EXPECT_EQ(torch::autograd::Engine::get_default_engine().get_default_saved_variable_hooks(), nullptr);
}

TEST(SavedTensors, TheInnermostScopeOfTheThreadKeepsThem) {
  const at::Tensor x = at::rand({3}).requires_grad_();
  CountingKeeper outer, inner;
  at::Tensor y;
  {
    const detail::KeeperScope scope("test", &outer);
    y = x.exp();
    {
      const detail::KeeperScope within("test", &inner);
      y = y.sin();
      const detail::KeeperScope none("test", nullptr);
      y = y.tanh();
    }
    EXPECT_EQ(detail::current_keeper(), &outer);
    std::thread([&] { x.exp(); }).join();
  }
  EXPECT_EQ(detail::current_keeper(), nullptr);
  EXPECT_EQ(outer.packed, 1);
  EXPECT_EQ(inner.packed, 1);
  y.sum().backward();
  EXPECT_EQ(outer.unpacked, 1);
  EXPECT_EQ(inner.unpacked, 1);
  expect_equal(x.grad(), torch::autograd::grad({x.exp().sin().tanh().sum()}, {x}).at(0));
}

}  // namespace
}  // namespace serried::testing
