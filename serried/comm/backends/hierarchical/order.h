// In which order what ranks of several hosts contribute is added up: by the topology alone, so that bits depend on
// nothing else.
#pragma once

#include "serried/comm/backends/hierarchical/topology.h"
#include "serried/comm/backends/shm/runner.h"

#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace serried::hierarchical {

/// ranks: ((x0 + x1) + x2) + ..., the bits of one host. hosts: what the ranks of each host make, in their order, and
/// that in the order of hosts; of more than kInARow hosts first of so many that follow each other, then of those again.
enum class Order { ranks, hosts };

inline constexpr int kInARow = 8;

/// What the option "order" asks for; nothing if it is empty, ValueError for what is no order.
std::optional<Order> parse_order(std::string_view where, const std::string& text);

/// ranks on two hosts, where it takes no more bytes, else hosts.
Order default_order(int num_hosts);
const char* order_name(Order order);

/// The reduction of one collective. One thread at a time.
class OrderedReduction {
 public:
  OrderedReduction(const Topology& topology, Order order, const shm::Op& op);

  /// Of each rank, in the order of ranks, `count` elements, to the result.
  void reduce(char* out, const std::vector<const char*>& contributions, int64_t count);

  /// Of each host what its ranks make, in the order of hosts.
  void join(char* out, const std::vector<const char*>& sums, int64_t count);

  const shm::PartialReduction& part() const { return part_; }

 private:
  void join_block(char* out, c10::SmallVector<const void*, 16> level, int64_t count);

  const Topology& topology_;
  const Order order_;
  const shm::ReduceKernel kernel_;
  const shm::PartialReduction part_;
  const int64_t element_bytes_;
  std::vector<char> sums_;
  std::vector<char> joined_;
};

}  // namespace serried::hierarchical
