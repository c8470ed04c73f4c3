// How a dim is cut over ranks.
#include "serried/comm/collectives/cut.h"

#include <algorithm>
#include <numeric>

namespace serried::detail {

std::vector<int64_t> shard_sizes(int64_t size, int num_ranks) {
  const int64_t chunk = (size + num_ranks - 1) / num_ranks;
  std::vector<int64_t> sizes(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    sizes[rank] = std::clamp<int64_t>(size - rank * chunk, 0, chunk);
  }
  return sizes;
}

std::vector<int64_t> offsets_of(c10::IntArrayRef sizes) {
  std::vector<int64_t> offsets(sizes.size());
  std::exclusive_scan(sizes.begin(), sizes.end(), offsets.begin(), int64_t{0});
  return offsets;
}

int64_t sum_of(c10::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

std::vector<int64_t> with_size(c10::IntArrayRef sizes, int64_t dim, int64_t size) {
  std::vector<int64_t> result = sizes.vec();
  result.at(dim) = size;
  return result;
}

}  // namespace serried::detail
