// Runs a whole program with a plain function and again with the captured one, and compares all that it looks at.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <utility>
#include <vector>

#include "serried/graph/capture.h"

namespace serried::testing {

using Observations = std::vector<at::Tensor>;

struct Plain {
  template <class Fn>
  Fn operator()(Fn fn, const CaptureOptions& = {}) const {
    return fn;
  }
};

struct Capturing {
  template <class Fn>
  Captured<Fn> operator()(Fn fn, CaptureOptions options = {}) const {
    return capture(std::move(fn), std::move(options));
  }
};

/// Numbers that differ from call to call.
inline at::Tensor numbers_of(int call, at::IntArrayRef sizes = {4}) {
  torch::manual_seed(uint64_t(call) + 100);
  return torch::randn(sizes);
}

inline at::Tensor copy_of(const at::Tensor& t) {
  return t.defined() ? t.detach().clone() : t;
}

/// Whether both are undefined, or of one type and equal.
inline bool same_tensor(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

/// `program(make, seen)` makes its function by `make(fn, options)` and puts all that it looks at into `seen`. Captured
/// it sees the same until it ends or is refused; the text of the refusal.
template <class Program>
std::string refusal_of_program(const Program& program) {
  Observations expected, actual;
  std::string refusal;
  torch::manual_seed(0);
  program(Plain(), expected);
  torch::manual_seed(0);
  try {
    program(Capturing(), actual);
    EXPECT_EQ(actual.size(), expected.size());
  } catch (const graph::CaptureError& error) {
    refusal = error.what_without_backtrace();
  }
  for (size_t i = 0; i < std::min(actual.size(), expected.size()); ++i) {
    EXPECT_TRUE(same_tensor(actual[i], expected[i])) << "observation " << i << "\n" << actual[i] << "\n" << expected[i];
  }
  return refusal;
}

}  // namespace serried::testing
