// What the host does behind the tape: stores into new tensors become constants, seeding a generator is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <functional>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"

namespace serried {
namespace {

using graph::CaptureError;
using graph::CaptureErrorKind;
using ::testing::HasSubstr;
using Fn = std::function<at::Tensor(const at::Tensor&)>;

/// Every call gives what `fn` itself gives, the last three as replays.
void expect_replays(const Fn& fn) {
  auto step = capture(fn);
  for (int i = 0; i < 6; ++i) {
    const at::Tensor x = torch::arange(20.).view({4, 5}) * (i + 1);
    EXPECT_TRUE(at::equal(step(x), fn(x))) << "call " << i;
  }
  EXPECT_EQ(step.replays(), 3) << step.last_recapture_reason();
}

CaptureError::Report refusal_of(const Fn& fn) {
  auto step = capture(fn);
  try {
    for (int i = 0; i < 6; ++i) step(torch::ones({4, 5}));
  } catch (const CaptureError& error) {
    return error.report();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

at::Tensor masked_by_hand(at::Tensor mask) {
  auto rows = mask.accessor<float, 2>();
  for (int64_t i = 0; i < mask.size(0); ++i) {
    for (int64_t k = i + 1; k < mask.size(1); ++k) rows[i][k] = -1e9f;
  }
  return mask;
}

TEST(HostWrites, IntoNewTensorsAreConstants) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> factories = {
      [](const at::Tensor&) { return torch::zeros({4, 5}); },
      [](const at::Tensor&) { return torch::ones({4, 5}); },
      [](const at::Tensor&) { return torch::full({4, 5}, 2.f); },
      [](const at::Tensor&) { return torch::eye(4, 5); },
      [](const at::Tensor& x) { return torch::zeros_like(x); },
      [](const at::Tensor& x) { return x.new_ones({4, 5}); },
      [](const at::Tensor& x) { return torch::full_like(x, 3.f); },
  };
  for (const auto& make : factories) {
    expect_replays([&](const at::Tensor& x) { return x + masked_by_hand(make(x)); });
    expect_replays([&](const at::Tensor& x) { return x + masked_by_hand(make(x))[1]; });
    expect_replays([&](const at::Tensor& x) { return masked_by_hand(make(x)).add_(x); });
    expect_replays([&](const at::Tensor& x) { return make(x).add_(x); });
  }
}

TEST(HostWrites, IntoAnEmptyTensorAreThereForOpsInPlace) {
  const auto filled = [] {
    at::Tensor rows = torch::empty({4, 1});
    for (int i = 0; i < 4; ++i) rows.data_ptr<float>()[i] = float(i);
    return rows;
  };
  expect_replays([&](const at::Tensor& x) { return filled().add_(x.sum()); });
  expect_replays([&](const at::Tensor& x) { return x * filled().mul_(2).exp_(); });
}

TEST(HostWrites, IntoANewTensorThatIsReturnedAreMadeAgain) {
  for (const bool is_empty : {false, true}) {
    auto step = capture([&](const at::Tensor&) {
      at::Tensor filled = is_empty ? torch::empty({3}) : torch::arange(3.f);
      for (int i = 0; i < 3; ++i) filled.data_ptr<float>()[i] = float(7 * i);
      return filled;
    });
    for (int i = 0; i < 6; ++i) {
      const at::Tensor filled = step(torch::ones({1}));
      EXPECT_TRUE(at::equal(filled, torch::arange(0., 21., 7.).to(at::kFloat))) << filled;
      filled.fill_(-1);  // the caller's own
    }
    EXPECT_EQ(step.replays(), 3);
  }
}

TEST(HostWrites, UntouchedFactoriesStayOps) {
  auto step = capture(
      [](const at::Tensor& x) {
        return x + torch::zeros({4, 5}) + torch::arange(5.f);
      },
      {.passes = {}});
  for (int i = 0; i < 4; ++i) step(torch::ones({4, 5}));
  EXPECT_EQ(step.graph().count("zeros"), 1);
  EXPECT_EQ(step.graph().count("arange"), 1);
}

TEST(HostWrites, ThatDifferFromCallToCallAreRefused) {
  float value = 0;
  const auto report = refusal_of([&](const at::Tensor& x) {
    at::Tensor filled = torch::ones({5});
    filled.data_ptr<float>()[2] = ++value;
    return x * filled;
  });
  EXPECT_EQ(report.kind, CaptureErrorKind::off_tape_tensor);
  EXPECT_THAT(report.explanation, HasSubstr("the tensor f32[5] that aten::mul.Tensor uses was made without an op"));
}

TEST(HostSeeds, OfTheDefaultGeneratorAreRefused) {
  const auto report = refusal_of([](const at::Tensor& x) {
    torch::manual_seed(3);
    return x + torch::randn({4, 5});
  });
  EXPECT_EQ(report.kind, CaptureErrorKind::unsupported);
  EXPECT_EQ(report.op, "aten::randn");
  EXPECT_EQ(report.explanation,
            "a generator was seeded with 3 inside of the function, and a replay would not do that again");
  EXPECT_THAT(report.hints.at(0), HasSubstr("seed before the call"));
}

TEST(HostSeeds, AtTheEndOfTheFunctionAreRefused) {
  const auto report = refusal_of([](const at::Tensor& x) {
    const at::Tensor y = x + torch::randn({4, 5});
    torch::manual_seed(5);
    return y;
  });
  EXPECT_THAT(report.explanation, HasSubstr("was seeded with 5"));
}

TEST(HostSeeds, OfAGeneratorOfOnesOwnAreRefused) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const auto report = refusal_of([&](const at::Tensor& x) {
    generator.set_current_seed(9);
    return x + at::randn({4, 5}, generator, at::TensorOptions());
  });
  EXPECT_THAT(report.explanation, HasSubstr("was seeded with 9"));
}

TEST(HostSeeds, NumbersDrawnOnTheHostAreRefused) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const auto report = refusal_of([&](const at::Tensor& x) {
    const at::Tensor y = x + at::randn({4, 5}, generator, at::TensorOptions());
    generator.get<at::CPUGeneratorImpl>()->random();
    return y;
  });
  EXPECT_EQ(report.explanation,
            "a generator was drawn from without an op inside of the function, and a replay would not do that again");
}

TEST(HostSeeds, BeforeTheCallAreFine) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const auto eager = [&](const at::Tensor& x) {
    return torch::dropout(x, 0.5, true) + torch::randn({4, 5}) + at::randn({5}, generator, at::TensorOptions());
  };
  auto step = capture(eager);
  const auto seeded_call = [&](auto& fn, int seed) {
    torch::manual_seed(seed);
    generator.set_current_seed(seed);
    return fn(torch::ones({4, 5}));
  };
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(at::equal(seeded_call(step, i / 2), seeded_call(eager, i / 2)));
  EXPECT_EQ(step.replays(), 3);
}

TEST(HostSeeds, RanksThatAreThreadsShareTheDefaultGenerator) {
  run_ranks(3, [](const Group&) {
    auto step = capture([](const at::Tensor& x) { return x + torch::rand({3}); });
    for (int i = 0; i < 6; ++i) {
      torch::manual_seed(i);
      step(torch::ones({3}));
    }
    EXPECT_EQ(step.replays(), 3);
  });
}

}  // namespace
}  // namespace serried
