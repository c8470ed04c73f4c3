// Every rank gets all keys and values by one all_gather; gradients of them are added up by one reduce_scatter.
#include <algorithm>

#include "serried/comm/collectives/ops.h"
#include "serried/tensor/attention/key_parts.h"

namespace serried::detail {
namespace {

constexpr int64_t kLengthOfBoth = 3;  // of keys and values side by side

struct GatheredKeys {
  at::Tensor both;  // [2, batch, heads, length, size], in the order of the sequence
  at::Tensor key() const { return both[0]; }
  at::Tensor value() const { return both[1]; }
};

Sizes sizes_of(const at::Tensor& key, int64_t length) {
  return {2, key.size(0), key.size(1), length, key.size(3)};
}

// Elements that each rank has.
std::vector<int64_t> counts_of(const SequenceAttention& call, const at::Tensor& key) {
  std::vector<int64_t> counts;
  for (int64_t rank = 0; rank < call.keys.num_ranks(); ++rank) {
    counts.push_back(c10::multiply_integers(sizes_of(key, call.keys.size(rank))));
  }
  return counts;
}

// Calls visit(place in the sequence, place among the parts of all ranks, which lie in `flat` one after the other).
template <class Visit>
void for_each_chunk(const SequenceAttention& call, const at::Tensor& whole, const at::Tensor& flat, Visit visit) {
  int64_t begin = 0;
  for (int64_t rank = 0; rank < call.keys.num_ranks(); ++rank) {
    const Sizes sizes = sizes_of(whole[0], call.keys.size(rank));
    const at::Tensor part = flat.narrow(0, begin, c10::multiply_integers(sizes)).view(sizes);
    for (const SequenceChunk& chunk : call.keys.chunks(rank)) {
      visit(whole.narrow(kLengthOfBoth, chunk.begin, chunk.size), part.narrow(kLengthOfBoth, chunk.place, chunk.size));
    }
    begin += part.numel();
  }
}

GatheredKeys gathered(const SequenceAttention& call, const at::Tensor& key, const at::Tensor& value) {
  const at::Tensor own = at::stack({key, value}).view({-1});
  const at::Tensor flat = ops::all_gather(own, call.group, 0, counts_of(call, key));
  at::Tensor both = at::empty(sizes_of(key, call.keys.length()), key.options());
  count_key_buffers(int64_t(flat.nbytes() + both.nbytes()));
  for_each_chunk(call, both, flat, [](const at::Tensor& whole, const at::Tensor& part) { whole.copy_(part); });
  return {both};
}

std::vector<AttentionCall> own_calls(const SequenceAttention& call) {
  return attention_calls(call.queries.chunks(call.rank()), call.keys.all_chunks(), call.causal);
}

// With a mask a rank's rows are one call; it says itself who attends to whom.
AttentionResult attend_masked(const SequenceAttention& call, const at::Tensor& query, const GatheredKeys& keys) {
  if (query.numel() == 0) {
    const at::TensorOptions options = query.options().dtype(sum_dtype(query.scalar_type()));
    return {at::empty_like(query), at::empty({query.size(0), query.size(1), query.size(2)}, options)};
  }
  attention_counters().pairs += query.size(2) * call.keys.length();
  attention_counters().kernel_calls += 1;
  const auto [out, lse] = at::_scaled_dot_product_flash_attention_for_cpu(query, keys.key(), keys.value(), 0.0, false,
                                                                          call.mask, call.scale);
  return {out, lse.contiguous()};
}

AttentionGradients masked_gradients(const SequenceAttention& call, const at::Tensor& grad_out, const at::Tensor& query,
                                    const GatheredKeys& keys, const AttentionResult& forward) {
  if (query.numel() == 0) return {at::empty_like(query), at::zeros_like(keys.key()), at::zeros_like(keys.value())};
  attention_counters().pairs += query.size(2) * call.keys.length();
  attention_counters().kernel_calls += 1;
  const auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad_out.contiguous(), query.contiguous(), keys.key(), keys.value(), forward.out.contiguous(),
      forward.lse.contiguous(), 0.0, false, call.mask, call.scale);
  return {of_query, of_key, of_value};
}

}  // namespace

AttentionResult attend_by_gather(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value) {
  const GatheredKeys keys = gathered(call, key, value);
  if (call.mask.defined()) return attend_masked(call, query, keys);
  MergedAttention merged(query, call.scale);
  for (const AttentionCall& each : own_calls(call)) merged.add(each, keys.key(), keys.value());
  return merged.result();
}

AttentionGradients attend_by_gather_backward(const SequenceAttention& call, const at::Tensor& grad_out,
                                             const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const AttentionResult& forward) {
  const GatheredKeys keys = gathered(call, key, value);
  const at::Tensor sums = at::zeros(keys.both.sizes(), key.options().dtype(sum_dtype(key.scalar_type())));
  at::Tensor grad_query;
  if (call.mask.defined()) {
    const AttentionGradients own = masked_gradients(call, grad_out, query, keys, forward);
    grad_query = own.query;
    sums[0].copy_(own.key);
    sums[1].copy_(own.value);
  } else {
    AttentionBackward backward(grad_out, query, forward, call.scale);
    for (const AttentionCall& each : own_calls(call)) backward.add(each, keys.key(), keys.value(), sums[0], sums[1]);
    grad_query = backward.grad_query();
  }
  const at::Tensor flat = at::empty({sums.numel()}, sums.options());
  count_key_buffers(int64_t(keys.both.nbytes() + sums.nbytes() + flat.nbytes()));
  for_each_chunk(call, sums, flat, [](const at::Tensor& whole, const at::Tensor& part) { part.copy_(whole); });
  const at::Tensor own = ops::reduce_scatter(flat, call.group, 0, counts_of(call, key), share(c10d::ReduceOp::SUM))
                             .view(sizes_of(key, call.keys.size(call.rank())));
  return {grad_query, own[0].to(key.scalar_type(), false, true), own[1].to(value.scalar_type(), false, true)};
}

}  // namespace serried::detail
