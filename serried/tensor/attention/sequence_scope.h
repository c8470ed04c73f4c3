// The scope behind ContextParallel: while it is alive, plain queries, keys and values are parts of a cut sequence.
#pragma once

#include <memory>
#include <optional>

#include "serried/mesh/mesh.h"
#include "serried/tensor/attention/attention_way.h"
#include "serried/tensor/attention/sequence_cut.h"

namespace serried::detail {

struct SequenceScope {
  DeviceMesh mesh;                 // of one axis
  std::optional<SequenceCut> cut;  // none: nobody said how long the sequence is
  AttentionWay way = AttentionWay::automatic;
  bool has_documents = false;
  uint64_t content = 1;  // a number that changes with what the scope says; never 0
};
using SequenceScopePtr = std::shared_ptr<const SequenceScope>;

/// This thread's; null where there is none.
const SequenceScopePtr& sequence_scope();

/// Puts another one in its place and returns what was there. Attention then comes to serried before autograd sees it.
SequenceScopePtr exchange_sequence_scope(SequenceScopePtr scope);

/// What is recorded depends on the scope it is recorded in.
void rely_on_sequence_scope();

}  // namespace serried::detail
