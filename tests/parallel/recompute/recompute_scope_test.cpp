// What recompute keeps and lets go, what it restores, and what it refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/torch.h>

#include "serried/mesh/mesh.h"
#include "serried/parallel/loss_parallel.h"
#include "serried/parallel/recompute.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/saved_tensors.h"
#include "serried/tensor/weak_tensor.h"
#include "tests/parallel/recompute/trained.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

at::Tensor leaf(at::IntArrayRef sizes) {
  return iota(sizes).div(7).requires_grad_();
}

TEST(RecomputeMemory, OfASegmentOnlyItsInputsAreKept) {
  const at::Tensor x = leaf({2, 3});
  std::vector<WeakTensor> made;
  auto life = std::make_shared<int>(1);
  const std::weak_ptr<int> function = life;
  at::Tensor middle = x * 2;
  const WeakTensor kept = middle;
  at::Tensor y = recompute(
      [&made, life = std::move(life)](const at::Tensor& in) {
        const at::Tensor a = in.exp();
        made.emplace_back(a);
        const at::Tensor b = a.sin();
        made.emplace_back(b);
        const at::Tensor c = b.tanh();
        made.emplace_back(c);
        return c.sum();
      },
      middle);
  middle.reset();
  ASSERT_EQ(made.size(), 3);
  for (const WeakTensor& t : made) EXPECT_FALSE(t.lock().defined());
  EXPECT_TRUE(kept.lock().defined());
  EXPECT_FALSE(function.expired());
  made.clear();
  y.backward();
  ASSERT_EQ(made.size(), 3) << "what is left behind the last that is saved is cheap, so it is run, too";
  for (const WeakTensor& t : made) EXPECT_FALSE(t.lock().defined());
  EXPECT_FALSE(kept.lock().defined());
  EXPECT_TRUE(function.expired());
}

TEST(RecomputeMemory, ANestedSegmentLeavesItsInputsToTheOuterOne) {
  const at::Tensor x = leaf({2, 3});
  std::vector<WeakTensor> inputs;
  const auto inner = [](const at::Tensor& t) { return t.exp().sin(); };
  at::Tensor y = recompute(
      [&](const at::Tensor& in) {
        const at::Tensor a = in.tanh();
        inputs.emplace_back(a);
        return recompute(inner, a).sum();
      },
      x);
  ASSERT_EQ(inputs.size(), 1);
  EXPECT_FALSE(inputs[0].lock().defined());
  y.backward();
  expect_equal(x.grad(), torch::autograd::grad({inner(x.tanh()).sum()}, {x}).at(0));
}

TEST(RecomputeMemory, WhatABackwardDidNotAskForIsReleasedAtItsEnd) {
  const at::Tensor x = leaf({2, 3}), y = leaf({2, 3});
  std::vector<WeakTensor> made;
  const at::Tensor result = recompute(
      [&](const at::Tensor& a, const at::Tensor& b) {
        const at::Tensor c = a.exp(), d = b.exp();
        for (const at::Tensor& t : {c, d}) made.emplace_back(t);
        return c.sin() + d.sin();
      },
      x, y);
  made.clear();
  torch::autograd::grad({result.sum()}, {x}, {}, /*retain_graph=*/true);
  ASSERT_EQ(made.size(), 2);
  for (const WeakTensor& t : made) EXPECT_FALSE(t.lock().defined());
}

TEST(RecomputeMemory, TheSecondRunEndsWithTheLastTensorThatIsSavedUnlessTheRestIsCheap) {
  for (const bool is_cheap : {false, true}) {
    const at::Tensor x = leaf({2, is_cheap ? 3 : 10'000}).detach().div(1e4).requires_grad_();
    int began = 0, ended = 0;
    const at::Tensor y = recompute(
        [&](const at::Tensor& in) {
          ++began;
          const at::Tensor last = in.exp().sin();
          ++ended;
          return last + 1;
        },
        x);
    y.sum().backward();
    EXPECT_EQ(began, 2);
    EXPECT_EQ(ended, is_cheap ? 2 : 1);
    expect_equal(x.grad(), torch::autograd::grad({x.exp().sin().sum()}, {x}).at(0));
  }
}

TEST(RecomputeScopes, AutocastHoldsInTheSecondRunAndItsCacheStaysClean) {
  torch::nn::Linear net(3, 4);
  const at::Tensor x = at::rand({2, 3}).requires_grad_();
  const auto step = [&](auto call) {
    net->zero_grad();
    x.mutable_grad().reset();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const at::Tensor y = call(x);
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    return std::vector<at::Tensor>{x.grad().clone(), net->weight.grad().clone()};
  };
  const auto fn = [&](const at::Tensor& in) { return net(in).tanh().matmul(net->weight); };
  const auto plain = step(fn), recomputed = step([&](const at::Tensor&in) { return recompute(fn, in); });
  for (size_t i = 0; i < plain.size(); ++i) expect_equal(recomputed[i], plain[i]);
}

struct Seen {
  bool replication, losses, gradients;
  HiddenCommunication hidden;
  std::optional<DeviceMesh> mesh;
  Group group;
  bool operator==(const Seen&) const = default;
};

Seen look() {
  return {ImplicitReplication::is_enabled(),
          LossParallel::is_enabled(),
          c10::GradMode::is_enabled(),
          ExplicitRedistribution::current().mode,
          current_mesh(),
          current_process_group()};
}

TEST(RecomputeScopes, HoldAgainAsAtTheCall) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    std::vector<Seen> seen;
    const at::Tensor x = leaf({2, 3});
    const auto fn = [&](const at::Tensor& in) {
      seen.push_back(look());
      return in.exp();
    };
    const Seen outside = look();
    at::Tensor inside;
    const at::Tensor bare = recompute(fn, x);
    {
      const ImplicitReplication replication;
      const ExplicitRedistribution redistribution;
      const LossParallel loss;
      const MeshGuard current(mesh);
      const ProcessGroupGuard group(mesh.get_group());
      inside = recompute(fn, x);
      bare.sum().backward();
      EXPECT_TRUE(current_mesh().has_value());
    }
    inside.sum().backward();
    EXPECT_TRUE(look() == outside);
    ASSERT_EQ(seen.size(), 4);
    EXPECT_TRUE(seen[2] == seen[0]) << "the bare one, in the scopes";
    EXPECT_TRUE(seen[3] == seen[1]) << "that in the scopes, outside";
    EXPECT_TRUE(seen[1].replication && seen[1].losses && seen[1].mesh.has_value());
  });
}

TEST(RecomputeErrors, AnExceptionLeavesTheScopeAndMayComeInEitherRun) {
  const at::Tensor x = leaf({2, 3});
  int fails_at = 1, runs = 0;
  const auto fn = [&](const at::Tensor& in) {
    const at::Tensor y = in.exp();
    if (++runs == fails_at) throw std::runtime_error("not this time");
    return y.sin();
  };
  EXPECT_THROW(recompute(fn, x), std::runtime_error);
  EXPECT_EQ(detail::current_keeper(), nullptr);
  fails_at = 3;
  const at::Tensor y = recompute(fn, x);
  EXPECT_THROW(y.sum().backward({}, /*retain_graph=*/true), std::runtime_error);
  EXPECT_EQ(detail::current_keeper(), nullptr);
  y.sum().backward();
  expect_equal(x.grad(), torch::autograd::grad({x.exp().sin().sum()}, {x}).at(0));
}

TEST(RecomputeErrors, AnArgumentThatChangedSinceIsNamed) {
  const at::Tensor x = leaf({2, 3}), middle = x * 1;
  const at::Tensor y = recompute([](const at::Tensor& in) { return in.exp().sin(); }, middle);
  middle.add_(1);
  EXPECT_EQ(error_text<c10::Error>([&] { y.sum().backward(); }),
            "[recompute] an argument of the function, f64[2,3] has been changed by an in-place operation since the "
            "forward: it is at version 1, expected version 0\n"
            "  fix: change it after backward, or change a copy: x = x.add(y)");
}

TEST(RecomputeErrors, ParametersAndBuffersThatChangedSinceAreNoticedThoughNotSaved) {
  torch::nn::Linear net(3, 2);
  const at::Tensor offset = at::ones({2});
  const auto fn = [&](const at::Tensor& in) { return (net(in) + offset).sin(); };
  for (const at::Tensor& changed : {net->weight, net->bias, offset}) {
    const at::Tensor y = recompute(fn, at::rand({4, 3}).requires_grad_());
    {
      const torch::NoGradGuard guard;
      changed.add_(1);
    }
    EXPECT_THAT(error_text<c10::Error>([&] { y.sum().backward(); }),
                HasSubstr("has been changed by an in-place operation since the forward"));
  }
}

TEST(RecomputeErrors, AResultThatIsSavedMayNotChangeAsInThePlainRun) {
  const at::Tensor y = recompute([](const at::Tensor& in) { return in.exp(); }, leaf({2, 3}));
  y.add_(1);
  EXPECT_THAT(error_text<c10::Error>([&] { y.sum().backward(); }),
              HasSubstr("[recompute] a tensor that autograd saved, f64[2,3] has been changed"));
}

TEST(RecomputeErrors, AFunctionThatChangesItsArgumentIsRefusedAtOnce) {
  const at::Tensor x = leaf({2, 3}) * 1;
  EXPECT_EQ(error_text<c10::ValueError>(
                [&] { recompute([](const at::Tensor& in) { return at::Tensor(in).mul_(2).exp(); }, x); }),
            "[recompute] the function changes its argument f64[2,3] in place, so a second run would not find it as it "
            "was\n  fix: let it work on a copy, or use the op that makes a new tensor");
}

TEST(RecomputeErrors, AFunctionThatReadsStateBeforeItChangesItIsRefusedAtOnce) {
  const at::Tensor average = at::zeros({3}, at::kDouble);
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              recompute(
                  [&](const at::Tensor& in) {
                    const at::Tensor y = (in - average).exp();
                    average.copy_(in.detach().mean(0));
                    return y;
                  },
                  leaf({2, 3}));
            }),
            "[recompute] the function reads a tensor f64[3] that it was not given, and changes it afterwards: a second "
            "run would not find it as it was\n"
            "  fix: change it outside of the function, or read a copy: state.clone()");
}

TEST(RecomputeErrors, ASecondRunThatSavesSomethingElseNamesTheFirstDifference) {
  int runs = 0;
  const at::Tensor x = leaf({2, 3});
  const auto other_sizes = [&](const at::Tensor& in) {
    return ++runs == 1 ? in.exp().sin().sum() : in.exp().narrow(0, 0, 1).sin().sum();
  };
  const at::Tensor y = recompute(other_sizes, x);
  EXPECT_EQ(error_text<c10::Error>([&] { y.backward(); }),
            "[recompute] the second run differs from the first: tensor 1 that autograd saves is f64[1,3], and was "
            "f64[2,3]\n"
            "  fix: let the function do the same each time: no branches on what changes between forward and backward, "
            "no counters, no random numbers but torch's");
  runs = 0;
  const auto fewer = [&](const at::Tensor& in) { return ++runs == 1 ? in.exp().sin().tanh() : in.exp(); };
  const at::Tensor z = recompute(fewer, x);
  EXPECT_THAT(error_text<c10::Error>([&] { z.sum().backward(); }),
              HasSubstr("the second run differs from the first: autograd saves 1 tensors, and saved 3; the first that "
                        "is missing was f64[2,3]"));
}

TEST(RecomputeErrors, AnotherEngineIsRefused) {
  using torch::autograd::Engine;
  const at::Tensor x = leaf({2});
  const auto fn = [](const at::Tensor& in) { return in.exp(); };
  torch::autograd::set_default_engine_stub(Engine::get_base_engine);
  EXPECT_EQ(error_text<c10::NotImplementedError>([&] { recompute(fn, x); }),
            "[recompute] another library has replaced autograd's engine, so tensors that autograd saves cannot be kept "
            "otherwise; Python's torch does so when it is loaded\n"
            "  fix: use a process without Python's torch, or train without this");
  detail::install_engine();
  recompute(fn, x).sum().backward();
  expect_equal(x.grad(), x.exp().detach());
}

}  // namespace
}  // namespace serried::testing
