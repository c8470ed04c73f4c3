// Tensors that a captured function leaves with its surroundings: refused, because a replay would leave none there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/optim/sgd.h"
#include "serried/tensor/dtensor.h"
#include "tests/graph/observed_programs.h"

namespace serried {
namespace {

using testing::copy_of;
using ::testing::HasSubstr;
using testing::numbers_of;
using testing::Observations;
using testing::refusal_of_program;

/// Calls `fn(x, kept)` eight times; what it returns and all that is in `kept` counts.
template <class Fn>
std::string refusal_of_keeping(Fn fn) {
  return refusal_of_program([&](auto make, Observations& seen) {
    std::vector<at::Tensor> kept(1);
    auto step = make([&](const at::Tensor& x) { return fn(x, kept); });
    for (int i = 0; i < 8; ++i) {
      seen.push_back(copy_of(step(numbers_of(i))));
      seen.push_back(copy_of(kept.back()));
      seen.push_back(torch::tensor(int64_t(kept.size())));
    }
  });
}

using Kept = std::vector<at::Tensor>;

TEST(CaptureKept, ATensorThatIsMadeAndStoredOutsideIsRefused) {
  EXPECT_EQ(
      refusal_of_keeping([](const at::Tensor& x, Kept& kept) {
        kept[0] = torch::tanh(x);
        return kept[0].sum();
      }),
      "[capture] unsupported: the tensor f32[4] that aten::tanh makes is kept by the surroundings of the function "
      "(a variable, a list, a gradient that was set by hand); a replay would not put a new one there\n"
      "  op: aten::tanh\n"
      "  line: %1 = tanh(%in0)  # f32[4]\n"
      "  fix: return it from the function, and keep it outside; or copy_ it into a tensor that lives longer than "
      "the call");
}

TEST(CaptureKept, EveryWayToKeepOneIsRefused) {
  const at::Tensor w = torch::ones({4}, at::requires_grad());
  const std::vector<std::function<at::Tensor(const at::Tensor&, Kept&)>> ways = {
      [](const at::Tensor& x, Kept& kept) {
        kept.push_back(x * 2);
        return kept.back().sum();
      },
      [](const at::Tensor& x, Kept& kept) {
        kept[0] = torch::tanh(x).detach();
        return x.sum();
      },
      [](const at::Tensor& x, Kept& kept) {
        const at::Tensor y = torch::tanh(x);
        kept[0] = y.view({2, 2});
        return y + 1;
      },
      [](const at::Tensor& x, Kept& kept) {
        const at::Tensor y = torch::tanh(x);
        kept[0] = y.data();
        return y + 1;
      },
      [](const at::Tensor& x, Kept& kept) { return kept[0] = x * 2; },  // returned as well
      [](const at::Tensor& x, Kept& kept) {
        kept[0] = x * 2;
        return kept[0].view({2, 2});
      },
      [](const at::Tensor& x, Kept& kept) {
        kept[0] = torch::full({2}, 3.0);
        return x + 1;
      },
      [](const at::Tensor& x, Kept& kept) {
        kept[0] = torch::tensor({1.f, 2.f});
        return x + 1;
      },
      [&](const at::Tensor& x, Kept& kept) {
        kept[0] = (x * w).detach();
        at::Tensor loss = (x * w).square().sum();
        loss.backward();
        return loss;
      },
      [&](const at::Tensor& x, Kept& kept) {
        kept[0] = x * w;
        at::Tensor loss = kept[0].square().sum();
        loss.backward();
        return loss;
      },
      [&](const at::Tensor& x, Kept& kept) {
        w.mutable_grad().reset();
        at::Tensor loss = (x * w).square().sum();
        loss.backward();
        kept[0] = w.grad();
        return loss;
      },
  };
  for (size_t i = 0; i < ways.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_THAT(refusal_of_keeping(ways[i]), HasSubstr("is kept by the surroundings of the function"));
    if (w.grad().defined()) w.mutable_grad().reset();
  }
}

TEST(CaptureKept, AnArgumentThatIsStoredOutsideIsRefused) {
  EXPECT_EQ(
      refusal_of_keeping([](const at::Tensor& x, Kept& kept) {
        kept[0] = x;
        return x.sum();
      }),
      "[capture] unsupported: argument 0, f32[4], is kept by the surroundings of the function (a variable, a "
      "list, a gradient); a replay would not put the next one there\n"
      "  fix: keep it outside, where the function is called; or copy_ it into a tensor that lives longer than the "
      "call");
  EXPECT_NE(refusal_of_keeping([](const at::Tensor& x, Kept& kept) {
              kept.push_back(x);
              return x.narrow(0, 0, 2);
            }),
            "");
  EXPECT_NE(refusal_of_keeping([](const at::Tensor& x, Kept& kept) {
              kept[0] = x.narrow(0, 0, 2);
              return x.sum();
            }),
            "");
  EXPECT_NE(refusal_of_keeping([](const at::Tensor& x, Kept& kept) {
              kept[0] = x;
              return x;
            }),
            "");
}

TEST(CaptureKept, AGradientThatIsSetByHandIsRefused) {
  const auto refusal_of_setting = [](auto gradient) {
    return refusal_of_program([&](auto make, Observations& seen) {
      const at::Tensor w = torch::ones({4}, at::requires_grad());  // no op meets it
      auto step = make([&](const at::Tensor& x) {
        w.mutable_grad() = gradient(x);
        return x.sum();
      });
      for (int i = 0; i < 8; ++i) {
        seen.push_back(step(numbers_of(i)));
        seen.push_back(copy_of(w.grad()));
      }
    });
  };
  EXPECT_THAT(refusal_of_setting([](const at::Tensor& x) { return x * 2; }), HasSubstr("is kept by the surroundings"));
  EXPECT_THAT(refusal_of_setting([](const at::Tensor& x) { return x; }), HasSubstr("argument 0, f32[4], is kept"));
}

TEST(CaptureKept, WhatIsWrittenByAnOpIsFine) {
  EXPECT_EQ(refusal_of_program([](auto make, Observations& seen) {
              const at::Tensor last = torch::zeros({4}), history = torch::zeros({8, 4}),
                               w = torch::ones({4}, at::requires_grad());
              auto step = make([&](const at::Tensor& x, const at::Tensor& i) {
                const at::Tensor y = torch::tanh(x * w);
                y.sum().backward();
                const at::NoGradGuard no_grad;
                last.copy_(y);
                history.index_copy_(0, i, y.unsqueeze(0));
                return y;
              });
              for (int i = 0; i < 8; ++i) {
                seen.push_back(copy_of(step(numbers_of(i), torch::tensor({i}))));
                for (const at::Tensor& t : {last, history, w.grad()}) seen.push_back(copy_of(t));
              }
            }),
            "");
}

// Results, their bases, gradients and what autograd keeps for results have holders that are known.
TEST(CaptureKept, ResultsAndGradientsAreNotKept) {
  const auto refusal_of_returning = [](auto fn) {
    return refusal_of_program([&](auto make, Observations& seen) {
      const at::Tensor w = torch::ones({4}, at::requires_grad());
      auto step = make([&](const at::Tensor& x) { return fn(x, w); });
      std::vector<std::vector<at::Tensor>> all;
      for (int i = 0; i < 8; ++i) {
        all.push_back(step(numbers_of(i)));
        for (const at::Tensor& t : all.back()) seen.push_back(copy_of(t));
        seen.push_back(copy_of(w.grad()));
      }
    });
  };
  using List = std::vector<at::Tensor>;
  EXPECT_EQ(refusal_of_returning([](const at::Tensor& x, const at::Tensor&) {
              const at::Tensor y = x * 2;
              return List{y, y, y.view({2, 2}), y.view({2, 2}).select(0, 1), x, x.narrow(0, 1, 2), x.detach()};
            }),
            "");
  EXPECT_EQ(refusal_of_returning([](const at::Tensor& x, const at::Tensor& w) {
              const at::Tensor y = torch::tanh(x * w), z = y.exp();
              z.sum().backward({}, /*retain_graph=*/true);
              (y * y).sum().backward({}, /*retain_graph=*/true);
              return List{y, z.view({2, 2}), w.grad()};
            }),
            "");
  EXPECT_EQ(refusal_of_returning([](const at::Tensor& x, const at::Tensor& w) {
              const at::Tensor y = (x * w).square().sum();
              const at::Tensor slope = torch::autograd::grad({y}, {w}, {}, true, /*create_graph=*/true)[0];
              (y + slope.square().sum()).backward();
              return List{y, slope};
            }),
            "");
  EXPECT_EQ(refusal_of_returning([](const at::Tensor& x, const at::Tensor& w) {
              const at::Tensor h = (x * 3).detach().requires_grad_();  // a leaf of the function's own
              (h * w).sum().backward();
              return List{h.grad(), h.detach()};
            }),
            "");
}

// As eager code gives it, and not a copy of its handle.
TEST(CaptureKept, ATensorOfTheSurroundingsThatIsReturnedIsThatOne) {
  const at::Tensor state = torch::zeros({4}), w = torch::ones({4}, at::requires_grad());
  auto step = capture([&](const at::Tensor& x) {
    state.add_(x);
    (w * x).sum().backward();
    return std::vector<at::Tensor>{state, w, w.grad(), x};
  });
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = numbers_of(i);
    const std::vector<at::Tensor> results = step(x);
    EXPECT_TRUE(results[0].is_same(state)) << i;
    EXPECT_TRUE(results[1].is_same(w)) << i;
    EXPECT_TRUE(results[2].is_same(w.grad())) << i;
    EXPECT_TRUE(results[3].is_same(x)) << i;
  }
  EXPECT_GE(step.replays(), 4);
}

TEST(CaptureKept, StateThatComesToLifeLateIsNotKept) {
  EXPECT_EQ(refusal_of_program([](auto make, Observations& seen) {
              torch::manual_seed(7);
              torch::nn::Linear first(4, 4), second(4, 1);
              torch::optim::SGD optimizer(first->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
              auto step = make([&](const at::Tensor& x) {
                first->zero_grad();
                second->zero_grad();
                const at::Tensor loss = second(first(x)).square().sum();
                loss.backward();
                optimizer.step();
                return loss;
              });
              for (int i = 0; i < 14; ++i) {
                if (i == 6) optimizer.add_param_group(torch::optim::OptimizerParamGroup(second->parameters()));
                seen.push_back(copy_of(step(numbers_of(i, {3, 4}))));
                seen.push_back(copy_of(second->weight));
              }
            }),
            "");
}

TEST(CaptureKept, ADTensorThatIsStoredOutsideIsRefused) {
  run_ranks(2, [](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = world});
    for (const bool keeps : {true, false}) {
      at::Tensor kept;
      auto step = capture([&](const at::Tensor& x) {
        const at::Tensor y = x * 2;
        if (keeps) kept = y;
        return y.sum();
      });
      std::string refusal;
      try {
        for (int i = 0; i < 8; ++i) step(distribute_tensor(torch::full({3, 2}, float(i)), mesh, {Shard(0)}));
      } catch (const graph::CaptureError& error) {
        refusal = error.what_without_backtrace();
      }
      EXPECT_EQ(refusal.find("is kept by the surroundings") != std::string::npos, keeps) << refusal;
    }
  });
}

// Eager code raises, so a replay must not go on with the copy.
TEST(CapturedArguments, AViewOfADTensorThatHasBecomeStaleRaises) {
  run_ranks(2, [](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = world});
    const at::Tensor base = distribute_tensor(torch::ones({5, 4}), mesh, {Shard(0)});
    at::Tensor flat = base.view({-1});
    auto by_argument = capture([](const at::Tensor& x) { return (x * 2).sum(); });
    auto by_itself = capture([&](const at::Tensor& x) { return (flat * 2).sum() + x.sum(); });
    for (int i = 0; i < 6; ++i) by_argument(flat), by_itself(torch::ones({2}));
    EXPECT_GE(by_argument.replays() + by_itself.replays(), 4);
    base.add_(1);
    EXPECT_THROW(by_argument(flat), c10::ValueError);
    EXPECT_THROW(by_itself(torch::ones({2})), c10::ValueError);
    flat = base.view({-1});
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(DTensor(by_argument(flat)).full_tensor().item<float>(), 80);
    }
  });
}

// Backends hold what they send a moment longer than the call lasts.
TEST(CaptureKept, WhatCollectivesHaveSentIsNotKept) {
  for (const char* backend : {"threads", "gloo"}) {
    const auto on_rank = [](const Group& world) {
      auto step = capture([&](const at::Tensor& x) {
        std::vector<at::Tensor> sent = {x * 2};
        world->allreduce(sent)->wait();
        return all_reduce(sent[0] + 1, world).sum();
      });
      for (int i = 0; i < 8; ++i) {
        const at::Tensor sum = step(torch::full({3}, float(i)));
        EXPECT_TRUE(at::equal(sum, torch::full({3}, 2 * (4 * float(i) + 1)).sum())) << i;
      }
      EXPECT_GE(step.replays(), 4);
    };
    run_ranks(2, on_rank, {.backend = backend});
  }
}

}  // namespace
}  // namespace serried
