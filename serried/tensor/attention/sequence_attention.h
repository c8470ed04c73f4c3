// Attention of a sequence that is cut over the ranks of a group, on plain parts and without gradients of its own.
#pragma once

#include <optional>

#include "serried/comm/groups/group.h"
#include "serried/spmd/cost.h"
#include "serried/tensor/attention/attention_parts.h"
#include "serried/tensor/attention/attention_way.h"

namespace serried::detail {

/// One call, the same on every rank of the group but for the mask.
struct SequenceAttention {
  Group group;
  SequenceCut queries;
  SequenceCut keys;
  bool causal = false;
  std::optional<double> scale = {};
  at::Tensor mask = {};  // this rank's rows against all keys, [..., rows or 1, all keys or 1]; undefined: none
  AttentionWay way = AttentionWay::gather;  // never automatic

  int64_t rank() const { return group->getRank(); }
};

/// What decides between the ways, the same on every rank of the group.
struct AttentionSizes {
  int64_t batch = 1;
  int64_t query_heads = 1;
  int64_t key_heads = 1;
  int64_t head_size = 1;
  int64_t element_bytes = 4;
  bool has_mask = false;
};

/// Of one rank's parts.
AttentionSizes attention_sizes(const at::Tensor& query, const at::Tensor& key, bool has_mask);

/// Above that ranks do not hold all keys and values at once.
inline constexpr int64_t kGatheredKeysLimit = int64_t(4) << 20;

/// The way that `asked` stands for. NotImplementedError where it is asked for and cannot be gone.
AttentionWay chosen_way(AttentionWay asked, const AttentionSizes& sizes, const SequenceAttention& call,
                        const spmd::CostModel& model);

/// Parts [batch, heads, this rank's positions, size]. Every rank of the group calls both.
AttentionResult attend(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                       const at::Tensor& value);
AttentionGradients attend_backward(const SequenceAttention& call, const at::Tensor& grad_out, const at::Tensor& query,
                                   const at::Tensor& key, const at::Tensor& value, const AttentionResult& forward);

// The ways, one per file.
AttentionResult attend_by_heads(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                                const at::Tensor& value);
AttentionGradients attend_by_heads_backward(const SequenceAttention& call, const at::Tensor& grad_out,
                                            const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                            const AttentionResult& forward);
AttentionResult attend_by_gather(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                                 const at::Tensor& value);
AttentionGradients attend_by_gather_backward(const SequenceAttention& call, const at::Tensor& grad_out,
                                             const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                             const AttentionResult& forward);
AttentionResult attend_by_ring(const SequenceAttention& call, const at::Tensor& query, const at::Tensor& key,
                               const at::Tensor& value);
AttentionGradients attend_by_ring_backward(const SequenceAttention& call, const at::Tensor& grad_out,
                                           const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                           const AttentionResult& forward);

}  // namespace serried::detail
