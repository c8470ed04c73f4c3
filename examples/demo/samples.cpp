// Inputs and expected values of the demo: small whole numbers, so that sums are exact in any order.
#include "demo.h"

#include <algorithm>

namespace demo {

at::Tensor sample(int rank, at::IntArrayRef sizes) {
  return (torch::arange(c10::multiply_integers(sizes)) * (rank + 1) + 10 * rank).to(at::kFloat).reshape(sizes);
}

at::Tensor sum_of_samples(int num_ranks, at::IntArrayRef sizes) {
  at::Tensor sum = torch::zeros(sizes);
  for (int rank = 0; rank < num_ranks; ++rank) sum += sample(rank, sizes);
  return sum;
}

at::Tensor shard(const at::Tensor& x, int rank, int num_ranks) {
  const int64_t rows = (x.size(0) + num_ranks - 1) / num_ranks;
  const int64_t begin = std::min(rank * rows, x.size(0));
  return x.slice(0, begin, std::min(begin + rows, x.size(0)));
}

}  // namespace demo
