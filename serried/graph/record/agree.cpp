// Every rank leaves its list of collectives in the store of the group, and reads those of the others.
#include "serried/graph/record/agree.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/watch.h"
#include "serried/graph/error.h"
#include "serried/graph/record/notice.h"
#include "serried/graph/text/text.h"

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

// The same for c10d's ops and ours.
std::string_view common_name(std::string_view argument) {
  if (argument == "op" || argument == "reduce_op") return "op";
  if (argument == "src" || argument == "dst" || argument == "root_rank") return "root";
  return "";
}

// "all_reduce op=sum f32 48 bytes": what has to be the same on all ranks.
std::string line_of_collective(const Graph& graph, const Node& node) {
  static constexpr std::array<std::string_view, 3> kUneven = {"all_to_all", "gather", "scatter"};
  const std::string name = node.short_name();
  std::string line = name;
  for (size_t k = 0; k < node.arguments.size(); ++k) {
    const std::string_view alike = common_name(node.op.schema().arguments()[k].name());
    if (!alike.empty()) line += c10::str(" ", alike, "=", constant_text(node.arguments[k].constant));
  }
  ValueId first = kNoValue;
  for_each_operand(node, [&](ValueId id) { first = first == kNoValue ? id : first; });
  if (first == kNoValue) return line;
  line += c10::str(" ", watch::dtype_name(graph.value(first).meta.dtype));
  return is_one_of(name, kUneven) ? line : line + c10::str(" ", common_bytes(graph, node), " bytes");
}

std::map<std::string, Lines> lines_by_group(const Graph& graph) {
  std::map<std::string, Lines> by_group;
  for (const Node& node : graph.nodes()) {
    if (is_for_all(node)) by_group[node.group_name()].push_back(line_of_collective(graph, node));
  }
  return by_group;
}

Group group_named(const std::string& name, const std::vector<Group>& groups) {
  for (const Group& group : groups) {
    if (group->getGroupName() == name) return group;
  }
  return c10d::resolve_process_group(name);
}

// What a rank tells of one call, in this order: a graph is there, with its collectives; ranks of which it knows the
// same, once or several times; all of them replay from the next call on.
constexpr std::string_view kSettled = "settled";
constexpr std::string_view kKnows = "knows";
constexpr std::string_view kBegins = "begins";

using RankIds = std::set<std::string>;

// A name for this rank in one call, since groups number ranks each in its own way.
std::string new_rank_id() {
  std::random_device random;
  return c10::str(random(), "-", random(), "-", random());
}

std::string_view status_text(RecordingStatus status) {
  static constexpr std::array<std::string_view, 3> kTexts = {"pending", "refused", "eager"};
  return kTexts[size_t(status)];
}

// The page of one captured function in the store of one group.
class Page {
 public:
  Page(const Group& group, RecordedCall call)
      : group_(group),
        call_(std::to_string(call.call)),
        notices_(group, c10::str("capture/", call.function.on(group))),
        timeout_(group->getStore()->getTimeout()),
        deadline_(steady_clock::now() + timeout_) {}

  void tell(std::string_view status) { notices_.add(Notice{call_, std::string(status), mine_}.text()); }
  void tell_known(const RankIds& ids) {
    notices_.add(Notice{call_, std::string(kKnows), Lines(ids.begin(), ids.end())}.text());
  }

  /// `as_recorded`: passes have left the collectives as they were.
  void publish(Lines mine, bool as_recorded) {
    mine_ = std::move(mine);
    as_recorded_ = as_recorded;
    tell(kSettled);
  }

  bool agrees() {
    bool all = true;
    for (int peer = 0; peer < group_->getSize(); ++peer) {
      if (peer != group_->getRank()) all &= agrees_with(peer);
    }
    return all;
  }

  enum class Answer { pending, knows, begins };

  /// What the ranks that agreed in this call have told next; adds the ranks of which they know.
  Answer hear(RankIds& ids) {
    Answer all = Answer::knows;
    for (auto& [peer, next] : in_this_call_) {
      const Notice theirs = read(peer, next++);
      if (theirs.status == status_text(RecordingStatus::pending)) return Answer::pending;
      if (theirs.status == kBegins) {
        all = Answer::begins;
      } else if (theirs.status == kKnows) {
        ids.insert(theirs.lines.begin(), theirs.lines.end());
      } else {
        raise_refused(peer);
      }
    }
    return all;
  }

 private:
  // Reads what the peer has told until it is about this call, or replays it already.
  bool agrees_with(int peer) {
    for (int64_t k = 0;; ++k) {
      const Notice theirs = read(peer, k);
      if (theirs.status == status_text(RecordingStatus::eager)) raise_refused(peer);
      if (theirs.call != call_) {
        if (theirs.status == kBegins && theirs.lines == mine_ && as_recorded_) return true;
        continue;
      }
      if (theirs.status == status_text(RecordingStatus::pending)) return false;
      if (theirs.status == status_text(RecordingStatus::refused)) raise_refused(peer);
      if (theirs.lines != mine_) raise_difference(peer, theirs.lines);
      in_this_call_.emplace_back(peer, k + 1);
      return true;
    }
  }

  Notice read(int peer, int64_t k) {
    const std::optional<std::string> text = notices_.read(peer, k, deadline_);
    if (!text) raise_missing(peer);
    return parse_notice(peer, *text);
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

  [[noreturn]] void raise_refused(int peer) const {
    throw CaptureError(
        {CaptureErrorKind::different_ranks,
         "",
         "",
         c10::str("rank ", peer, " of the group ", group_text(), " cannot capture the function, and rank ",
                  group_->getRank(), " can"),
         {c10::str("see what rank ", peer, " says of it"), "let the function do the same on every rank"}});
  }

  [[noreturn]] void raise_missing(int peer) const {
    throw CaptureError(
        {CaptureErrorKind::different_ranks,
         "",
         "",
         c10::str("rank ", group_->getRank(), " waited ", timeout_.count(), " ms for rank ", peer,
                  " to record the same collectives on the group ", group_text()),
         {"capture the function on every rank of the group or on none, and call it in the same order among others"}});
  }

  const Group group_;
  const std::string call_;
  detail::RankLog notices_;
  const milliseconds timeout_;
  const steady_clock::time_point deadline_;
  Lines mine_;
  bool as_recorded_ = true;
  std::vector<std::pair<int, int64_t>> in_this_call_;  // peers, and which of their notices comes next
};

bool all_of_group(std::vector<Page>& pages) {
  bool all = true;
  for (Page& page : pages) all &= page.agrees();
  return all;
}

// A rank of one group may be held back by another group that its peers here know nothing of. So ranks tell each other
// of whom they know, in rounds, until a round brings nobody new: then it is all that groups link, however far. Who was
// held back says so in the place of a round.
bool all_that_are_linked(std::vector<Page>& pages) {
  RankIds known = {new_rank_id()};
  for (;;) {
    for (Page& page : pages) page.tell_known(known);
    RankIds next = known;
    bool others_begin = false;
    for (Page& page : pages) {
      const Page::Answer answer = page.hear(next);
      if (answer == Page::Answer::pending) return false;
      others_begin |= answer == Page::Answer::begins;
    }
    if (others_begin || next == known) return true;
    known = std::move(next);
  }
}

bool has_peers(const Group& group) {
  return group->getSize() > 1 && group->getStore() && group->getBackendName() != "fake";
}

}  // namespace

int64_t FunctionNumbers::on(const Group& group) {
  static thread_local std::map<std::string, int64_t> next_on;
  const auto [number, is_new] = by_group_.emplace(group->getGroupName(), 0);
  if (is_new) number->second = next_on[group->getGroupName()]++;
  return number->second;
}

void tell_ranks(const std::vector<Group>& groups, RecordedCall call, RecordingStatus status) {
  for (const Group& group : groups) {
    try {
      if (has_peers(group)) Page(group, call).tell(status_text(status));
    } catch (const c10::Error&) {
      // Without their store the others do not wait, they raise.
    }
  }
}

bool agree_on_collectives(const RankedGraphs& graphs, RecordedCall call) {
  const std::map<std::string, Lines> before = lines_by_group(graphs.recorded);
  std::map<std::string, Lines> after = lines_by_group(graphs.replayed);
  for (const std::string& name : graphs.together) after[name];
  std::vector<Page> pages;
  // All are told before the first wait: the names of groups, and so their order, may differ between ranks.
  for (const auto& [name, lines] : after) {
    const Group group = group_named(name, graphs.groups);
    if (!has_peers(group)) continue;
    const auto found = before.find(name);
    // Messages of ranks that replay together fit no recording: one that replays already is not one that agrees.
    const bool together = std::count(graphs.together.begin(), graphs.together.end(), name) > 0;
    const bool as_recorded = !together && (found != before.end() ? found->second == lines : lines.empty());
    pages.emplace_back(group, call).publish(lines, as_recorded);
  }
  const bool all = all_of_group(pages) && all_that_are_linked(pages);
  for (Page& page : pages) page.tell(all ? kBegins : status_text(RecordingStatus::pending));
  return all;
}

}  // namespace serried::graph
