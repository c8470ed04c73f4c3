// Gives buffers places in one arena by the span of nodes that need them.
#include <algorithm>
#include <map>
#include <sstream>

#include "serried/graph/passes/access.h"
#include "serried/graph/passes/passes.h"
#include "serried/graph/passes/plan_memory.h"

namespace serried::graph {
namespace {

constexpr int64_t kAlignment = 64;  // bytes: a cache line, and the widest vector

int64_t aligned(int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

struct Block {
  int32_t storage;
  int64_t bytes = 0;
  size_t first = SIZE_MAX, last = 0;  // nodes that need it
  int64_t offset = 0;

  bool lives_with(const Block& other) const { return first <= other.last && other.first <= last; }
};

// One per storage that buffers lie in.
std::map<int32_t, Block> blocks_of(const Graph& graph) {
  std::map<int32_t, Block> blocks;
  for (const Value& value : graph.values()) {
    if (value.kind != ValueKind::buffer) continue;
    Block& block = blocks.try_emplace(value.storage, Block{.storage = value.storage}).first->second;
    block.bytes = std::max(block.bytes, aligned(value.meta.storage_end()));
  }
  const std::vector<Access> accesses = accesses_of(graph);
  for (size_t i = 0; i < accesses.size(); ++i) {
    for (const auto* storages : {&accesses[i].reads, &accesses[i].writes}) {
      for (int32_t storage : *storages) {
        const auto found = blocks.find(storage);
        if (found == blocks.end()) continue;
        found->second.first = std::min(found->second.first, i);
        found->second.last = std::max(found->second.last, i);
      }
    }
  }
  return blocks;
}

// A collective that nobody waits for may use its operands until the end.
void extend_to_waits(const Graph& graph, std::map<int32_t, Block>& blocks) {
  std::vector<bool> is_awaited(graph.values().size());
  for (const Node& node : graph.nodes()) for_each_operand(node, [&](ValueId id) { is_awaited[id] = true; });
  for (const Node& node : graph.nodes()) {
    bool runs_on = false;
    for_each_result(node, [&](ValueId id) { runs_on |= graph.value(id).kind == ValueKind::work && !is_awaited[id]; });
    if (!runs_on) continue;
    for_each_operand(node, [&](ValueId id) {
      const auto found = blocks.find(graph.value(id).storage);
      if (found != blocks.end()) found->second.last = graph.nodes().size();
    });
  }
}

// The lowest gap, among blocks that live at the same time, that is wide enough.
int64_t lowest_gap(const Block& block, const std::vector<Block>& placed_by_offset) {
  int64_t offset = 0;
  for (const Block& other : placed_by_offset) {
    if (!block.lives_with(other)) continue;
    if (offset + block.bytes <= other.offset) break;
    offset = std::max(offset, other.offset + other.bytes);
  }
  return offset;
}

void set_offsets(Graph& graph, const std::vector<Block>& blocks) {
  std::map<int32_t, int64_t> offsets;
  int64_t end = 0;
  for (const Block& block : blocks) {
    offsets[block.storage] = block.offset;
    end = std::max(end, block.offset + block.bytes);
  }
  for (Value& value : graph.values()) {
    if (value.kind == ValueKind::buffer) value.arena_offset = offsets.at(value.storage);
  }
  graph.set_arena_bytes(end);
}

std::string mebibytes(int64_t bytes) {
  std::ostringstream text;
  text.precision(3);
  text << std::fixed << double(bytes) / (1 << 20) << " MiB";
  return text.str();
}

}  // namespace

int64_t add_to_arena(Graph& graph, int64_t bytes) {
  const int64_t offset = aligned(graph.arena_bytes());
  graph.set_arena_bytes(offset + aligned(bytes));
  return offset;
}

void plan_buffers(Graph& graph) {
  std::map<int32_t, Block> by_storage = blocks_of(graph);
  extend_to_waits(graph, by_storage);
  std::vector<Block> blocks;
  for (const auto& [storage, block] : by_storage) blocks.push_back(block);
  // Large ones first: small ones fit between them.
  std::stable_sort(blocks.begin(), blocks.end(), [](const Block& a, const Block& b) { return a.bytes > b.bytes; });
  std::vector<Block> placed;
  for (Block& block : blocks) {
    block.offset = lowest_gap(block, placed);
    const auto before = [](const Block& a, const Block& b) { return a.offset < b.offset; };
    placed.insert(std::upper_bound(placed.begin(), placed.end(), block, before), block);
  }
  set_offsets(graph, blocks);
}

void plan_again(Graph& graph) {
  if (graph.arena_bytes() > 0) plan_buffers(graph);
}

}  // namespace serried::graph

namespace serried::passes {

Pass plan_memory() {
  return {"plan_memory", graph::plan_buffers};
}

std::string memory_report(const graph::Graph& graph) {
  int64_t apart = 0;
  const auto blocks = graph::blocks_of(graph);
  for (const auto& [storage, block] : blocks) apart += block.bytes;
  return c10::str(blocks.size(), " buffers: ", graph::mebibytes(graph.arena_bytes()), " planned, ",
                  graph::mebibytes(apart), " without reuse");
}

}  // namespace serried::passes
