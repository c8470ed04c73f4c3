// Weighs the ways against each other, and goes one of them.
#include "serried/tensor/attention/sequence_attention.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "serried/base/error.h"

namespace serried {

std::string_view to_string(AttentionWay way) {
  switch (way) {
    case AttentionWay::automatic: return "automatic";
    case AttentionWay::heads: return "heads";
    case AttentionWay::gather: return "gather";
    case AttentionWay::ring: return "ring";
  }
  return "?";
}

namespace detail {
namespace {

constexpr const char* kAttend = "scaled_dot_product_attention";

bool heads_divide(const AttentionSizes& sizes, int64_t ranks) {
  return sizes.query_heads % ranks == 0 && sizes.key_heads % ranks == 0;
}

int64_t bytes_of_keys(const AttentionSizes& sizes, int64_t length) {
  return 2 * sizes.batch * sizes.key_heads * length * sizes.head_size * sizes.element_bytes;
}

// Of heads: queries and results with the keys and values there and back, each rank a part to every other.
double cost_of_heads(const AttentionSizes& sizes, const SequenceAttention& call, const spmd::CostModel& model) {
  const double ranks = double(call.keys.num_ranks());
  const int64_t queries =
      2 * sizes.batch * sizes.query_heads * call.queries.length() * sizes.head_size * sizes.element_bytes;
  const double moved = double(queries + bytes_of_keys(sizes, call.keys.length())) / ranks * (ranks - 1) / ranks;
  return 2 * model.latency + moved / model.bandwidth;
}

double cost_of_gather(const AttentionSizes& sizes, const SequenceAttention& call, const spmd::CostModel& model) {
  const double ranks = double(call.keys.num_ranks());
  return model.latency + double(bytes_of_keys(sizes, call.keys.length())) * (ranks - 1) / ranks / model.bandwidth;
}

// Ranks that cut the sequence have the same batch and heads: none where other axes cut them into more parts than there
// are.
bool is_nothing(const at::Tensor& query) {
  return query.size(0) == 0 || query.size(kHeadsDim) == 0;
}

void check_asked(AttentionWay asked, const AttentionSizes& sizes, const SequenceAttention& call) {
  if (sizes.has_mask && (asked == AttentionWay::heads || asked == AttentionWay::ring)) {
    raise<c10::NotImplementedError>(
        {kAttend, c10::str("rotate is ", to_string(asked), ", and with a mask ranks gather keys and values"),
         "leave rotate out, or pass AttentionWay::gather"});
  }
  const int64_t ranks = call.keys.num_ranks();
  if (asked == AttentionWay::heads && !heads_divide(sizes, ranks)) {
    raise<c10::NotImplementedError>({kAttend,
                                     c10::str("rotate is heads, and ", ranks, " ranks do not divide ",
                                              sizes.query_heads, " heads of queries and ", sizes.key_heads, " of keys"),
                                     "leave rotate out, or pass AttentionWay::gather or ring"});
  }
}

// The kernel hides keys by minus infinity before it scales: causal squares come out as NaN unless the scale is
// positive. Queries take its sign then.
bool scale_spoils_mask(const SequenceAttention& call) {
  return call.causal && call.scale.has_value() && *call.scale <= 0;
}

double sign_of_scale(const SequenceAttention& call) {
  return *call.scale < 0 ? -1 : 0;
}

SequenceAttention with_positive_scale(SequenceAttention call) {
  call.scale = *call.scale < 0 ? -*call.scale : 1;
  return call;
}

}  // namespace

AttentionSizes attention_sizes(const at::Tensor& query, const at::Tensor& key, bool has_mask) {
  return {.batch = query.size(0),
          .query_heads = query.size(1),
          .key_heads = key.size(1),
          .head_size = query.size(3),
          .element_bytes = int64_t(query.element_size()),
          .has_mask = has_mask};
}

AttentionWay chosen_way(AttentionWay asked, const AttentionSizes& sizes, const SequenceAttention& call,
                        const spmd::CostModel& model) {
  if (call.keys.num_ranks() == 1) return AttentionWay::gather;
  check_asked(asked, sizes, call);
  if (asked != AttentionWay::automatic) return asked;
  if (sizes.has_mask) return AttentionWay::gather;
  // Whoever holds the end of a sequence cut in order would work longest: heads are all alike.
  const bool evens_out = call.causal && !call.queries.is_balanced();
  if (heads_divide(sizes, call.keys.num_ranks()) &&
      (evens_out || cost_of_heads(sizes, call, model) < cost_of_gather(sizes, call, model))) {
    return AttentionWay::heads;
  }
  return bytes_of_keys(sizes, call.keys.length()) <= kGatheredKeysLimit ? AttentionWay::gather : AttentionWay::ring;
}

// The kernel reads the last dim as if it were dense. Keys and values are copied on every way.
AttentionResult attend(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                       const at::Tensor& value) {
  if (is_nothing(query)) return MergedAttention(query, call.scale).result();
  if (query.size(3) > 1 && query.stride(3) != 1) return attend(call, query.contiguous(), key, value);
  if (scale_spoils_mask(call)) return attend(with_positive_scale(call), query * sign_of_scale(call), key, value);
  if (call.way == AttentionWay::heads) return attend_by_heads(call, query, key, value);
  if (call.way == AttentionWay::ring) return attend_by_ring(call, query, key, value);
  return attend_by_gather(call, query, key, value);
}

AttentionGradients attend_backward(const SequenceAttention& call, const at::Tensor& grad_out, const at::Tensor& query,
                                   const at::Tensor& key, const at::Tensor& value, const AttentionResult& forward) {
  if (is_nothing(query)) return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
  if (scale_spoils_mask(call)) {
    const double sign = sign_of_scale(call);
    AttentionGradients parts = attend_backward(with_positive_scale(call), grad_out, query * sign, key, value, forward);
    parts.query = parts.query * sign;
    return parts;
  }
  if (call.way == AttentionWay::heads) return attend_by_heads_backward(call, grad_out, query, key, value, forward);
  if (call.way == AttentionWay::ring) return attend_by_ring_backward(call, grad_out, query, key, value, forward);
  return attend_by_gather_backward(call, grad_out, query, key, value, forward);
}

}  // namespace detail
}  // namespace serried
