// Tensors that lie side by side in a buffer of each rank, and whole in one: which rows go where.
#pragma once

#include "serried/comm/collectives/collective.h"
#include "serried/comm/groups/group.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace serried::detail {

/// One tensor [outer, rows, inner] of which rank r holds the rows that Shard gives it: in every rank's buffer they lie
/// contiguous from element `from` on, in the whole buffer the tensor does from element `to` on.
struct RowsOfTensor {
  int64_t from = 0;
  int64_t to = 0;
  int64_t outer = 1;
  int64_t rows = 0;
  int64_t inner = 1;
};

/// Such tensors as ops take them: five numbers for each, in the order above.
struct RowTable {
  static constexpr size_t kFields = 5;

  at::IntArrayRef numbers;
  int num_ranks = 1;
  int64_t element_bytes = 1;

  size_t size() const { return numbers.size() / kFields; }
  RowsOfTensor operator[](size_t i) const {
    const int64_t* n = numbers.data() + i * kFields;
    return {.from = n[0], .to = n[1], .outer = n[2], .rows = n[3], .inner = n[4]};
  }
};

inline void append(std::vector<int64_t>& table, const RowsOfTensor& rows) {
  table.insert(table.end(), {rows.from, rows.to, rows.outer, rows.rows, rows.inner});
}

/// Bytes [begin, end) of a rank's buffer, which lie at `data`.
struct BytesOfBuffer {
  const char* data = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

/// Copies what `rank` holds to its places in the whole buffer.
void place_rows(const RowTable& table, int rank, const BytesOfBuffer& bytes, char* whole);

/// The same for the buffers of all ranks in a row, by ops on tensors.
void copy_rows(at::IntArrayRef table, int num_ranks, const at::Tensor& gathered, const at::Tensor& whole);

namespace ops {
/// An all_gather of `x`, one buffer of equal length on each rank, whose rows go to their places in `whole`. What the
/// table does not name is not written. Where the backend places rows nothing is copied on the way.
void gather_rows_into(const at::Tensor& whole, const at::Tensor& x, const Group& group, at::IntArrayRef table,
                      WorkPtr* started = nullptr);
}  // namespace ops

}  // namespace serried::detail
