// The decompositions of serried/comm/backends/{shm,hierarchical}, by the same sizes; a test counts what those send.
#include "tools/serried/simulate/collective.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "tools/serried/simulate/error.h"

namespace serried::simulation {
namespace {

constexpr std::pair<std::string_view, Kind> kKinds[] = {
    {"all_reduce", Kind::all_reduce}, {"reduce", Kind::reduce},         {"reduce_scatter", Kind::reduce_scatter},
    {"all_gather", Kind::all_gather}, {"gather", Kind::gather},         {"scatter", Kind::scatter},
    {"broadcast", Kind::broadcast},   {"all_to_all", Kind::all_to_all}, {"barrier", Kind::barrier}};

// As in hierarchical/engine.h, cut.h, chain.h, chain_to_owners.h and broadcast.cpp, and shm/all_reduce.cpp.
constexpr int64_t kArrivalBytes = 128;
constexpr int64_t kMostCarried = 32 << 10;
constexpr int64_t kPartBytes = 128 << 10;
constexpr int64_t kAhead = 4;
// As in hierarchical/parts.cpp.
constexpr int64_t kMostPartBytes = 128 << 10;
constexpr int64_t kLeastPartBytes = 8 << 10;
constexpr int64_t kLaneBytes = 2 << 20;
constexpr int64_t kLine = 64;
constexpr int64_t kMostInSlots = 16 << 10;

int64_t rounded_up(int64_t number, int64_t unit) {
  return (number + unit - 1) / unit * unit;
}

int64_t sum(const std::vector<int64_t>& numbers, size_t begin, size_t end) {
  return std::accumulate(numbers.begin() + ptrdiff_t(begin), numbers.begin() + ptrdiff_t(end), int64_t(0));
}

int64_t sum(const std::vector<int64_t>& numbers) {
  return sum(numbers, 0, numbers.size());
}

std::vector<int64_t> times(const std::vector<int64_t>& numbers, int64_t factor) {
  std::vector<int64_t> products = numbers;
  for (int64_t& number : products) number *= factor;
  return products;
}

bool has_root(Kind kind) {
  return kind == Kind::reduce || kind == Kind::gather || kind == Kind::scatter || kind == Kind::broadcast;
}

// Everything about one call on some hosts.
class Decomposition {
 public:
  Decomposition(const Call& call, const HostSizes& hosts)
      : call_(call), hosts_(hosts), ranks_(sum(hosts)), most_(*std::max_element(hosts.begin(), hosts.end())) {}

  std::vector<Step> steps() {
    if (hosts_.size() == 1) {
      share_memory();
      return std::move(steps_);
    }
    arrive();
    if (call_.bytes == 0 || is_carried()) return std::move(steps_);
    if (is_reduction() && adds_by_hosts()) {
      add_by_hosts();
      return std::move(steps_);
    }
    switch (call_.kind) {
      case Kind::all_reduce: chain(); break;
      case Kind::reduce_scatter:
      case Kind::reduce: chain_to_owners(); break;
      case Kind::all_gather: move_shared(times(hosts_, call_.bytes), call_.bytes); break;
      case Kind::broadcast: move_shared(of_root(call_.bytes), call_.bytes); break;
      case Kind::gather: move_each(times(hosts_, call_.bytes), of_root(1)); break;
      case Kind::scatter: move_each(of_root(call_.bytes / ranks_), hosts_); break;
      case Kind::all_to_all: move_each(times(hosts_, call_.bytes / ranks_), hosts_); break;
      case Kind::barrier: break;
    }
    return std::move(steps_);
  }

 private:
  std::vector<int64_t> ones() const { return std::vector<int64_t>(hosts_.size(), 1); }

  /// A number for the host of the root, 0 for others.
  std::vector<int64_t> of_root(int64_t number) const {
    std::vector<int64_t> all(hosts_.size(), 0);
    all[0] = number;
    return all;
  }

  bool is_carried() const { return call_.bytes <= kMostCarried; }

  /// One message of each rank to one of each other host, with all bytes where they are few.
  void arrive() {
    const int64_t others = int64_t(hosts_.size()) - 1;
    // A rank whose pieces differ tells how large they are: of broadcast, those that give nothing.
    const bool has_table = call_.kind == Kind::gather || call_.kind == Kind::scatter || call_.kind == Kind::broadcast;
    const int64_t table = has_table ? rounded_up(ranks_ * 8, kLine) : 0, head = kArrivalBytes + table;
    Step step{.name = "arrive", .give = times(hosts_, head), .take = ones(), .messages = times(hosts_, others)};
    if (call_.kind == Kind::broadcast) step.give[0] -= table;
    step.copied.assign(hosts_.size(), 0);
    if (is_carried()) {
      const bool from_root = call_.kind == Kind::broadcast || call_.kind == Kind::scatter;
      const std::vector<int64_t> carried = from_root ? of_root(call_.bytes) : times(hosts_, call_.bytes);
      for (size_t host = 0; host < hosts_.size(); ++host) {
        step.give[host] += carried[host];
        step.copied[host] = hosts_[host] * (from_root ? call_.bytes : taken_by_each());
      }
      if (call_.kind == Kind::all_reduce || call_.kind == Kind::reduce) step.added = ranks_ * call_.bytes;
      if (call_.kind == Kind::reduce_scatter) step.added = call_.bytes;
    }
    step.net_hops = 1;
    step.memory_hops = 1;
    steps_.push_back(std::move(step));
  }

  /// What a rank reads of what all have laid out.
  int64_t taken_by_each() const {
    switch (call_.kind) {
      case Kind::all_gather: return ranks_ * call_.bytes;
      case Kind::all_reduce: return call_.bytes;  // the result: what is added counts as that
      case Kind::reduce_scatter: return call_.bytes / ranks_;
      default: return call_.bytes;
    }
  }

  bool is_reduction() const {
    return call_.kind == Kind::all_reduce || call_.kind == Kind::reduce_scatter || call_.kind == Kind::reduce;
  }

  bool adds_by_hosts() const {
    const bool is_default = call_.order == Order::automatic && hosts_.size() > 2;
    return is_default || call_.order == Order::hosts || ranks_ == int64_t(hosts_.size());
  }

  /// Elements whose results are a host's, and in how many chunks they are made.
  struct Results {
    std::vector<int64_t> owned;
    int64_t chunks = 0;
  };

  Results results() const {
    const int64_t num_hosts = int64_t(hosts_.size()), elements = call_.bytes / call_.element_bytes;
    const int64_t unit = std::max<int64_t>(1, kLine / call_.element_bytes);
    const int64_t most = std::clamp(kLaneBytes / num_hosts / 1024 * 1024, kLeastPartBytes, kMostPartBytes);
    const int64_t part = most / partial_bytes() / unit * unit;
    Results results{std::vector<int64_t>(hosts_.size(), 0)};
    switch (call_.kind) {
      case Kind::all_reduce: results.chunks = deal(elements, part, unit, results.owned); break;
      case Kind::reduce:
        results.owned[0] = elements;
        results.chunks = (elements + most_ * part - 1) / (most_ * part);
        break;
      default:
        for (size_t host = 0; host < hosts_.size(); ++host) results.owned[host] = elements / ranks_ * hosts_[host];
        results.chunks = (elements / ranks_ / std::max<int64_t>(1, most_ / hosts_[0]) + part - 1) / part;
    }
    return results;
  }

  /// Hosts exchange sums of what their ranks have, chunk by chunk, and results.
  void add_by_hosts() {
    const auto [owned, chunks] = results();
    exchange_sums(owned, chunks);
    if (call_.kind == Kind::all_reduce) spread_results(owned, chunks);
  }

  /// A row over the lanes and hosts of each chunk; how many chunks there are.
  int64_t deal(int64_t elements, int64_t part, int64_t unit, std::vector<int64_t>& owned) const {
    const int64_t num_hosts = int64_t(hosts_.size()), parts = most_ * num_hosts;
    int64_t chunks = 0;
    for (int64_t left = elements; left > 0; ++chunks) {
      const int64_t count = std::min(parts * part, left);
      const int64_t each = rounded_up((count + parts - 1) / parts, unit);
      for (int64_t index = 0; index < parts; ++index) {
        const int64_t begin = std::min(count, each * index);
        owned[size_t(index % num_hosts)] += std::min(each, count - begin);
      }
      left -= count;
    }
    return chunks;
  }

  void exchange_sums(const std::vector<int64_t>& owned, int64_t chunks) {
    const int64_t others = int64_t(hosts_.size()) - 1;
    Step step{.name = "sums", .give = ones(), .take = times(owned, partial_bytes())};
    step.messages.assign(hosts_.size(), chunks * most_ * others);
    for (size_t host = 0; host < hosts_.size(); ++host) {
      step.copied.push_back(call_.kind == Kind::reduce_scatter ? call_.bytes * hosts_[host] : 0);
    }
    const int64_t least = *std::min_element(hosts_.begin(), hosts_.end());
    step.added = call_.bytes + *std::max_element(owned.begin(), owned.end()) * partial_bytes() * (others + 1) / least;
    step.net_hops = 1;
    step.memory_hops = most_ > 1 ? 1 : 0;
    step.chunks = chunks;
    steps_.push_back(std::move(step));
  }

  void spread_results(const std::vector<int64_t>& owned, int64_t chunks) {
    const int64_t others = int64_t(hosts_.size()) - 1;
    Step step{.name = "results", .give = times(owned, call_.element_bytes), .take = ones()};
    step.messages.assign(hosts_.size(), chunks * most_ * others);
    step.copied = times(hosts_, call_.bytes);
    step.net_hops = 1;
    step.memory_hops = most_ > 1 ? 1 : 0;
    step.chunks = chunks;
    steps_.push_back(std::move(step));
  }

  /// Up the hosts and back, a part of each chunk by each lane.
  void chain() {
    const int64_t lanes = *std::min_element(hosts_.begin(), hosts_.end());
    const int64_t partial = call_.bytes / call_.element_bytes * partial_bytes();
    const int64_t chunks = (partial + lanes * kPartBytes - 1) / (lanes * kPartBytes);
    Step step{.name = "chain", .up = partial, .down = call_.bytes};
    step.copied = times(hosts_, call_.bytes);
    for (size_t host = 0; host < hosts_.size(); ++host) {
      const bool has_two = host > 0 && host + 1 < hosts_.size();
      step.messages.push_back(chunks * lanes * (has_two ? 2 : 1));
    }
    step.added = (partial + lanes - 1) / lanes * (most_ + 1);
    step.memory_hops = 2;
    step.pipeline = {.chunks = chunks,
                     .ahead = kAhead,
                     .lanes = lanes,
                     .up_bytes = (partial + chunks - 1) / chunks,
                     .down_bytes = (call_.bytes + chunks - 1) / chunks,
                     .hops_back = int64_t(hosts_.size()) - 1};
    steps_.push_back(std::move(step));
  }

  /// Half precision is added in single.
  int64_t partial_bytes() const { return std::max<int64_t>(call_.element_bytes, 4); }

  /// Up the hosts, the last of which sends every host what its ranks own.
  void chain_to_owners() {
    const auto [owned, chunks] = results();
    const int64_t others = int64_t(hosts_.size()) - 1;
    const int64_t partial = call_.bytes / call_.element_bytes * partial_bytes();
    const std::vector<int64_t> given = times(owned, call_.element_bytes);
    Step step{.name = "chain", .give = std::vector<int64_t>(hosts_.size(), 0), .take = given, .up = partial};
    step.give.back() = 1;
    step.messages.assign(hosts_.size(), chunks * most_);
    step.messages.back() *= others;
    for (size_t host = 0; host < hosts_.size(); ++host) {
      step.copied.push_back(call_.kind == Kind::reduce_scatter ? call_.bytes * hosts_[host] : given[host]);
    }
    const int64_t least = *std::min_element(hosts_.begin(), hosts_.end());
    step.added = (partial + least - 1) / least * (most_ + 1);
    step.memory_hops = 2;
    step.pipeline = {.chunks = chunks,
                     .ahead = kAhead,
                     .lanes = least,
                     .up_bytes = (partial + chunks - 1) / chunks,
                     .down_bytes = (sum(given, 0, given.size() - 1) + chunks - 1) / chunks,
                     .hops_back = 1};
    steps_.push_back(std::move(step));
  }

  /// A piece of each rank for each of another host.
  void move_each(const std::vector<int64_t>& give, const std::vector<int64_t>& take) {
    Step step{.name = "move", .give = give, .take = take};
    for (size_t host = 0; host < hosts_.size(); ++host) {
      step.messages.push_back(give[host] == 0 ? 0 : hosts_[host] * (ranks_ - hosts_[host]));
      step.copied.push_back(give[host] * take[host]);
    }
    step.net_hops = 1;
    step.memory_hops = 1;
    steps_.push_back(std::move(step));
  }

  /// One piece of each rank once to each other host, where neighbours share it.
  void move_shared(const std::vector<int64_t>& give, int64_t piece) {
    const int64_t total = sum(give);
    const int64_t others = int64_t(hosts_.size()) - 1;
    Step move{.name = "move", .give = give, .take = ones()};
    if (call_.kind == Kind::broadcast && others > 1) pass_on(move);
    Step share{.name = "share"};
    int64_t rounds = 0;
    for (size_t host = 0; host < hosts_.size(); ++host) {
      const int64_t givers = has_root(call_.kind) ? int64_t(give[host] > 0) : hosts_[host];
      move.messages.push_back(move.pipeline ? move.pipeline->chunks * int64_t(host < size_t(others)) : givers * others);
      move.copied.push_back(give[host] * (hosts_[host] - 1));
      share.copied.push_back((total - give[host]) * (hosts_[host] - 1));
      if (hosts_[host] < 2) continue;
      const int64_t come = piece == 0 ? 0 : (total - give[host] + piece - 1) / piece;
      rounds = std::max(rounds, (come + hosts_[host] - 1) / hosts_[host]);
    }
    move.net_hops = 1;
    move.memory_hops = most_ > 1 ? 1 : 0;
    share.memory_hops = rounds;
    steps_.push_back(std::move(move));
    if (rounds > 0) steps_.push_back(std::move(share));
  }

  /// From the root's host to the next, and so on.
  void pass_on(Step& move) const {
    const int64_t chunks = (call_.bytes + kPartBytes - 1) / kPartBytes;
    move.give = move.take = {};
    move.up = call_.bytes;
    move.pipeline = {.chunks = chunks, .ahead = kAhead, .up_bytes = (call_.bytes + chunks - 1) / chunks};
  }

  /// All ranks on one host.
  void share_memory() {
    Step step{.name = "share", .memory_hops = ranks_ > 1 ? 1 : 0};
    const int64_t bytes = ranks_ > 1 ? call_.bytes : 0;
    int64_t copied = 0;
    switch (call_.kind) {
      case Kind::all_reduce:
        copied = ranks_ * bytes;
        step.added = bytes <= kMostInSlots ? ranks_ * bytes : bytes;
        if (bytes > kMostInSlots) ++step.memory_hops;
        break;
      case Kind::reduce_scatter: copied = bytes, step.added = bytes; break;
      case Kind::reduce: copied = bytes, step.added = ranks_ * bytes; break;
      case Kind::all_gather: copied = ranks_ * (ranks_ - 1) * bytes; break;
      case Kind::gather: copied = (ranks_ - 1) * bytes; break;
      case Kind::scatter: copied = (ranks_ - 1) * (bytes / ranks_); break;
      case Kind::broadcast: copied = (ranks_ - 1) * bytes; break;
      case Kind::all_to_all: copied = (ranks_ - 1) * bytes; break;
      case Kind::barrier: break;
    }
    step.copied = {copied};
    steps_.push_back(std::move(step));
  }

  const Call& call_;
  const HostSizes& hosts_;
  const int64_t ranks_;
  const int64_t most_;  // of any host
  std::vector<Step> steps_ = {};
};

}  // namespace

std::optional<Kind> kind_of(std::string_view word) {
  for (const auto& [name, kind] : kKinds) {
    if (word == name) return kind;
  }
  return std::nullopt;
}

const char* name_of(Kind kind) {
  for (const auto& [name, each] : kKinds) {
    if (each == kind) return name.data();
  }
  return "";
}

int64_t Step::out_of(size_t host) const {
  return Traffic(*this).out_of(host, host + 1);
}

int64_t Step::into(size_t host) const {
  return Traffic(*this).into(host, host + 1);
}

Traffic::Traffic(const Step& step) : step_(step), given_(sum(step.give)), taken_(sum(step.take)) {}

int64_t Traffic::out_of(size_t begin, size_t end) const {
  const int64_t in_chain = (end < step_.copied.size() ? step_.up : 0) + (begin > 0 ? step_.down : 0);
  if (step_.give.empty()) return in_chain;
  return sum(step_.give, begin, end) * (taken_ - sum(step_.take, begin, end)) + in_chain;
}

int64_t Traffic::into(size_t begin, size_t end) const {
  const int64_t in_chain = (begin > 0 ? step_.up : 0) + (end < step_.copied.size() ? step_.down : 0);
  if (step_.give.empty()) return in_chain;
  return (given_ - sum(step_.give, begin, end)) * sum(step_.take, begin, end) + in_chain;
}

std::vector<Step> steps_of(const Call& call, const HostSizes& hosts) {
  const double ranks = double(sum(hosts));
  if (double(std::max<int64_t>(call.bytes, 1)) * ranks * ranks > 4e18) {
    throw SimulationError(std::string(name_of(call.kind)) + " of " + std::to_string(call.bytes) + " bytes over " +
                              std::to_string(sum(hosts)) + " ranks moves more bytes than can be counted",
                          "make the model or the mesh smaller");
  }
  return Decomposition(call, hosts).steps();
}

}  // namespace serried::simulation
