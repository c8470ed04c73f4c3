// Block after block, so that what is made in between stays small.
#include "serried/comm/backends/hierarchical/order.h"

#include <algorithm>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::hierarchical {
namespace {

constexpr int64_t kBlockElements = 512;

}  // namespace

std::optional<Order> parse_order(std::string_view where, const std::string& text) {
  if (text.empty()) return std::nullopt;
  if (text == "ranks") return Order::ranks;
  if (text == "hosts") return Order::hosts;
  raise<c10::ValueError>({where, c10::str("there is no order \"", text, "\""),
                          "let the option \"order\", or SERRIED_ORDER, be \"ranks\" or \"hosts\", or leave it out"});
}

Order default_order(int num_hosts) {
  return num_hosts <= 2 ? Order::ranks : Order::hosts;
}

const char* order_name(Order order) {
  return order == Order::ranks ? "ranks" : "hosts";
}

OrderedReduction::OrderedReduction(const Topology& topology, Order order, const shm::Op& op)
    : topology_(topology),
      order_(order),
      kernel_(op.kernel),
      part_(shm::find_partial_reduction(c10::ScalarType(op.record.dtype),
                                        c10d::ReduceOp::RedOpType(op.record.reduce_op))),
      element_bytes_(op.element_bytes) {}

void OrderedReduction::reduce(char* out, const std::vector<const char*>& contributions, int64_t count) {
  c10::SmallVector<const void*, 16> sources;
  if (order_ == Order::ranks) {
    for (const char* contribution : contributions) sources.push_back(contribution);
    return kernel_(out, sources.data(), int(sources.size()), count);
  }
  const int num_hosts = topology_.num_hosts();
  const int64_t stride = kBlockElements * part_.element_bytes;
  sums_.resize(size_t(num_hosts * stride));
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    const int64_t length = std::min(kBlockElements, count - begin);
    c10::SmallVector<const void*, 16> sums;
    for (int host = 0; host < num_hosts; ++host) {
      sources.clear();
      for (const int rank : topology_.ranks_of(host)) {
        sources.push_back(contributions[size_t(rank)] + begin * element_bytes_);
      }
      char* const sum = sums_.data() + host * stride;
      part_.kernel(sum, nullptr, sources.data(), int(sources.size()), length, 0);
      sums.push_back(sum);
    }
    join_block(out + begin * element_bytes_, std::move(sums), length);
  }
}

void OrderedReduction::join(char* out, const std::vector<const char*>& sums, int64_t count) {
  for (int64_t begin = 0; begin < count; begin += kBlockElements) {
    c10::SmallVector<const void*, 16> level;
    for (const char* sum : sums) level.push_back(sum + begin * part_.element_bytes);
    join_block(out + begin * element_bytes_, std::move(level), std::min(kBlockElements, count - begin));
  }
}

void OrderedReduction::join_block(char* out, c10::SmallVector<const void*, 16> level, int64_t count) {
  const size_t most = order_ == Order::hosts ? size_t(kInARow) : level.size();
  const int64_t stride = kBlockElements * part_.element_bytes;
  joined_.resize(level.size() > most ? level.size() * size_t(stride) : 0);
  char* free = joined_.data();
  while (level.size() > most) {
    c10::SmallVector<const void*, 16> next;
    for (size_t first = 0; first < level.size(); first += most) {
      const size_t num_sources = std::min(most, level.size() - first);
      part_.join(free, nullptr, level.data() + first, int(num_sources), count, 0);
      next.push_back(free);
      free += stride;
    }
    level = std::move(next);
  }
  part_.join(out, nullptr, level.data(), int(level.size()), count, topology_.num_ranks());
}

}  // namespace serried::hierarchical
