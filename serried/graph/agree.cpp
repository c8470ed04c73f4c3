// Every rank leaves its list of collectives in the store of the group, and reads those of the others.
#include "serried/graph/agree.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <string>
#include <string_view>

#include "serried/comm/watch.h"
#include "serried/graph/error.h"
#include "serried/graph/text.h"

namespace serried::graph {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using Lines = std::vector<std::string>;

template <size_t n>
bool is_one_of(std::string_view name, const std::array<std::string_view, n>& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// One rank's send is another's recv: two lists cannot show whether they meet.
bool is_for_all(const Node& node) {
  return node.is_collective() && !is_one_of(node.short_name(), std::array<std::string_view, 2>{"recv", "send"});
}

int64_t bytes_of(const Graph& graph, const std::vector<ValueId>& ids) {
  int64_t bytes = 0;
  for (ValueId id : ids) {
    if (id != kNoValue && graph.value(id).kind != ValueKind::work) bytes += graph.value(id).meta.num_bytes();
  }
  return bytes;
}

// The larger of operand and result: what a rank gives to a gather may be of any size, all of it is the same everywhere.
int64_t common_bytes(const Graph& graph, const Node& node) {
  int64_t bytes = 0;
  for (const Argument& argument : node.arguments) bytes = std::max(bytes, bytes_of(graph, argument.ids));
  for (const auto& ids : node.results) bytes = std::max(bytes, bytes_of(graph, ids));
  return bytes;
}

// "all_reduce op=sum f32 48 bytes": what has to be the same on all ranks.
std::string line_of_collective(const Graph& graph, const Node& node) {
  static constexpr std::array<std::string_view, 5> kAlike = {"op", "reduce_op", "src", "dst", "root_rank"};
  static constexpr std::array<std::string_view, 3> kUneven = {"all_to_all", "gather", "scatter"};
  std::string line = node.short_name();
  for (size_t k = 0; k < node.arguments.size(); ++k) {
    const std::string& name = node.op.schema().arguments()[k].name();
    if (is_one_of(name, kAlike)) line += c10::str(" ", name, "=", constant_text(node.arguments[k].constant));
  }
  ValueId first = kNoValue;
  for_each_operand(node, [&](ValueId id) { first = first == kNoValue ? id : first; });
  if (first == kNoValue) return line;
  line += c10::str(" ", watch::dtype_name(graph.value(first).meta.dtype));
  return is_one_of(node.short_name(), kUneven) ? line : line + c10::str(" ", common_bytes(graph, node), " bytes");
}

Lines split_lines(const std::string& text) {
  Lines lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

Group group_named(const std::string& name, const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    if (group->getGroupName() == name) return group;
  }
  return c10d::resolve_process_group(name);
}

// The page of one captured function in the store of one group.
class Page {
 public:
  Page(const Group& group, RecordedCall call, Lines mine)
      : group_(group),
        mine_(std::move(mine)),
        store_(group->getStore()),
        call_(call.call),
        prefix_(c10::str("capture/", call.function, "/")),
        deadline_(steady_clock::now() + store_->getTimeout()) {}

  void publish() {
    const std::string rank = prefix_ + std::to_string(group_->getRank());
    const int64_t k = store_->add(rank + "/count", 1) - 1;
    store_->set(c10::str(rank, "/", k), c10::str(call_, "\n", c10::Join("\n", mine_)));
  }

  void compare() {
    for (int peer = 0; peer < group_->getSize(); ++peer) {
      if (peer != group_->getRank()) compare(peer);
    }
  }

 private:
  // Reads what the peer has published until it is the same.
  void compare(int peer) {
    for (int64_t k = 0;; ++k) {
      Lines theirs = split_lines(read(peer, k));
      const bool is_same_call = theirs.at(0) == std::to_string(call_);
      theirs.erase(theirs.begin());
      if (theirs == mine_) return;
      if (is_same_call) raise_difference(peer, theirs);
    }
  }

  std::string read(int peer, int64_t k) {
    const std::string key = c10::str(prefix_, peer, "/", k);
    const auto left = std::chrono::ceil<milliseconds>(deadline_ - steady_clock::now());
    try {
      store_->wait({key}, std::max(left, milliseconds(1)));
    } catch (const c10::DistStoreError&) {
      if (steady_clock::now() < deadline_) throw;
      raise_missing(peer);
    }
    return store_->get_to_str(key);
  }

  std::string group_text() const {
    const std::string& text = group_->getGroupDesc();
    return text.empty() || text == "undefined" ? group_->getGroupName() : text;
  }

  [[noreturn]] void raise_difference(int peer, const Lines& theirs) const {
    size_t i = 0;
    while (i < std::min(mine_.size(), theirs.size()) && mine_[i] == theirs[i]) ++i;
    const auto at = [i](const Lines& lines) { return i < lines.size() ? "\"" + lines[i] + "\"" : "missing"; };
    throw CaptureError({CaptureErrorKind::different_ranks,
                        "",
                        "",
                        c10::str("collective ", i, " on the group ", group_text(), " is ", at(mine_), " on rank ",
                                 group_->getRank(), " and ", at(theirs), " on rank ", peer),
                        {"run the same collectives in the same order on every rank, with the same passes"}});
  }

  [[noreturn]] void raise_missing(int peer) const {
    throw CaptureError(
        {CaptureErrorKind::different_ranks,
         "",
         "",
         c10::str("rank ", group_->getRank(), " waited ", store_->getTimeout().count(), " ms for rank ", peer,
                  " to record the same collectives on the group ", group_text()),
         {"call the captured function on every rank, in the same order among other captured functions"}});
  }

  const Group group_;
  const Lines mine_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const int64_t call_;
  const std::string prefix_;
  const steady_clock::time_point deadline_;
};

bool has_peers(const Group& group) {
  return group->getSize() > 1 && group->getStore() && group->getBackendName() != "fake";
}

}  // namespace

void agree_on_collectives(const Graph& graph, const std::vector<Group>& groups, RecordedCall call) {
  std::map<std::string, Lines> by_group;
  for (const Node& node : graph.nodes()) {
    if (is_for_all(node)) by_group[node.group_name()].push_back(line_of_collective(graph, node));
  }
  std::vector<Page> pages;
  for (auto& [name, lines] : by_group) {
    const Group group = group_named(name, groups);
    if (has_peers(group)) pages.emplace_back(group, call, std::move(lines));
  }
  // All of them before the first wait: the names of groups, and so their order, may differ between ranks.
  for (Page& page : pages) page.publish();
  for (Page& page : pages) page.compare();
}

}  // namespace serried::graph
