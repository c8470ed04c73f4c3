// Attention by parts: the kernel's calls on ranges of queries and keys, and how their results become one.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "serried/tensor/attention/sequence_cut.h"

namespace serried::detail {

/// Of queries, keys, values, results and their logarithms: [batch, heads, length, ...].
inline constexpr int64_t kHeadsDim = 1;
inline constexpr int64_t kLengthDim = 2;

/// What this thread has computed and held since it was last set to {}.
struct AttentionCounters {
  int64_t pairs = 0;             // of a query and a key, per head and sequence of the batch; forward and backward
  int64_t kernel_calls = 0;      // forward and backward
  int64_t key_buffer_bytes = 0;  // that keys, values and their gradients travel or are gathered in; the most at once
};
AttentionCounters& attention_counters();

/// Buffers of so many bytes are there at once.
void count_key_buffers(int64_t bytes);

/// The dtype that results of several calls are added up in.
at::ScalarType sum_dtype(at::ScalarType dtype);

struct AttentionResult {
  at::Tensor out;  // [batch, heads, length, size]
  at::Tensor lse;  // [batch, heads, length], natural logarithms
};

struct AttentionGradients {
  at::Tensor query, key, value;
};

/// Results of calls, merged by the logarithms of their sums.
class MergedAttention {
 public:
  MergedAttention(const at::Tensor& query, std::optional<double> scale);

  /// Queries `call.queries` of the query attend to keys `call.keys`.
  void add(const AttentionCall& call, const at::Tensor& key, const at::Tensor& value);
  /// In the dtype of the query, laid out in memory as the kernel does: [batch, length, heads, size].
  AttentionResult result() const;

 private:
  at::Tensor query_;
  std::optional<double> scale_;
  at::Tensor out_, lse_;
};

/// What backward is given, and the gradient of the query as it adds up.
class AttentionBackward {
 public:
  AttentionBackward(at::Tensor grad_out, at::Tensor query, AttentionResult forward, std::optional<double> scale);

  /// Adds what queries `call.queries` give to themselves, and to keys `call.keys` of `grad_key` and `grad_value`, which
  /// have the dtype of sums.
  void add(const AttentionCall& call, const at::Tensor& key, const at::Tensor& value, const at::Tensor& grad_key,
           const at::Tensor& grad_value);
  at::Tensor grad_query() const;

 private:
  at::Tensor grad_out_, query_, out_, lse_;
  std::optional<double> scale_;
  at::Tensor grad_query_;
};

}  // namespace serried::detail
