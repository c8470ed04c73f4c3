// One step of a function, to be compared bit for bit.
#pragma once

#include <torch/torch.h>

#include <vector>

#include "tests/support/close.h"

namespace serried::testing {

struct Trained {
  at::Tensor result;
  std::vector<at::Tensor> gradients;  // of the input, if it has one, and of the parameters
};

/// What `forward` gives for a copy of `x`, and what its backward leaves. Seeds torch's generator.
template <class Forward>
Trained trained(const at::Tensor& x, const std::vector<at::Tensor>& parameters, Forward&& forward) {
  for (const at::Tensor& p : parameters) p.mutable_grad().reset();
  at::manual_seed(3);
  const at::Tensor input = x.detach().clone().requires_grad_(x.requires_grad());
  const at::Tensor result = forward(input);
  result.square().sum().backward();
  Trained step{result.detach(), {}};
  if (input.requires_grad()) step.gradients.push_back(input.grad());
  for (const at::Tensor& p : parameters) step.gradients.push_back(p.grad());
  return step;
}

inline void expect_same(const Trained& actual, const Trained& expected) {
  expect_equal(actual.result, expected.result, "result");
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
  for (size_t i = 0; i < expected.gradients.size(); ++i) {
    ASSERT_EQ(actual.gradients[i].defined(), expected.gradients[i].defined()) << i;
    if (!expected.gradients[i].defined()) continue;
    expect_equal(actual.gradients[i], expected.gradients[i], "gradient " + std::to_string(i));
  }
}

}  // namespace serried::testing
