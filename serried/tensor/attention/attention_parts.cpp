// One call of the flash kernel per full or square pair of ranges. Zero queries or keys never reach it: it would divide
// by them.
#include "serried/tensor/attention/attention_parts.h"

#include <ATen/ATen.h>

#include <algorithm>

#include <limits>

namespace serried::detail {
namespace {

at::Tensor rows(const at::Tensor& t, const Span& span) {
  return t.narrow(kLengthDim, span.begin, span.size);
}

void count(const AttentionCall& call) {
  attention_counters().pairs += num_pairs(call);
  attention_counters().kernel_calls += 1;
}

}  // namespace

AttentionCounters& attention_counters() {
  thread_local AttentionCounters counters;
  return counters;
}

void count_key_buffers(int64_t bytes) {
  AttentionCounters& counters = attention_counters();
  counters.key_buffer_bytes = std::max(counters.key_buffer_bytes, bytes);
}

at::ScalarType sum_dtype(at::ScalarType dtype) {
  return c10::isReducedFloatingType(dtype) ? at::kFloat : dtype;
}

MergedAttention::MergedAttention(const at::Tensor& query, std::optional<double> scale) : query_(query), scale_(scale) {
  const at::TensorOptions options = query.options().dtype(sum_dtype(query.scalar_type()));
  const int64_t batch = query.size(0), heads = query.size(1), length = query.size(kLengthDim), size = query.size(3);
  out_ = at::zeros({batch, length, heads, size}, options).transpose(1, 2);
  lse_ = at::full({batch, heads, length}, -std::numeric_limits<double>::infinity(), options);
}

void MergedAttention::add(const AttentionCall& call, const at::Tensor& key, const at::Tensor& value) {
  count(call);
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(
      rows(query_, call.queries), rows(key, call.keys), rows(value, call.keys), 0.0, call.causal, {}, scale_);
  const at::Tensor sum = rows(out_, call.queries), logarithm = rows(lse_, call.queries);
  // Exact for the first call of a row, whose logarithm is that of nothing.
  const at::Tensor weight = at::sigmoid(lse - logarithm).unsqueeze(-1);
  sum.add_((out.to(sum.scalar_type()) - sum).mul_(weight));
  logarithm.copy_(at::logaddexp(logarithm, lse));
}

AttentionResult MergedAttention::result() const {
  return {out_.to(query_.scalar_type()), lse_};
}

AttentionBackward::AttentionBackward(at::Tensor grad_out, at::Tensor query, AttentionResult forward,
                                     std::optional<double> scale)
    : grad_out_(std::move(grad_out)),
      query_(std::move(query)),
      out_(std::move(forward.out)),
      lse_(std::move(forward.lse)),
      scale_(scale) {
  grad_query_ = at::zeros(query_.sizes(), query_.options().dtype(sum_dtype(query_.scalar_type())));
}

// The kernel reads its arguments as if they were dense.
void AttentionBackward::add(const AttentionCall& call, const at::Tensor& key, const at::Tensor& value,
                            const at::Tensor& grad_key, const at::Tensor& grad_value) {
  count(call);
  const auto queries = [&](const at::Tensor& t) { return rows(t, call.queries).contiguous(); };
  const auto keys = [&](const at::Tensor& t) { return rows(t, call.keys).contiguous(); };
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      queries(grad_out_), queries(query_), keys(key), keys(value), queries(out_), queries(lse_), 0.0, call.causal, {},
      scale_);
  rows(grad_query_, call.queries).add_(of_query);
  rows(grad_key, call.keys).add_(of_key);
  rows(grad_value, call.keys).add_(of_value);
}

at::Tensor AttentionBackward::grad_query() const {
  return grad_query_.to(query_.scalar_type());
}

}  // namespace serried::detail
