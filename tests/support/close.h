// Comparing tensors with a message that shows both.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace serried::testing {

/// Same shape, dtype and values, bit for bit.
void expect_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what = "");

/// Same shape and dtype, values within what one reordering of a sum may change.
void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what = "");

}  // namespace serried::testing
