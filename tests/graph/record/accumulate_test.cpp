// Captured functions that add to gradients, that ask for gradients, and that run backward twice.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/graph/observed_programs.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

constexpr int kMicroSteps = 4;

struct Accumulator {
  Accumulator()
      : net(seeded(
            1,
            [] { return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::ReLU(), torch::nn::Linear(7, 3)); })),
        optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)) {}

  at::Tensor accumulate(const at::Tensor& x) {
    at::Tensor loss = net->forward(x).square().mean();
    loss.backward();
    return loss;
  }

  torch::nn::Sequential net;
  torch::optim::SGD optimizer;
};

void expect_equal_accumulators(Accumulator& actual, Accumulator& expected) {
  const auto parameters = actual.net->parameters(), wanted = expected.net->parameters();
  for (size_t k = 0; k < wanted.size(); ++k) {
    EXPECT_TRUE(at::equal(parameters[k], wanted[k]));
    ASSERT_EQ(parameters[k].grad().defined(), wanted[k].grad().defined());
    if (!wanted[k].grad().defined()) continue;
    EXPECT_TRUE(at::equal(parameters[k].grad(), wanted[k].grad()));
    EXPECT_EQ(parameters[k].grad()._version(), wanted[k].grad()._version());
  }
}

struct AccumulatorCounts {
  int64_t captures = 0;
  int64_t replays_of_last_round = 0;
};

AccumulatorCounts accumulate_as_eager(int rounds, int micro_steps, bool set_to_none) {
  Accumulator eager, trainer;
  auto step = capture([&](const at::Tensor& x) { return trainer.accumulate(x); });
  int64_t replays = 0;
  for (int round = 0; round < rounds; ++round) {
    replays = step.replays();
    for (int i = 0; i < micro_steps; ++i) {
      const at::Tensor x = torch::randn({4, 5});
      EXPECT_TRUE(at::equal(step(x), eager.accumulate(x))) << "round " << round << ", step " << i;
      expect_equal_accumulators(trainer, eager);
    }
    for (Accumulator* each : {&trainer, &eager}) {
      each->optimizer.step();
      each->optimizer.zero_grad(set_to_none);
    }
    expect_equal_accumulators(trainer, eager);
  }
  return {step.captures(), step.replays() - replays};
}

TEST(CaptureAccumulates, WithGradientsDroppedBetweenRounds) {
  const AccumulatorCounts counts = accumulate_as_eager(4, kMicroSteps, /*set_to_none=*/true);
  EXPECT_EQ(counts.captures, 2);
  EXPECT_EQ(counts.replays_of_last_round, kMicroSteps);
}

TEST(CaptureAccumulates, WithTwoMicroSteps) {
  const AccumulatorCounts counts = accumulate_as_eager(6, 2, /*set_to_none=*/true);
  EXPECT_EQ(counts.captures, 2);
  EXPECT_EQ(counts.replays_of_last_round, 2);
}

TEST(CaptureAccumulates, WithGradientsZeroedBetweenRounds) {
  const AccumulatorCounts counts = accumulate_as_eager(3, kMicroSteps, /*set_to_none=*/false);
  EXPECT_EQ(counts.captures, 1);
  EXPECT_EQ(counts.replays_of_last_round, kMicroSteps);
}

TEST(CaptureAccumulates, WithGradientsZeroedInside) {
  Accumulator eager, trainer;
  const auto train = [](Accumulator& it, const at::Tensor& x) {
    it.optimizer.zero_grad(/*set_to_none=*/false);
    const at::Tensor loss = it.accumulate(x);
    it.optimizer.step();
    return loss;
  };
  auto step = capture([&](const at::Tensor& x) { return train(trainer, x); });
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = torch::randn({4, 5});
    EXPECT_TRUE(at::equal(step(x), train(eager, x)));
    expect_equal_accumulators(trainer, eager);
  }
  EXPECT_GE(step.replays(), 4) << step.last_recapture_reason();
}

// Module::zero_grad looks at each gradient once more before it drops it. Whose they are shows in the second recording;
// the graph needs none of them.
TEST(CaptureAccumulates, WithGradientsDroppedInsideByTheModule) {
  Accumulator eager, trainer;
  const auto train = [](Accumulator& it, const at::Tensor& x) {
    it.net->zero_grad();
    return it.accumulate(x);
  };
  auto step = capture([&](const at::Tensor& x) { return train(trainer, x); });
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = torch::randn({4, 5});
    EXPECT_TRUE(at::equal(step(x), train(eager, x)));
    expect_equal_accumulators(trainer, eager);
  }
  EXPECT_EQ(step.replays(), 4) << step.last_recapture_reason();
  const auto& inputs = step.graph().inputs();
  EXPECT_EQ(std::count(inputs.begin(), inputs.end(), graph::kNoValue), 4) << step.graph().to_string();
}

// zero_grad() in both its forms, in any order.
TEST(CaptureAccumulates, WithGradientsDroppedAndZeroedInTurn) {
  for (const int period : {1, 2, 3}) {
    for (const bool first : {false, true}) {
      for (const int micro_steps : {1, 2, 3}) {
        SCOPED_TRACE(c10::str("period ", period, ", first ", first, ", ", micro_steps, " steps"));
        Accumulator eager, trainer;
        auto step = capture([&](const at::Tensor& x) { return trainer.accumulate(x); });
        for (int i = 0; i < 30; ++i) {
          const at::Tensor x = torch::randn({4, 5});
          EXPECT_TRUE(at::equal(step(x), eager.accumulate(x))) << "step " << i;
          expect_equal_accumulators(trainer, eager);
          if (i % micro_steps != 0) continue;
          for (Accumulator* each : {&trainer, &eager}) {
            each->optimizer.step();
            each->optimizer.zero_grad((i / micro_steps / period % 2 == 0) == first);
          }
        }
        EXPECT_GE(step.replays(), 20);
      }
    }
  }
}

constexpr int kZeroStyles = 5;
constexpr int kStylesByHand = 4;

void zero_by_hand(at::Tensor& grad, const at::Tensor& parameter, int style) {
  if (style == 0) grad = at::Tensor();
  if (style == 1) grad = torch::zeros_like(parameter);
  if (style == 2 && grad.defined()) grad.zero_();
  if (style == 3 && grad.defined()) grad.detach_().zero_();
}

// 0: not at all. 1 and 3: dropped. 3 and 4 by the module, which looks at each gradient first. From 5 on by hand.
void zero_in_style(torch::optim::Optimizer& optimizer, torch::nn::Module& net, int style) {
  if (style == 1 || style == 2) optimizer.zero_grad(/*set_to_none=*/style == 1);
  if (style == 3 || style == 4) net.zero_grad(/*set_to_none=*/style == 3);
  if (style < kZeroStyles) return;
  for (const at::Tensor& parameter : net.parameters()) {
    zero_by_hand(parameter.mutable_grad(), parameter, style - kZeroStyles);
  }
}

struct ZeroStyles {
  int before, after;     // inside of the function
  int outside, another;  // in turn, between calls
  int micro_steps = 1;   // inside
};

std::string mixed_refusal(const ZeroStyles& styles, int period) {
  Accumulator eager, trainer;
  const auto train = [&](Accumulator& it, const at::Tensor& x) {
    zero_in_style(it.optimizer, *it.net, styles.before);
    at::Tensor loss = it.accumulate(x);
    for (int i = 1; i < styles.micro_steps; ++i) loss = it.accumulate(x * i);
    it.optimizer.step();
    zero_in_style(it.optimizer, *it.net, styles.after);
    return loss;
  };
  auto step = capture([&](const at::Tensor& x) { return train(trainer, x); });
  for (int i = 0; i < 20; ++i) {
    const at::Tensor x = torch::randn({4, 5});
    try {
      EXPECT_TRUE(at::equal(step(x), train(eager, x))) << "call " << i;
    } catch (const graph::CaptureError& error) {
      return c10::str("call ", i, ": ", error.what_without_backtrace());
    }
    expect_equal_accumulators(trainer, eager);
    for (Accumulator* each : {&trainer, &eager}) {
      zero_in_style(each->optimizer, *each->net, i / period % 2 == 0 ? styles.outside : styles.another);
    }
  }
  EXPECT_GE(step.replays(), 8) << step.last_recapture_reason();
  return "";
}

TEST(CaptureAccumulates, WithEveryMixtureOfZeroGrad) {
  for (int n = 0; n < kZeroStyles * kZeroStyles * kZeroStyles * kZeroStyles; ++n) {
    const ZeroStyles styles{n % 5, n / 5 % 5, n / 25 % 5, n / 125};
    for (const int period : {1, 3}) {
      SCOPED_TRACE(c10::str("inside ", styles.before, ", ", styles.after, ", outside ", styles.outside, ", ",
                            styles.another, ", period ", period));
      EXPECT_EQ(mixed_refusal(styles, period), "");
    }
  }
}

// A sample of all mixtures, over several micro-batches. Without any zeroing, which is the first, numbers grow to NaN.
TEST(CaptureAccumulates, WithGradientsZeroedByHand) {
  constexpr int kAll = kZeroStyles + kStylesByHand, kStride = 53;
  for (int n = 1; n < kAll * kAll * kAll * kAll; n += kStride) {
    const ZeroStyles styles{n % kAll, n / kAll % kAll, n / kAll / kAll % kAll, n / kAll / kAll / kAll, 2 + n % 3};
    SCOPED_TRACE(c10::str("inside ", styles.before, ", ", styles.after, ", outside ", styles.outside, ", ",
                          styles.another, ", ", styles.micro_steps, " steps"));
    EXPECT_EQ(mixed_refusal(styles, 1 + n % 2), "");
  }
}

class CapturedAccumulation : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, CapturedAccumulation, ::testing::ValuesIn(testing::settings({1, 2, 3})),
                         testing::name_of);

/// What a DDP step over micro-batches leaves after each call: losses, parameters, gradients.
std::vector<at::Tensor> trace_of(const Group& group, const ZeroStyles& styles, bool as_view, bool captured) {
  Accumulator it;
  DistributedDataParallel ddp(it.net, {.process_group = group, .gradient_as_bucket_view = as_view});
  const auto accumulate = [&](const at::Tensor& x) {
    const at::Tensor loss = ddp(x).square().mean();
    loss.backward();
    return loss.detach();
  };
  const auto train = [&](const at::Tensor& x) {
    zero_in_style(it.optimizer, *it.net, styles.before);
    for (int i = 1; i < styles.micro_steps; ++i) {
      const auto alone = ddp.no_sync();
      accumulate(x * i);
    }
    const at::Tensor loss = accumulate(x);
    it.optimizer.step();
    zero_in_style(it.optimizer, *it.net, styles.after);
    return loss;
  };
  auto step = capture(train);
  std::vector<at::Tensor> trace;
  for (int i = 0; i < 14; ++i) {
    const at::Tensor x = seeded(uint64_t(10 * i + group->getRank()), [] { return torch::randn({4, 5}); });
    trace.push_back(captured ? step(x) : train(x));
    for (const at::Tensor& parameter : it.net->parameters()) {
      trace.push_back(parameter.detach().clone());
      trace.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::empty({0}));
    }
    zero_in_style(it.optimizer, *it.net, i % 3 == 0 ? styles.outside : styles.another);
  }
  if (captured) {
    EXPECT_GE(step.replays(), 4) << step.last_recapture_reason();
  }
  return trace;
}

TEST_P(CapturedAccumulation, OfDdpTakesEveryMixtureOfZeroGrad) {
  on_ranks([](const Group& group) {
    constexpr int kAll = kZeroStyles + kStylesByHand, kStride = 61;
    for (int n = group->getSize(); n < kAll * kAll * kAll; n += kStride) {
      const ZeroStyles styles{n % kAll, n / kAll % kAll, n / kAll / kAll, 0, 2 + n % 3};
      SCOPED_TRACE(c10::str("inside ", styles.before, ", ", styles.after, ", outside ", styles.outside, ", ",
                            styles.micro_steps, " steps"));
      // Module::zero_grad(false) gives views of buckets new handles, and each call is recorded: right, but not
      // replayed.
      const bool as_view = n % 2 == 0 && styles.after != 4;
      const std::vector<at::Tensor> eager = trace_of(group, styles, as_view, /*captured=*/false);
      const std::vector<at::Tensor> actual = trace_of(group, styles, as_view, /*captured=*/true);
      for (size_t i = 0; i < eager.size(); ++i) ASSERT_TRUE(at::equal(actual[i], eager[i])) << i;
    }
  });
}

// In turn views of DDP's buckets, and tensors of their own: DDP runs other ops for them.
TEST_P(CapturedAccumulation, OfDdpTakesGradientsOfOtherMemoryInTurn) {
  on_ranks([](const Group& group) {
    std::vector<at::Tensor> traces[2];
    for (const bool captured : {false, true}) {
      Accumulator it;
      DistributedDataParallel ddp(it.net, {.process_group = group, .gradient_as_bucket_view = true});
      const auto train = [&](const at::Tensor& x) { ddp(x).square().mean().backward(); };
      auto step = capture(train);
      for (int i = 0; i < 24; ++i) {
        const at::Tensor x = seeded(uint64_t(10 * i + group->getRank()), [] { return torch::randn({4, 5}); });
        captured ? step(x) : train(x);
        it.optimizer.step();
        for (const at::Tensor& parameter : it.net->parameters()) {
          traces[captured].push_back(parameter.detach().clone());
          if (i % 3 == 0) parameter.mutable_grad() = parameter.grad() * 0.5;
          if (i % 3 == 1) parameter.mutable_grad().reset();
        }
      }
      if (captured) {
        EXPECT_GE(step.replays(), 10) << step.last_recapture_reason();
      }
    }
    for (size_t i = 0; i < traces[0].size(); ++i) ASSERT_TRUE(at::equal(traces[1][i], traces[0][i])) << i;
  });
}

// Used by the step, and dropped before the end of the call.
TEST(CaptureAccumulates, IntoGradientsThatTakeThePlaceOfThoseItUsed) {
  Accumulator eager, trainer;
  const auto train = [](Accumulator& it, const at::Tensor& x) {
    it.optimizer.step();
    zero_in_style(it.optimizer, *it.net, kZeroStyles + 1);
    return it.accumulate(x);
  };
  auto step = capture([&](const at::Tensor& x) { return train(trainer, x); });
  for (int i = 0; i < 10; ++i) {
    const at::Tensor x = torch::randn({4, 5});
    EXPECT_TRUE(at::equal(step(x), train(eager, x))) << i;
    expect_equal_accumulators(trainer, eager);
  }
  EXPECT_GE(step.replays(), 5) << step.last_recapture_reason();
}

TEST(CaptureAccumulates, IntoAGradientThatTheUserGave) {
  const at::Tensor weight = torch::ones({3}, at::requires_grad());
  auto step = capture([&](const at::Tensor& x) { (weight * x).sum().backward(); });
  for (int i = 0; i < 6; ++i) {
    at::Tensor given = torch::full({3}, 10.F * float(i));
    weight.mutable_grad() = given;
    step(torch::ones({3}));
    EXPECT_TRUE(weight.grad().is_same(given));
    EXPECT_TRUE(at::equal(given, torch::full({3}, 10.F * float(i) + 1)));
  }
  EXPECT_EQ(step.replays(), 3);
  // Of another layout: recorded anew, not misread.
  weight.mutable_grad() = torch::zeros({6}).slice(0, 0, 6, 2);
  step(torch::ones({3}));
  EXPECT_TRUE(at::equal(weight.grad(), torch::ones({3})));
  EXPECT_EQ(step.replays(), 3);
}

TEST(CaptureAccumulates, IntoTheGradientOfAnArgument) {
  auto step = capture([](const at::Tensor& x) { x.square().sum().backward(); });
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = torch::full({3}, float(i)).requires_grad_();
    step(x);
    ASSERT_TRUE(x.grad().defined()) << i;
    EXPECT_TRUE(at::equal(x.grad(), 2 * x));
  }
  EXPECT_EQ(step.replays(), 3);
}

TEST(CaptureGradients, OfAutogradGrad) {
  const at::Tensor weight = torch::ones({3}, at::requires_grad());
  at::Tensor expected = torch::ones({3});
  auto step = capture([&](const at::Tensor& x) {
    const at::Tensor loss = (weight * x).square().sum();
    const at::Tensor grad = torch::autograd::grad({loss}, {weight})[0];
    const at::NoGradGuard no_grad;
    weight.sub_(grad * 0.25);
    return grad;
  });
  for (int i = 0; i < 7; ++i) {
    const at::Tensor x = torch::full({3}, 0.5F * float(i));
    const at::Tensor grad = 2 * (expected * x) * x;
    EXPECT_TRUE(at::equal(step(x), grad)) << i;
    expected = expected - grad * 0.25;
    EXPECT_TRUE(at::equal(weight, expected));
    EXPECT_FALSE(weight.grad().defined());
  }
  EXPECT_EQ(step.replays(), 4);
}

TEST(CaptureGradients, OfGradients) {
  const at::Tensor weight = torch::arange(3, at::kFloat).requires_grad_();
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    const at::Tensor loss = (weight * x).pow(3).sum();
    const at::Tensor grad =
        torch::autograd::grad({loss}, {weight}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    grad.square().sum().backward();
  });
  for (int i = 0; i < 7; ++i) {
    const at::Tensor x = torch::full({3}, 1.F + float(i));
    step(x);
    // grad = 3 w^2 x^3, and the gradient of its square is 36 w^3 x^6.
    EXPECT_TRUE(torch::allclose(weight.grad(), 36 * weight.detach().pow(3) * x.pow(6)));
  }
  EXPECT_EQ(step.replays(), 4);
}

TEST(CaptureGradients, OfTwoBackwardsOfOneGraph) {
  const at::Tensor weight = torch::arange(3, at::kFloat).requires_grad_();
  auto step = capture([&](const at::Tensor& x) {
    weight.mutable_grad().reset();
    const at::Tensor loss = (weight * x).square().sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return loss;
  });
  for (int i = 0; i < 7; ++i) {
    const at::Tensor x = torch::full({3}, 1.F + float(i));
    step(x);
    EXPECT_TRUE(at::equal(weight.grad(), 2 * (2 * weight.detach() * x.square())));
  }
  EXPECT_EQ(step.replays(), 4);
}

TEST(CaptureAccumulates, IntoGradientsThatChangePlaces) {
  const std::string refusal = testing::refusal_of_program([](auto make, testing::Observations& seen) {
    const at::Tensor w = torch::ones({4}, at::requires_grad()), v = torch::ones({4}, at::requires_grad());
    auto step = make([&](const at::Tensor& x) {
      (w * x + v * x * 2).sum().backward();
      std::swap(w.mutable_grad(), v.mutable_grad());
    });
    for (int i = 0; i < 10; ++i) {
      step(testing::numbers_of(i));
      for (const at::Tensor& t : {w, v}) seen.push_back(testing::copy_of(t.grad()));
    }
  });
  EXPECT_EQ(refusal, "");
}

}  // namespace
}  // namespace serried
