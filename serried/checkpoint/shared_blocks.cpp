// Ranks tell each other hashes of leaves, as lists of numbers.
#include "serried/checkpoint/shared_blocks.h"

#include <algorithm>
#include <map>
#include <utility>

namespace serried::checkpoint::detail {
namespace {

// Runs of leaves that were read: file, block, first leaf, how many, and their hashes. A run may have none: some bytes
// of the block were read, and no leaf whole.
void add_run(std::vector<int64_t>& to, int64_t file, int64_t block, int64_t first, int64_t end, const BlockPart& part) {
  to.insert(to.end(), {file, block, first, end - first});
  for (int64_t leaf = first; leaf < end; ++leaf) to.push_back(int64_t(part.hashes()[size_t(leaf)]));
}

void add_block(std::vector<int64_t>& to, int64_t file, int64_t block, const BlockPart& part) {
  const size_t before = to.size();
  for (int64_t leaf = 0; leaf < part.num_leaves(); ++leaf) {
    if (!part.knows(leaf)) continue;
    int64_t end = leaf + 1;
    while (end < part.num_leaves() && part.knows(end)) ++end;
    add_run(to, file, block, leaf, end, part);
    leaf = end;
  }
  if (to.size() == before) add_run(to, file, block, 0, 0, part);
}

int64_t number_in_index(const Index& index, const std::string& name) {
  const auto found =
      std::find_if(index.files.begin(), index.files.end(), [&](const IndexedFile& file) { return file.name == name; });
  return found - index.files.begin();
}

}  // namespace

std::vector<std::vector<int64_t>> leaves_for_ranks(const Checkpoint& checkpoint, int num_ranks) {
  std::vector<std::vector<int64_t>> for_ranks(static_cast<size_t>(num_ranks));
  for (const auto& [name, file] : checkpoint.open_files()) {
    if (!file) continue;  // its header could not be read
    const int64_t number = number_in_index(checkpoint.index(), name);
    for (int64_t block : file->blocks_in_parts()) {
      add_block(for_ranks[size_t((number + block) % num_ranks)], number, block, file->part_of_block(block));
    }
  }
  return for_ranks;
}

void check_blocks_of(Checkpoint& checkpoint, const std::vector<int64_t>& leaves) {
  std::map<std::pair<int64_t, int64_t>, BlockPart> known;  // by file and block: one file after the other
  for (size_t at = 0; at < leaves.size();) {
    const int64_t file = leaves.at(at), block = leaves.at(at + 1), first = leaves.at(at + 2), count = leaves.at(at + 3);
    at += 4;
    const std::string& name = checkpoint.index().files.at(size_t(file)).name;
    BlockPart& part = known.try_emplace({file, block}, checkpoint.file(name)->num_leaves(block)).first->second;
    for (int64_t i = 0; i < count; ++i) part.note(first + i, uint64_t(leaves.at(at++)));
  }
  for (auto& [place, part] : known) {
    checkpoint.file(checkpoint.index().files.at(size_t(place.first)).name)->check_block(place.second, std::move(part));
  }
}

}  // namespace serried::checkpoint::detail
