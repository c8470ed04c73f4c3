// Two optimizers on equal parameters that get equal gradients, ours and LibTorch's.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "serried/tensor/random/random.h"

namespace serried::testing {

using Tensors = std::vector<at::Tensor>;

/// Parameters of uneven shapes, the same at each call.
inline Tensors make_parameters(at::ScalarType dtype) {
  Tensors parameters;
  for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{{7, 3}, {5}, {}, {2, 0}, {2, 3, 11}}) {
    parameters.push_back(
        at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(17), at::TensorOptions(dtype)).requires_grad_());
  }
  return parameters;
}

/// The gradient of parameter `index` in step `step`, also where the parameter is on a mesh or lies otherwise.
inline at::Tensor gradient(const at::Tensor& like, int step, size_t index) {
  const auto seed = uint64_t(step * 100 + int(index));
  return at::randn(like.sizes(), at::make_generator<at::CPUGeneratorImpl>(seed), at::TensorOptions(like.scalar_type()));
}

inline void give_gradients(const Tensors& parameters, int step) {
  for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradient(parameters[i], step, i);
}

/// Equal up to `tolerance`, relative to values of about one.
inline void expect_near(const Tensors& actual, const Tensors& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i], expected[i], tolerance, tolerance)) << what << ", parameter " << i << "\n"
                                                                            << actual[i] << "\nexpected\n"
                                                                            << expected[i];
  }
}

/// What 50 steps of rounding may add up to.
inline double tolerance_of(at::ScalarType dtype) {
  if (dtype == at::kDouble || dtype == at::kComplexDouble) return 1e-12;
  if (dtype == at::kFloat || dtype == at::kComplexFloat) return 2e-5;
  return 0.02;
}

}  // namespace serried::testing
