// Calls a captured function and the plain one in turn, each on state of its own, and compares all they leave.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/graph/capture.h"

namespace serried::testing {

/// What a function finds by itself: tensors that live between calls, and handles that may be given others.
struct Surroundings {
  std::vector<at::Tensor> tensors;
  at::Tensor& operator[](size_t i) { return tensors.at(i); }
};

using CapturedFn = std::function<at::Tensor(Surroundings&, const at::Tensor&)>;
using ArgumentOf = std::function<at::Tensor(Surroundings&, int call)>;

struct Comparison {
  std::string refusal;  // text of the CaptureError, empty where there was none
  int64_t replays = 0;
  int64_t captures = 0;
};

inline void expect_same_state(const Surroundings& actual, const Surroundings& expected, int call) {
  ASSERT_EQ(actual.tensors.size(), expected.tensors.size());
  for (size_t i = 0; i < expected.tensors.size(); ++i) {
    const at::Tensor &a = actual.tensors[i], &b = expected.tensors[i];
    EXPECT_TRUE(at::equal(a, b)) << "tensor " << i << " after call " << call << "\n" << a << "\n" << b;
    if (!b.requires_grad()) continue;
    ASSERT_EQ(a.grad().defined(), b.grad().defined()) << "gradient of tensor " << i << " after call " << call;
    if (b.grad().defined()) EXPECT_TRUE(at::equal(a.grad(), b.grad())) << "gradient " << i << " after call " << call;
  }
}

/// Calls `fn` captured on one copy of the state and plainly on another, with the argument that `argument` picks; every
/// call gives the same, or raises CaptureError. Ends at the first error.
inline Comparison compare_with_eager(const std::function<Surroundings()>& make, const CapturedFn& fn,
                                     const ArgumentOf& argument, int calls = 8, CaptureOptions options = {}) {
  Surroundings mine = make(), theirs = make();
  auto step = capture([&](const at::Tensor& x) { return fn(mine, x); }, std::move(options));
  Comparison result;
  for (int call = 0; call < calls && result.refusal.empty(); ++call) {
    const at::Tensor x = argument(mine, call), y = argument(theirs, call);
    const at::Tensor expected = fn(theirs, y);
    try {
      const at::Tensor actual = step(x);
      EXPECT_TRUE(at::equal(actual, expected)) << "call " << call << "\n" << actual << "\n" << expected;
    } catch (const graph::CaptureError& error) {
      result.refusal = error.what_without_backtrace();
    }
    EXPECT_TRUE(at::equal(x, y)) << "argument of call " << call;
    expect_same_state(mine, theirs, call);
  }
  result.replays = step.replays();
  result.captures = step.captures();
  return result;
}

}  // namespace serried::testing
