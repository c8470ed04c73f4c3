// A collective as the table of steps that the backends shm and hierarchical run: what moves, from which host to which.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace serried::simulation {

enum class Kind : uint8_t {
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  gather,
  scatter,
  broadcast,
  all_to_all,
  barrier
};

/// None for words that are no collective that is simulated: "all_gather_into" and "all_gather" are one.
std::optional<Kind> kind_of(std::string_view word);

/// "all_reduce"
const char* name_of(Kind kind);

/// In which order sums are made, as hierarchical's option says; automatic: ranks on two hosts, hosts on more.
enum class Order : uint8_t { automatic, ranks, hosts };

/// What every rank of a group calls. Rank 0 of the group is the root, where there is one.
struct Call {
  Kind kind = Kind::barrier;
  int64_t bytes = 0;  // that a rank gives; of broadcast and scatter, the root
  int64_t element_bytes = 4;
  Order order = Order::automatic;
  auto operator<=>(const Call&) const = default;
};

/// How many ranks of a group are on each of its hosts, in the order of ranks.
using HostSizes = std::vector<int64_t>;

/// Chunks that go up a chain of hosts, of which a few are under way at once, and results that come back.
struct Pipeline {
  int64_t chunks = 0;
  int64_t ahead = 0;
  int64_t lanes = 1;       // that carry a part of each chunk, one part after the other
  int64_t up_bytes = 0;    // of a whole chunk, from a host to the next
  int64_t down_bytes = 0;  // of a whole chunk, out of a host that sends results
  int64_t hops_back = 0;   // until a result is where it belongs
};

/// What happens at once. A host gives each other one `give[host] * take[other]` bytes, or its neighbours in the chain
/// all of `up` and `down`; the messages hold interfaces and memory as long as their bytes take, and the step ends with
/// the last of them, `net_hops` and `memory_hops` delays later.
struct Step {
  std::string name = {};
  std::vector<int64_t> give = {}, take = {};  // per host; empty: nothing
  int64_t up = 0;                             // host i to i + 1
  int64_t down = 0;                           // host i + 1 to i
  std::vector<int64_t> messages = {};         // out of each host
  std::vector<int64_t> copied = {};           // in the memory of each host
  int64_t added = 0;                          // bytes, by the rank that adds most
  int64_t net_hops = 0;
  int64_t memory_hops = 0;
  int64_t chunks = 1;  // that follow each other, two on their way at once
  std::optional<Pipeline> pipeline = {};

  int64_t out_of(size_t host) const;
  int64_t into(size_t host) const;
};

/// What a step moves between hosts: sums that many questions need.
class Traffic {
 public:
  explicit Traffic(const Step& step);
  /// From any host of [begin, end) to any other.
  int64_t out_of(size_t begin, size_t end) const;
  int64_t into(size_t begin, size_t end) const;

 private:
  const Step& step_;
  int64_t given_;
  int64_t taken_;
};

/// What `call` takes on these hosts: one of them shares memory alone.
std::vector<Step> steps_of(const Call& call, const HostSizes& hosts);

}  // namespace serried::simulation
