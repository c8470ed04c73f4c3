// Arguments that share memory with what the function finds by itself: the right result, or a refusal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/groups/ranks.h"
#include "serried/tensor/dtensor.h"
#include "tests/graph/captured_calls.h"

namespace serried {
namespace {

using testing::compare_with_eager;
using testing::Comparison;
using ::testing::HasSubstr;
using testing::Surroundings;

at::Tensor numbers(int64_t n, float first = 1) {
  return torch::arange(first, first + float(n));
}

Surroundings one_weight() {
  return {{numbers(3), numbers(3, 5)}};
}

TEST(CaptureSharing, AnArgumentThatIsAWeightOfTheFunction) {
  // Recorded with the weight itself, then with others.
  const Comparison with_weight = compare_with_eager(
      one_weight, [](Surroundings& s, const at::Tensor& x) { return x * s[0]; },
      [](Surroundings& s, int call) { return call < 5 ? s[0] : numbers(3, float(call)); }, 12);
  EXPECT_EQ(with_weight.refusal, "");
  EXPECT_GE(with_weight.replays, 4);
  // The other way round, and in turn.
  for (const int period : {2, 3, 5}) {
    const Comparison in_turn = compare_with_eager(
        one_weight, [](Surroundings& s, const at::Tensor& x) { return x * s[0]; },
        [=](Surroundings& s, int call) { return call % period == 0 ? s[0] : numbers(3, float(call)); }, 16);
    EXPECT_EQ(in_turn.refusal, "");
    EXPECT_GE(in_turn.replays, 4);
  }
}

// Seen and right in every call; and not only because nothing was ever replayed.
void expect_right(const Comparison& result) {
  EXPECT_EQ(result.refusal, "");
  EXPECT_GE(result.replays, 1);
}

TEST(CaptureSharing, OneOfTwoWeightsInTurn) {
  expect_right(compare_with_eager(
      one_weight, [](Surroundings& s, const at::Tensor& x) { return x * s[0] + s[1]; },
      [](Surroundings& s, int call) { return s[size_t(call) % 2]; }, 16));
  expect_right(compare_with_eager(
      one_weight, [](Surroundings& s, const at::Tensor& x) { return x * s[0] + s[1]; },
      [](Surroundings& s, int call) { return s[size_t(call) / 5 % 2]; }, 16));
}

TEST(CaptureSharing, ViewsOfADataSetThatTheFunctionUsesAsAWhole) {
  // s[0] is the one for training, s[1] the one for tests.
  const auto make = [] { return Surroundings{{numbers(24).view({8, 3}), numbers(24, 100).view({8, 3})}}; };
  const auto centred = [](Surroundings& s, const at::Tensor& x) { return x - s[0].mean(0); };
  const Comparison result = compare_with_eager(
      make, centred, [](Surroundings& s, int call) { return s[call < 6 ? 0 : 1].narrow(0, call % 4, 2); }, 12);
  EXPECT_EQ(result.refusal, "");
  EXPECT_GE(result.replays, 4);
}

TEST(CaptureSharing, ATensorThatTheFunctionWritesIsAnArgumentLater) {
  const auto update = [](Surroundings& s, const at::Tensor& x) {
    const at::Tensor before = x * 2;
    s[0].add_(1);
    const at::Tensor after = x * 3;
    s[1].copy_(before + after);
    return before - after;
  };
  for (const size_t which : {0, 1}) {
    expect_right(compare_with_eager(
        one_weight, update,
        [=](Surroundings& s, int call) { return call < 5 || call % 2 ? numbers(3, float(call)) : s[which]; }, 14));
  }
}

TEST(CaptureSharing, AnArgumentThatIsWrittenIsAWeightLater) {
  expect_right(compare_with_eager(
      one_weight,
      [](Surroundings& s, const at::Tensor& x) {
        const at::Tensor before = s[0] * 2;
        x.add_(1);
        return before + s[0];
      },
      [](Surroundings& s, int call) { return call < 5 ? numbers(3, float(call)) : s[0]; }, 10));
}

TEST(CaptureSharing, AParameterAndAliasesOfItAsArguments) {
  const auto make = [] { return Surroundings{{numbers(3).requires_grad_()}}; };
  const auto train = [](Surroundings& s, const at::Tensor& x) {
    s[0].mutable_grad().reset();
    const at::Tensor loss = (x * s[0]).sin().sum();
    loss.backward();
    const at::NoGradGuard no_grad;
    s[0].sub_(s[0].grad() * 0.001);
    return loss.detach();
  };
  const std::vector<std::function<at::Tensor(Surroundings&)>> aliases = {
      [](Surroundings& s) { return s[0]; },
      [](Surroundings& s) { return s[0].detach(); },
      [](Surroundings& s) { return s[0].detach().slice(0, 0, 3); },
      [](Surroundings& s) { return s[0].detach().requires_grad_(); },
      [](Surroundings& s) { return s[0].grad().defined() ? s[0].grad() : numbers(3); },
  };
  for (size_t i = 0; i < aliases.size(); ++i) {
    SCOPED_TRACE(i);
    const auto& alias = aliases[i];
    expect_right(compare_with_eager(
        make, train, [&](Surroundings& s, int) { return alias(s); }, 8));
    expect_right(compare_with_eager(
        make, train, [&](Surroundings& s, int call) { return call < 5 ? alias(s) : numbers(3); }, 12));
    expect_right(compare_with_eager(
        make, train, [&](Surroundings& s, int call) { return call < 5 ? numbers(3) : alias(s); }, 12));
  }
}

TEST(CaptureSharing, AGradientThatTheFunctionAddsToIsAnArgument) {
  const auto make = [] { return Surroundings{{numbers(3).requires_grad_()}}; };
  const auto accumulate = [](Surroundings& s, const at::Tensor& x) {
    (s[0] * s[0] * x.detach()).sum().backward();
    return x * 2;
  };
  const auto given = [](Surroundings& s) { return s[0].grad().defined() ? s[0].grad() : numbers(3); };
  expect_right(compare_with_eager(
      make, accumulate, [&](Surroundings& s, int call) { return call < 6 ? numbers(3) : given(s); }, 10));
  expect_right(compare_with_eager(
      make, accumulate, [&](Surroundings& s, int call) { return call < 6 ? given(s) : numbers(3); }, 10));
}

TEST(CaptureSharing, AGradientThatIsHeldAndReplaced) {
  // s[1] is a second name of the gradient, until the gradient is another tensor.
  const auto make = [] {
    Surroundings s{{numbers(3).requires_grad_(), torch::zeros({3})}};
    s[0].mutable_grad() = s[1];
    return s;
  };
  const auto use = [](Surroundings& s, const at::Tensor& x) {
    (s[0] * x).sum().backward();
    return s[1] * 2;
  };
  expect_right(compare_with_eager(
      make, use,
      [](Surroundings& s, int call) {
        if (call == 5) s[0].mutable_grad() = torch::zeros({3});
        return numbers(3);
      },
      10));
}

TEST(CaptureSharing, TwoArgumentsThatLieOtherwiseInOneMemory) {
  const auto eager = [](const at::Tensor& a, const at::Tensor& b) {
    const at::Tensor before = a * 2;
    b.add_(1);
    return before + a * b;
  };
  auto step = capture(eager);
  const std::vector<std::pair<int, int>> offsets = {{0, 0}, {0, 0}, {0, 0}, {0, 0}, {0, 2}, {0, 2}, {0, 2},
                                                    {0, 1}, {1, 3}, {1, 3}, {2, 0}, {0, 0}, {0, 4}, {2, 2}};
  for (const auto& [first, second] : offsets) {
    const at::Tensor whole = numbers(6), same = whole.clone();
    const at::Tensor actual = step(whole.narrow(0, first, 2), whole.narrow(0, second, 2));
    EXPECT_TRUE(at::equal(actual, eager(same.narrow(0, first, 2), same.narrow(0, second, 2)))) << first << second;
    EXPECT_TRUE(at::equal(whole, same)) << first << second;
  }
}

TEST(CaptureSharing, AViewOfTheArgumentThatWasMadeOutsideIsRefused) {
  at::Tensor row;
  auto step = capture([&](const at::Tensor& x) { return x * row; });
  std::string refusal;
  for (int i = 0; i < 6 && refusal.empty(); ++i) {
    const at::Tensor x = numbers(12).view({4, 3});
    row = x[1];
    try {
      EXPECT_TRUE(at::equal(step(x), x * row)) << i;
    } catch (const graph::CaptureError& error) {
      refusal = error.what_without_backtrace();
    }
  }
  EXPECT_EQ(refusal,
            "[capture] tensor made off the tape: the tensor f32[3] that aten::mul.Tensor uses shares memory with "
            "input 0, f32[4, 3], and was made outside of the function\n"
            "  op: aten::mul.Tensor\n"
            "  line: %2 = mul(%in0, %1)  # f32[4, 3]\n"
            "  fix: make the view inside of the captured function; or pass it to the function as an argument too");
}

TEST(CaptureSharing, ArgumentsInContainers) {
  at::Tensor weight = numbers(3);
  const auto eager = [&](const std::vector<at::Tensor>& xs) { return xs[0] * weight + xs[1]; };
  auto step = capture(eager);
  for (int i = 0; i < 14; ++i) {
    const std::vector<at::Tensor> xs = {i % 7 < 4 ? numbers(3, float(i)) : weight, i > 9 ? weight : numbers(3)};
    EXPECT_TRUE(at::equal(step(xs), eager(xs))) << i;
  }
}

TEST(CaptureSharing, PartsOfDTensors) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    const auto sharded = [&](float first) {
      return distribute_tensor(numbers(5, first), mesh, {Shard(0)}, {.source = {}});
    };
    const at::Tensor weight = sharded(1);
    const auto eager = [&](const at::Tensor& x) { return x * weight; };
    auto step = capture(eager);
    for (int i = 0; i < 14; ++i) {
      const at::Tensor x = i < 5 || i % 5 == 0 ? weight : sharded(float(i));
      EXPECT_TRUE(at::equal(DTensor(step(x)).to_local(), DTensor(eager(x)).to_local())) << i;
    }
    EXPECT_GE(step.replays(), 4);
  });
}

TEST(CaptureSharing, WhyItIsRecordedAnewIsSaid) {
  const at::Tensor weight = numbers(3);
  auto step = capture([&](const at::Tensor& x) { return x * weight; });
  for (int i = 0; i < 4; ++i) step(numbers(3));
  EXPECT_TRUE(at::equal(step(weight), weight * weight));
  EXPECT_EQ(step.last_recapture_reason(), "memory of input 0 was its own and is that of a tensor the function uses");
  auto fixed = capture([&](const at::Tensor& x) { return x * 2; });
  for (int i = 0; i < 4; ++i) fixed(weight);
  EXPECT_TRUE(at::equal(fixed(numbers(3, 7)), numbers(3, 7) * 2));
  EXPECT_EQ(fixed.last_recapture_reason(), "input 0 was one tensor in all recordings and is another one");
  EXPECT_EQ(fixed.captures(), 1);  // the same graph, for all inputs now
  EXPECT_TRUE(at::equal(fixed(numbers(3, 8)), numbers(3, 8) * 2));
  EXPECT_EQ(fixed.replays(), 2);
}

}  // namespace
}  // namespace serried
