// Which rows of a rank go where: byte ranges for backends, views for everybody else.
#include "serried/comm/collectives/rows.h"

#include <algorithm>
#include <cstring>

namespace serried::detail {
namespace {

struct RankRows {
  int64_t begin = 0;
  int64_t size = 0;
};

// As Shard cuts.
RankRows rows_of_rank(int64_t rows, int64_t num_ranks, int64_t rank) {
  const int64_t each = (rows + num_ranks - 1) / num_ranks, begin = std::min(rows, rank * each);
  return {begin, std::min(each, rows - begin)};
}

// Dim 0: ranks with as many rows as the first by one copy, then the one that has fewer.
void copy_first_dim(const RowsOfTensor& t, int64_t num_ranks, const at::Tensor& rows, const at::Tensor& whole) {
  const int64_t each = rows_of_rank(t.rows, num_ranks, 0).size, chunk = each * t.inner;
  if (chunk == 0) return;
  const int64_t num_full = t.rows / each, left = (t.rows - num_full * each) * t.inner;
  whole.narrow(0, t.to, num_full * chunk)
      .view({num_full, chunk})
      .copy_(rows.narrow(0, 0, num_full).narrow(1, t.from, chunk));
  if (left > 0) {
    whole.narrow(0, t.to + num_full * chunk, left).copy_(rows.select(0, num_full).narrow(0, t.from, left));
  }
}

void copy_other_dim(const RowsOfTensor& t, int64_t num_ranks, const at::Tensor& rows, const at::Tensor& whole) {
  const at::Tensor all = whole.narrow(0, t.to, t.outer * t.rows * t.inner).view({t.outer, t.rows, t.inner});
  for (int64_t r = 0; r < num_ranks; ++r) {
    const RankRows mine = rows_of_rank(t.rows, num_ranks, r);
    if (mine.size == 0) continue;
    const at::Tensor part = rows.select(0, r).narrow(0, t.from, t.outer * mine.size * t.inner);
    all.narrow(1, mine.begin, mine.size).copy_(part.view({t.outer, mine.size, t.inner}));
  }
}

}  // namespace

void place_rows(const RowTable& table, int rank, const BytesOfBuffer& bytes, char* whole) {
  for (size_t i = 0; i < table.size(); ++i) {
    const RowsOfTensor t = table[i];
    const RankRows mine = rows_of_rank(t.rows, table.num_ranks, rank);
    const int64_t run = mine.size * t.inner * table.element_bytes;
    if (run == 0) continue;
    for (int64_t o = 0; o < t.outer; ++o) {
      const int64_t at = t.from * table.element_bytes + o * run;
      const int64_t begin = std::max(at, bytes.begin), end = std::min(at + run, bytes.end);
      if (begin >= end) continue;
      char* to = whole + (t.to + (o * t.rows + mine.begin) * t.inner) * table.element_bytes;
      std::memcpy(to + (begin - at), bytes.data + (begin - bytes.begin), size_t(end - begin));
    }
  }
}

void copy_rows(at::IntArrayRef numbers, int num_ranks, const at::Tensor& gathered, const at::Tensor& whole) {
  const at::Tensor rows = gathered.view({num_ranks, gathered.numel() / num_ranks});
  const RowTable table{numbers, num_ranks, int64_t(whole.element_size())};
  for (size_t i = 0; i < table.size(); ++i) {
    const RowsOfTensor t = table[i];
    if (t.outer == 0 || t.rows == 0 || t.inner == 0) continue;
    t.outer == 1 ? copy_first_dim(t, num_ranks, rows, whole) : copy_other_dim(t, num_ranks, rows, whole);
  }
}

}  // namespace serried::detail
