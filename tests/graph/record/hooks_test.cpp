// Hooks that users put on gradients run again at each replay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "serried/graph/capture.h"
#include "serried/graph/record/hooks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/meta.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using graph::CaptureError;
using graph::CaptureErrorKind;
using testing::error_text;
using ::testing::HasSubstr;

constexpr int kHookCalls = 8;

at::Tensor hooked_leaf() {
  return torch::arange(3, at::kFloat).requires_grad_();
}

at::Tensor filled(int i) {
  return torch::full({3}, 1 + i);
}

TEST(CaptureHooks, OnALeafIsCalledAtEachReplay) {
  const at::Tensor weight = hooked_leaf();
  int calls = 0;
  std::vector<float> seen;
  weight.register_hook([&](const at::Tensor& grad) {
    ++calls;
    seen.push_back(grad[0].item<float>());
  });
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    (weight * x).sum().backward();
  });
  for (int i = 0; i < kHookCalls; ++i) {
    step(filled(i));
    EXPECT_EQ(calls, i + 1);
    EXPECT_EQ(seen.back(), 1 + i);
    EXPECT_TRUE(at::equal(weight.grad(), filled(i).to(at::kFloat)));
  }
  EXPECT_EQ(step.replays(), kHookCalls - 3);
  EXPECT_EQ(step.graph().count("call_hook"), 1) << step.graph().to_string();
}

TEST(CaptureHooks, OnIntermediatesAndTheLossAreCalledInTheirOrder) {
  const at::Tensor weight = hooked_leaf();
  std::string order;
  const auto run = [&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    const at::Tensor product = weight * x;
    const at::Tensor loss = product.square().sum();
    product.register_hook([&](const at::Tensor& grad) {  // after its last use
      order += 'p';
      return grad * 2;
    });
    loss.register_hook([&](const at::Tensor&) { order += 'l'; });
    loss.backward();
  };
  auto step = capture(run);
  for (int i = 0; i < kHookCalls; ++i) {
    step(filled(i));
    EXPECT_TRUE(at::equal(weight.grad(), 2 * 2 * weight.detach() * filled(i).square()));
  }
  EXPECT_EQ(order, "lplplplplplplplp");
  EXPECT_EQ(step.replays(), kHookCalls - 3);
}

TEST(CaptureHooks, OnARootWithAGivenGradientAreCalled) {
  const at::Tensor weight = hooked_leaf();
  int calls = 0;
  auto step = capture([&](const at::Tensor& x, const at::Tensor& seed) {
    weight.mutable_grad().reset();
    const at::Tensor product = weight * x;
    product.register_hook([&](const at::Tensor& grad) { return ++calls, grad + 1; });
    product.backward(seed);
  });
  for (int i = 0; i < kHookCalls; ++i) {
    const at::Tensor x = filled(i).to(at::kFloat);
    step(x, x * 3);
    EXPECT_TRUE(at::equal(weight.grad(), x * (x * 3 + 1)));
  }
  EXPECT_EQ(calls, kHookCalls);
  EXPECT_EQ(step.replays(), kHookCalls - 3);
}

/// A hook with a state of its own.
struct AddsItsCalls {
  mutable int calls = 0;
  at::Tensor operator()(const at::Tensor& grad) const { return grad + ++calls; }
};

TEST(CaptureHooks, SeeTheStateOfTheHost) {
  const at::Tensor weight = hooked_leaf();
  double scale = 1;
  weight.register_hook([&](const at::Tensor& grad) { return grad * scale; });
  weight.register_hook(AddsItsCalls());
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    (weight * x).sum().backward();
  });
  for (int i = 0; i < kHookCalls; ++i) {
    scale = 0.5 * i;
    step(filled(i));
    EXPECT_TRUE(at::equal(weight.grad(), filled(i) * scale + (i + 1))) << i;
  }
  EXPECT_EQ(step.replays(), kHookCalls - 3);
}

TEST(CaptureHooks, RemovedOrAddedOnesRecapture) {
  const at::Tensor weight = hooked_leaf();
  int calls = 0;
  const unsigned hook = weight.register_hook([&](const at::Tensor&) { ++calls; });
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    (weight * x).sum().backward();
  });
  for (int i = 0; i < 5; ++i) step(filled(i));
  weight.remove_hook(hook);
  for (int i = 0; i < 5; ++i) step(filled(i));
  EXPECT_EQ(calls, 5);
  EXPECT_EQ(step.captures(), 2);
  EXPECT_EQ(step.last_recapture_reason(), "changes to hooks on parameters was 1 and is 2");
  weight.register_hook([&](const at::Tensor& grad) { return grad * 7; });
  for (int i = 0; i < 5; ++i) step(filled(i));
  EXPECT_TRUE(at::equal(weight.grad(), filled(4) * 7.F));
  EXPECT_EQ(step.captures(), 3);
}

TEST(CaptureHooks, MayUseAutogradThemselves) {
  const at::Tensor weight = hooked_leaf();
  weight.register_hook([](const at::Tensor& grad) {
    const at::AutoGradMode on(true);
    const at::Tensor inner = grad.detach().requires_grad_();
    inner.pow(3).sum().backward();
    return inner.grad();
  });
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    (weight * x).sum().backward();
  });
  for (int i = 0; i < 5; ++i) {
    step(filled(i));
    EXPECT_TRUE(at::equal(weight.grad(), 3 * filled(i).to(at::kFloat).square()));
  }
  EXPECT_EQ(step.replays(), 2);
}

TEST(CaptureHooks, AnErrorOfAHookLeavesTheFunctionUsable) {
  const at::Tensor weight = hooked_leaf();
  bool fails = false;
  int calls = 0;
  weight.register_hook([&](const at::Tensor&) {
    TORCH_CHECK_VALUE(!fails, "no gradient today");
    ++calls;
  });
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    (weight * x).sum().backward();
  });
  for (int i = 0; i < kHookCalls; ++i) {
    fails = i == 1 || i == 5;  // while recording, and in a replay
    if (fails) {
      EXPECT_THAT(error_text<c10::ValueError>([&] { step(filled(i)); }), HasSubstr("no gradient today"));
    } else {
      step(filled(i));
    }
  }
  EXPECT_EQ(calls, kHookCalls - 2);
  EXPECT_EQ(step.replays(), 3);
}

TEST(CaptureHooks, OnAnArgumentAreRefused) {
  const at::Tensor weight = hooked_leaf();
  auto step = capture([&](const at::Tensor& x) { (weight * x).sum().backward(); });
  const at::Tensor x = hooked_leaf();
  x.register_hook([](const at::Tensor&) {});
  step(x);
  try {
    step(x);
    FAIL() << "a hook on an argument was captured";
  } catch (const CaptureError& error) {
    EXPECT_EQ(error.report().kind, CaptureErrorKind::unsupported);
    EXPECT_THAT(error.what(), HasSubstr("the argument f32[3] came with a hook on its gradient"));
  }
}

/// What `leave`, which is given the leaf and a number to add to, does to the leaf at each call of a captured function.
std::string refusal_of_leaving(
    const std::function<void(const at::Tensor& weight, int& calls, const at::Tensor& x)>& leave) {
  const at::Tensor weight = hooked_leaf();
  int calls = 0;
  auto step = capture([&](const at::Tensor& x) { leave(weight, calls, x); });
  for (int i = 0; i < kHookCalls; ++i) {
    try {
      step(filled(i));
    } catch (const CaptureError& error) {
      EXPECT_EQ(error.report().kind, CaptureErrorKind::unsupported);
      return error.what_without_backtrace();
    }
  }
  return c10::str(step.replays(), " replays");
}

TEST(CaptureHooks, LeftOnATensorOfTheSurroundingsAreRefused) {
  const std::string refusal =
      "[capture] unsupported: the function puts a hook on the tensor f32[3] of its surroundings and leaves it there: "
      "one more at each call, but none at a replay\n"
      "  fix: register the hook once, before the captured function is called; or take it away again before the "
      "function returns, with remove_hook";
  const auto count = [](int& calls) { return [&calls](const at::Tensor&) { ++calls; }; };
  const auto backward = [](const at::Tensor& weight, const at::Tensor& x) {
    weight.mutable_grad().reset();
    (weight * x).sum().backward();
  };
  EXPECT_EQ(refusal_of_leaving([&](const at::Tensor& weight, int& calls, const at::Tensor& x) {
              weight.register_hook(count(calls));
              backward(weight, x);
            }),
            refusal);
  EXPECT_EQ(refusal_of_leaving([&](const at::Tensor& weight, int& calls, const at::Tensor& x) {
              backward(weight, x);
              weight.register_hook(count(calls));
            }),
            refusal);
  // For a backward that somebody else calls.
  EXPECT_EQ(refusal_of_leaving([&](const at::Tensor& weight, int& calls, const at::Tensor& x) {
              weight.register_hook(count(calls));
              const at::Tensor unused = x + 1;
            }),
            refusal);
}

TEST(CaptureHooks, TakenAwayAgainOrLeftOnceAreCalledAtEachReplay) {
  int calls = 0;
  const auto count = [&](const at::Tensor& grad) { return ++calls, grad * 2; };
  bool is_left = false;
  for (const bool once : {false, true}) {
    const at::Tensor weight = hooked_leaf();
    calls = 0;
    auto step = capture([&](const at::Tensor& x) {
      weight.mutable_grad().reset();
      const unsigned hook = once && is_left ? 0 : weight.register_hook(count);
      is_left = once;
      (weight * x).sum().backward();
      if (!once) weight.remove_hook(hook);
    });
    for (int i = 0; i < kHookCalls; ++i) {
      step(filled(i));
      EXPECT_EQ(calls, i + 1);
      EXPECT_TRUE(at::equal(weight.grad(), filled(i) * 2.F));
    }
    EXPECT_GE(step.replays(), kHookCalls - 4) << step.last_recapture_reason();
  }
}

TEST(CaptureHooks, ThatReturnAnotherShapeAreAnError) {
  const at::Tensor weight = hooked_leaf();
  auto step = capture([&](const at::Tensor& x) {
    const at::Tensor product = weight * x;
    product.register_hook([](const at::Tensor&) { return torch::ones({2}); });
    product.sum().backward();
  });
  EXPECT_ANY_THROW(step(filled(0)));
  const std::string text = error_text<c10::ValueError>([&] {
    const graph::GraphHooks hooks = {
        {std::make_shared<TensorHook>([](const at::TensorBase&) -> at::TensorBase { return torch::ones({2}); })}};
    const graph::HooksScope scope(hooks);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::call_hook", "");
    torch::jit::Stack stack = {torch::ones({3}), 0};
    op.callBoxed(stack);
  });
  EXPECT_THAT(text, HasSubstr("a hook was given the gradient f32[3] and returned f32[2]"));
}

TEST(CaptureHooks, ThatAreNotThereAreAnError) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("serried::call_hook", "");
  torch::jit::Stack stack = {torch::ones({3}), 4};
  EXPECT_THAT(error_text<c10::ValueError>([&] { op.callBoxed(stack); }), HasSubstr("hook 4 is not there"));
}

class CaptureHooksOnRanks : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, CaptureHooksOnRanks, ::testing::ValuesIn(testing::settings({2})), testing::name_of);

TEST_P(CaptureHooksOnRanks, RunBeforeDdpReduces) {
  on_ranks([](const Group& group) {
    std::vector<at::Tensor> gradients;
    for (const bool captured : {false, true}) {
      torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(5, 3); });
      int calls = 0;
      net->weight.register_hook([&](const at::Tensor& grad) { return grad * ++calls; });
      DistributedDataParallel ddp(net, {.process_group = group});
      const auto train = [&](const at::Tensor& x) {
        net->zero_grad();
        ddp(x).square().mean().backward();
      };
      auto step = capture(train);
      for (int i = 0; i < kHookCalls; ++i) {
        const at::Tensor x = torch::full({4, 5}, 1.F + float(i + group->getRank()));
        captured ? step(x) : train(x);
        gradients.push_back(net->weight.grad().clone());
      }
      EXPECT_EQ(calls, kHookCalls);
      if (captured) {
        EXPECT_GE(step.replays(), kHookCalls - 5) << step.last_recapture_reason();
      }
    }
    for (int i = 0; i < kHookCalls; ++i) EXPECT_TRUE(at::equal(gradients[i], gradients[kHookCalls + i])) << i;
  });
}

TEST_P(CaptureHooksOnRanks, GetDTensors) {
  on_ranks([](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"tp"}, {.group = group});
    torch::nn::Linear net = seeded(3, [] { return torch::nn::Linear(5, 3); });
    distribute_parameter(net->weight, mesh, {Shard(0)});
    distribute_parameter(net->bias, mesh, {Shard(0)});
    double scale = 0;
    net->weight.register_hook([&](const at::Tensor& grad) {
      EXPECT_NE(dtensor_meta(grad), nullptr);
      return grad * scale;
    });
    auto step = capture([&](const at::Tensor& x) {
      net->zero_grad();
      net(DTensor::from_local(x, mesh, {Replicate()})).sum().backward();
    });
    for (int i = 0; i < kHookCalls; ++i) {
      scale = 2 + i;
      step(torch::ones({4, 5}));
      const at::Tensor part = DTensor(net->weight.grad()).to_local();
      EXPECT_TRUE(at::equal(part, torch::full_like(part, 4 * scale)));
    }
    EXPECT_EQ(step.replays(), kHookCalls - 4) << step.last_recapture_reason();
  });
}

TEST_P(CaptureHooksOnRanks, OnADTensorThatTheFunctionMakesAreItsOwn) {
  on_ranks([](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"tp"}, {.group = group});
    int calls = 0;
    auto step = capture([&](const at::Tensor& x) {
      at::Tensor leaf = (DTensor::from_local(x, mesh, {Shard(0)}) * 2).detach().requires_grad_();
      leaf.register_hook([&](const at::Tensor& grad) {
        ++calls;
        return grad * 3;
      });
      leaf.square().sum().backward();
      return std::vector<at::Tensor>{leaf, leaf.grad()};
    });
    for (int i = 0; i < 6; ++i) {
      const at::Tensor x = torch::full({2, 3}, float(i));
      const std::vector<at::Tensor> results = step(x);
      EXPECT_TRUE(at::equal(DTensor(results[0]).to_local(), x * 2)) << i;
      EXPECT_TRUE(at::equal(DTensor(results[1]).to_local(), x * 12)) << i;
    }
    EXPECT_EQ(calls, 6);
    EXPECT_EQ(step.replays(), 3);
  });
}

}  // namespace
}  // namespace serried
