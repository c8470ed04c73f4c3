// Named regions. Autograd numbers the nodes that a thread makes, so a region is an interval of numbers.
#include "serried/tensor/debug/comm_debug_state.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <vector>

namespace serried::detail {
namespace {

struct Interval {
  uint64_t begin;
  uint64_t end;
  std::string path;
};

struct Regions {
  std::vector<std::string> open;  // full paths
  std::vector<uint64_t> open_begins;
  std::vector<Interval> closed;  // in order of their ends
  int keepers = 0;
};

// A mode that lives for a whole training run must not remember every step of it.
constexpr size_t kMaxIntervals = 1 << 16;

Regions& regions() {
  static thread_local Regions instance;
  return instance;
}

void remember(Regions& all, uint64_t begin) {
  if (all.closed.size() >= kMaxIntervals) {
    all.closed.erase(all.closed.begin(), all.closed.begin() + kMaxIntervals / 2);
  }
  all.closed.push_back({begin, at::sequence_number::peek(), all.open.back()});
}

// The innermost region around a number: the one that began last.
std::string region_of_node(uint64_t node) {
  const Regions& all = regions();
  const Interval* best = nullptr;
  for (const Interval& interval : all.closed) {
    if (node < interval.begin || node >= interval.end) continue;
    if (best == nullptr || interval.begin > best->begin) best = &interval;  // of equal ones the inner ends first
  }
  size_t open = all.open.size();
  while (open > 0 && node < all.open_begins[open - 1]) --open;
  if (best != nullptr && (open == 0 || best->begin >= all.open_begins[open - 1])) return best->path;
  return open > 0 ? all.open[open - 1] : "";
}

}  // namespace

uint64_t enter_region(const std::string& name) {
  Regions& all = regions();
  all.open.push_back(all.open.empty() ? name : all.open.back() + "." + name);
  all.open_begins.push_back(at::sequence_number::peek());
  return all.open_begins.back();
}

void leave_region(uint64_t first_node) {
  Regions& all = regions();
  if (all.open.empty()) return;
  if (all.keepers > 0) remember(all, first_node);
  all.open.pop_back();
  all.open_begins.pop_back();
}

void keep_region_history() {
  ++regions().keepers;
}

void drop_region_history() {
  Regions& all = regions();
  if (--all.keepers == 0) all.closed.clear();
}

Where current_region() {
  const auto node = torch::autograd::get_current_node();
  if (node) return {region_of_node(node->sequence_nr()), true};
  const Regions& all = regions();
  // When a backward ends no node runs, and what is left over is done.
  return {all.open.empty() ? "" : all.open.back(), torch::autograd::get_current_graph_task_id() >= 0};
}

}  // namespace serried::detail
