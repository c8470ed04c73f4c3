// Attention in one process, which cut attention is compared with.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

namespace serried::testing {

/// Queries, keys and values of one process, and what attention makes of them.
struct WholeAttention {
  at::Tensor query, key, value, grad_out;
  at::Tensor out, grad_query, grad_key, grad_value;
};

struct WholeOptions {
  int64_t length = 37;
  int64_t heads = 4;
  int64_t key_heads = 4;
  int64_t batch = 2;
  int64_t size = 8;
  at::ScalarType dtype = at::kFloat;
  bool causal = true;
  at::Tensor mask = {};
  std::optional<double> scale = {};
};

inline WholeAttention whole_attention(const WholeOptions& options) {
  WholeAttention whole;
  const auto wave = [&](int64_t heads, double step) {
    const int64_t count = options.batch * heads * options.length * options.size;
    return (at::arange(count, at::kDouble) * step)
        .sin()
        .mul(1.3)
        .view({options.batch, heads, options.length, options.size})
        .to(options.dtype);
  };
  whole.query = wave(options.heads, 0.377);
  whole.key = wave(options.key_heads, 0.713);
  whole.value = wave(options.key_heads, 1.117);
  whole.grad_out = wave(options.heads, 0.291);
  const at::Tensor query = whole.query.clone().requires_grad_(), key = whole.key.clone().requires_grad_(),
                   value = whole.value.clone().requires_grad_();
  const std::optional<at::Tensor> mask = options.mask.defined() ? std::optional(options.mask) : std::nullopt;
  const at::Tensor out = at::scaled_dot_product_attention(query, key, value, mask, 0.0, options.causal, options.scale,
                                                          options.heads != options.key_heads);
  out.backward(whole.grad_out);
  whole.out = out.detach();
  whole.grad_query = query.grad();
  whole.grad_key = key.grad();
  whole.grad_value = value.grad();
  return whole;
}

/// Within `tolerance` of the largest element, or of 1 where that is less.
inline void expect_within(const at::Tensor& actual, const at::Tensor& expected, double tolerance,
                          const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  const double scale = std::max(1.0, expected.abs().max().to(at::kDouble).item<double>());
  const double difference = (actual.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
  EXPECT_LE(difference, tolerance * scale) << what;
}

}  // namespace serried::testing
