// What a captured function does to its arguments without an op, and arguments that come with a history or share memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/graph/observed_programs.h"

namespace serried {
namespace {

using testing::copy_of;
using ::testing::HasSubstr;
using testing::numbers_of;
using testing::Observations;
using testing::refusal_of_program;

at::Tensor flag(bool on) {
  return torch::tensor(on);
}

/// Calls a function of one tensor, which it may change, eight times with another one.
template <class Fn>
std::string refusal_of_changing(Fn fn) {
  return refusal_of_program([&](auto make, Observations& seen) {
    auto step = make(fn);
    for (int i = 0; i < 8; ++i) {
      at::Tensor x = numbers_of(i);
      seen.push_back(copy_of(step(x)));
      seen.push_back(copy_of(x));
      seen.push_back(flag(x.defined() && x.requires_grad()));
    }
  });
}

TEST(CapturedArguments, OneThatTheFunctionReplacesIsRefused) {
  const std::string refusal = refusal_of_changing([](at::Tensor& x) {
    x = x * 2;
    return x.sum();
  });
  EXPECT_EQ(refusal,
            "[capture] unsupported: the function puts another tensor in the place of argument 0, f32[4] (x = ..., "
            "reset(), swap); a replay would leave the caller's variable as it is\n"
            "  fix: return the new tensor; or copy_ into the old one");
  EXPECT_NE(refusal_of_changing([](at::Tensor& x) {
              const at::Tensor sum = x.sum();
              x.reset();
              return sum;
            }),
            "");
}

TEST(CapturedArguments, OneThatTheFunctionMakesIsRefused) {
  const std::string refusal = refusal_of_program([](auto make, Observations& seen) {
    auto step = make([](const at::Tensor& x, at::Tensor& y) {
      y = x * 2;
      return x + 1;
    });
    for (int i = 0; i < 8; ++i) {
      at::Tensor y;
      seen.push_back(step(numbers_of(i), y));
      seen.push_back(copy_of(y));
    }
  });
  EXPECT_THAT(refusal, HasSubstr("in the place of argument 1, which was undefined (x = ..."));
}

TEST(CapturedArguments, ElementsThatTheFunctionReplacesOrAddsAreRefused) {
  const auto refusal_of_list = [](auto change) {
    return refusal_of_program([&](auto make, Observations& seen) {
      auto step = make([&](std::vector<at::Tensor>& list) {
        change(list);
        return list[0].sum();
      });
      for (int i = 0; i < 8; ++i) {
        std::vector<at::Tensor> list = {numbers_of(i), numbers_of(i + 50)};
        seen.push_back(copy_of(step(list)));
        for (const at::Tensor& t : list) seen.push_back(copy_of(t));
      }
    });
  };
  EXPECT_THAT(refusal_of_list([](std::vector<at::Tensor>& list) { list[1] = list[0] * 2; }),
              HasSubstr("in the place of argument 1, f32[4]"));
  EXPECT_EQ(refusal_of_list([](std::vector<at::Tensor>& list) { list.push_back(list[0]); }),
            "[capture] unsupported: the function changes argument value 0 from 2 to 3; a replay would leave it as it "
            "is\n  fix: return the new value; or keep it in a tensor, and change that by an op");
  EXPECT_NE(refusal_of_list([](std::vector<at::Tensor>& list) { std::swap(list[0], list[1]); }), "");
  EXPECT_EQ(refusal_of_list([](std::vector<at::Tensor>& list) { list[0].add_(list[1]); }), "");
}

TEST(CapturedArguments, ANumberThatTheFunctionChangesIsRefused) {
  const std::string refusal = refusal_of_program([](auto make, Observations& seen) {
    auto step = make([](const at::Tensor& x, int& count) {
      ++count;
      return x * 2;
    });
    for (int i = 0; i < 8; ++i) {
      int count = 0;
      seen.push_back(step(numbers_of(i), count));
      seen.push_back(torch::tensor(count));
    }
  });
  EXPECT_THAT(refusal, HasSubstr("the function changes argument value 0 from 0 to 1"));
}

TEST(CapturedArguments, OtherMemoryWithoutAnOpIsRefused) {
  EXPECT_EQ(refusal_of_changing([](at::Tensor x) {
              x.set_data(x * 2);
              return x + 1;
            }),
            "[capture] unsupported: the function gives argument 0, f32[4] other memory without an op (set_data); a "
            "replay would not\n  fix: copy_ into it; or return the new tensor");
}

// What ops do to an argument a replay does too.
TEST(CapturedArguments, OtherMemoryByAnOpIsRepeated) {
  const at::Tensor other = torch::ones({6});
  const std::vector<std::function<void(at::Tensor&)>> changes = {
      [](at::Tensor& x) { x.unsqueeze_(0); },
      [](at::Tensor& x) { x.resize_({2}); },
      [&](at::Tensor& x) { x.set_(other); },
      [](at::Tensor& x) { at::mul_out(x, x.clone(), x.clone()); },
  };
  for (const auto& change : changes) {
    EXPECT_EQ(refusal_of_changing([&](at::Tensor x) {
                change(x);
                return x + 1;
              }),
              "");
  }
}

TEST(CapturedArguments, AnotherHistoryOrNeedOfGradientsIsRefused) {
  const std::string refusal = refusal_of_changing([](const at::Tensor& x) {
    x.requires_grad_();
    (x * x).sum().backward();
    return x.grad().clone();
  });
  EXPECT_EQ(refusal,
            "[capture] unsupported: the function changes whether argument 0, f32[4], requires gradients, or its "
            "history (requires_grad_, detach_, an in-place op with a tensor that requires gradients); a replay would "
            "not\n  fix: use x.detach() or x.detach().requires_grad_() inside; or write into x under "
            "torch::NoGradGuard");
  const at::Tensor w = torch::ones({4}, at::requires_grad());
  EXPECT_NE(refusal_of_changing([&](const at::Tensor& x) {
              (x * w).sum().backward();
              x.mul_(w);
              return x.detach() + 1;
            }),
            "");
  EXPECT_NE(refusal_of_program([&](auto make, Observations& seen) {
              auto step = make([](at::Tensor x) {
                x.detach_();
                return x + 1;
              });
              for (int i = 0; i < 8; ++i) {
                const at::Tensor x = numbers_of(i) * w;
                seen.push_back(step(x));
                seen.push_back(flag(x.requires_grad()));
              }
            }),
            "");
}

/// `make_argument` makes the argument of each call of its leaves; the function calls backward.
template <class MakeArgument>
std::string refusal_of_history(MakeArgument make_argument) {
  return refusal_of_program([&](auto make, Observations& seen) {
    std::vector<at::Tensor> leaves;
    for (int i = 0; i < 3; ++i) leaves.push_back(torch::full({4}, float(i + 1), at::requires_grad()));
    auto step = make([&](const at::Tensor& x) {
      const at::Tensor loss = (x * leaves[2]).sum();
      loss.backward();
      return loss.detach();
    });
    for (int i = 0; i < 12; ++i) {
      seen.push_back(step(make_argument(leaves, i)));
      for (const at::Tensor& leaf : leaves) seen.push_back(copy_of(leaf.grad()));
    }
  });
}

TEST(CapturedArguments, AHistoryThatBackwardGoesOnIntoIsRefused) {
  using Leaves = std::vector<at::Tensor>;
  const std::string expected =
      "[capture] unsupported: argument 0, f32[4], has a history outside of the function, and backward goes on there; "
      "the next argument may come with another one\n"
      "  fix: pass x.detach().requires_grad_(), and give its gradient to x.backward(...) outside; or make x inside of "
      "the captured function";
  EXPECT_EQ(refusal_of_history([](Leaves& w, int i) { return w[i > 5 ? 1 : 0] + numbers_of(i); }), expected);
  EXPECT_EQ(refusal_of_history([](Leaves& w, int i) { return i > 5 ? w[0] + w[0] : w[0] - 1; }), expected);
  EXPECT_EQ(refusal_of_history([](Leaves& w, int i) { return w[0] * numbers_of(i); }), expected);
  EXPECT_EQ(refusal_of_history([](Leaves& w, int) { return w[0].view({4}); }), expected);
  // Leaves in the first calls.
  EXPECT_EQ(refusal_of_history(
                [](Leaves& w, int i) { return i > 5 ? w[0] * numbers_of(i) : numbers_of(i).requires_grad_(); }),
            expected);
}

TEST(CapturedArguments, AHistoryThatBackwardLeavesAloneIsFine) {
  EXPECT_EQ(refusal_of_program([](auto make, Observations& seen) {
              const at::Tensor w = torch::ones({4}, at::requires_grad()), v = torch::ones({4}, at::requires_grad());
              auto step = make([&](const at::Tensor& x) {
                (x.detach() * v).sum().backward();
                return x.detach() * 2;
              });
              for (int i = 0; i < 8; ++i) {
                const at::Tensor x = w * numbers_of(i);
                seen.push_back(step(x));
                x.sum().backward();
                seen.push_back(copy_of(w.grad()));
                seen.push_back(copy_of(v.grad()));
              }
            }),
            "");
}

TEST(CapturedArguments, MemoryThatTwoOfThemShareUnderTwoNamesIsNoticed) {
  for (const bool is_foreign_first : {false, true}) {
    const std::string refusal = refusal_of_program([&](auto make, Observations& seen) {
      std::vector<float> memory(64);
      at::Tensor state = torch::ones({8});
      auto step = make([&](const at::Tensor& a, const at::Tensor& b) {
        state.zero_();
        const at::Tensor twice = a * 2;
        b.zero_();
        return twice + a + state;
      });
      for (int i = 0; i < 12; ++i) {
        for (size_t k = 0; k < memory.size(); ++k) memory[k] = float(k) + float(i);
        const bool is_foreign = is_foreign_first || i > 5;
        const at::Tensor a = is_foreign ? torch::from_blob(memory.data(), {8}) : numbers_of(i, {8});
        const int64_t shift = i > 5 ? i - 6 : 16;
        seen.push_back(step(a, is_foreign ? torch::from_blob(memory.data() + shift, {8}) : numbers_of(i + 9, {8})));
        seen.push_back(copy_of(a));
      }
    });
    EXPECT_THAT(refusal, HasSubstr("lies in memory that another one of the function has too, and torch does not know"));
  }
}

}  // namespace
}  // namespace serried
