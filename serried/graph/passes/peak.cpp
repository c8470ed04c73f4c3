// Lifetimes of storages, added up.
#include "serried/graph/passes/peak.h"

#include <algorithm>
#include <numeric>

#include "serried/graph/passes/access.h"

namespace serried::graph {
namespace {

struct Span {
  int64_t bytes = 0;
  size_t first = SIZE_MAX, last = 0;  // nodes
  bool is_fixed = false;              // lives in the arena
};

/// Per storage that the run makes; others have no bytes.
std::vector<Span> spans_of(const Graph& graph) {
  std::vector<Span> spans(size_t(new_storage(graph)));
  for (const Value& value : graph.values()) {
    if (value.kind != ValueKind::computed || value.storage < 0) continue;
    int64_t& bytes = spans[size_t(value.storage)].bytes;
    bytes = std::max(bytes, value.meta.num_bytes());
  }
  const std::vector<Access> accesses = accesses_of(graph);
  for (size_t i = 0; i < accesses.size(); ++i) {
    for (const auto* storages : {&accesses[i].reads, &accesses[i].writes}) {
      for (int32_t storage : *storages) {
        Span& span = spans[size_t(storage)];
        span.first = std::min(span.first, i);
        span.last = std::max(span.last, i);
      }
    }
  }
  const Storages storages(graph);
  for (size_t id = 0; id < graph.values().size(); ++id) {
    const Value& value = graph.value(ValueId(id));
    if (value.storage < 0) continue;
    Span& span = spans[size_t(value.storage)];
    if (value.kind == ValueKind::persistent || value.kind == ValueKind::input || value.kind == ValueKind::constant) {
      span.bytes = 0;
    } else if (storages.escapes(ValueId(id))) {
      span.last = accesses.size();
    }
  }
  return spans;
}

// The most that spans of one kind need together.
int64_t peak_of(const std::vector<Span>& spans, size_t num_nodes, bool is_fixed) {
  std::vector<int64_t> change(num_nodes + 2);
  for (const Span& span : spans) {
    if (span.is_fixed != is_fixed || span.bytes == 0 || span.first == SIZE_MAX) continue;
    change[span.first] += span.bytes;
    change[span.last + 1] -= span.bytes;
  }
  int64_t now = 0, most = 0;
  for (int64_t bytes : change) most = std::max(most, now += bytes);
  return most;
}

int64_t bytes_of(const std::vector<Span>& spans, const Graph& graph, const Node& node) {
  int64_t bytes = 0;
  for_each_result(node, [&](ValueId id) { bytes += spans[size_t(graph.value(id).storage)].bytes; });
  return bytes;
}

}  // namespace

std::vector<bool> fits_in_peak(const Graph& graph, const std::vector<size_t>& candidates, double max_peak) {
  std::vector<Span> spans = spans_of(graph);
  const size_t num_nodes = graph.nodes().size();
  const double limit = max_peak * double(peak_of(spans, num_nodes, /*is_fixed=*/false));
  std::vector<size_t> by_size(candidates.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) {
    return bytes_of(spans, graph, graph.nodes()[candidates[a]]) < bytes_of(spans, graph, graph.nodes()[candidates[b]]);
  });
  const auto set_fixed = [&](size_t k, bool is_fixed) {
    for_each_result(graph.nodes()[candidates[by_size[k]]],
                    [&](ValueId id) { spans[size_t(graph.value(id).storage)].is_fixed = is_fixed; });
  };
  // The longest run of smallest ones that fits, found by halving.
  size_t fits = 0, too_many = candidates.size() + 1, fixed = 0;
  while (fits + 1 < too_many) {
    const size_t middle = (fits + too_many) / 2;
    for (; fixed < middle; ++fixed) set_fixed(fixed, true);
    for (; fixed > middle; --fixed) set_fixed(fixed - 1, false);
    const bool in_limit = double(peak_of(spans, num_nodes, true) + peak_of(spans, num_nodes, false)) <= limit;
    (in_limit ? fits : too_many) = middle;
  }
  std::vector<bool> may_stay(candidates.size());
  for (size_t k = 0; k < fits; ++k) may_stay[by_size[k]] = true;
  return may_stay;
}

}  // namespace serried::graph
