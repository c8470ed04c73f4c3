// How micro-batches are divided into rounds.
#include "serried/parallel/pipeline/schedules/rounds.h"

#include <algorithm>

namespace serried::detail {

RoundOrder round_order(const TableOptions& sizes) {
  const auto [p, v, m] = sizes;
  // A micro-batch comes back to a rank after p steps: with rounds of at least p the rank has work until then. Rounds
  // that differ by one at most, the larger ones first, never wait for ever, which rounds of p with a short last one do.
  const int64_t rounds = std::max<int64_t>(1, m / p);
  RoundOrder order;
  order.largest_round = (m + rounds - 1) / rounds;
  for (int64_t round = 0; round < rounds; ++round) {
    const int64_t size = m / rounds + (round < m % rounds ? 1 : 0);
    for (int64_t i = 0; i < v * size; ++i) {
      order.forwards.push_back(i / size);
      order.backwards.push_back(v - 1 - i / size);
    }
  }
  return order;
}

}  // namespace serried::detail
