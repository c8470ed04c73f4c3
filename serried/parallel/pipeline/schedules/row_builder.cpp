// Counters per stage, and a queue of weights' gradients that are owed.
#include "serried/parallel/pipeline/schedules/row_builder.h"

#include <algorithm>

namespace serried::detail {

RowBuilder::RowBuilder(std::vector<int64_t> stages, int64_t microbatches)
    : stages_(std::move(stages)),
      microbatches_(microbatches),
      num_forwards_(stages_.size()),
      num_backwards_(stages_.size()) {}

void RowBuilder::add(PipelineAction::Kind kind, int64_t stage, int64_t microbatch) {
  if (microbatch < microbatches_) row_.push_back({kind, stages_[size_t(stage)], microbatch});
}

void RowBuilder::forward(int64_t stage) {
  add(PipelineAction::Kind::F, stage, num_forwards_[size_t(stage)]++);
}

void RowBuilder::backward(int64_t stage) {
  add(PipelineAction::Kind::B, stage, num_backwards_[size_t(stage)]++);
}

void RowBuilder::input(int64_t stage) {
  const int64_t microbatch = num_backwards_[size_t(stage)]++;
  add(PipelineAction::Kind::I, stage, microbatch);
  owed_.push_back({stage, microbatch});
}

void RowBuilder::weight() {
  if (!owed_.empty()) weight(owed_.front().stage);
}

void RowBuilder::weight(int64_t stage) {
  const auto oldest = std::find_if(owed_.begin(), owed_.end(), [&](const Owed& owed) { return owed.stage == stage; });
  if (oldest == owed_.end()) return;
  add(PipelineAction::Kind::W, stage, oldest->microbatch);
  owed_.erase(oldest);
}

void RowBuilder::do_word(std::string_view word) {
  if (word == "W") return weight();
  const int64_t stage = word[1] - '0';
  switch (word[0]) {
    case 'F': return forward(stage);
    case 'B': return backward(stage);
    case 'I': return input(stage);
    default: return weight(stage);
  }
}

RowBuilder& RowBuilder::repeat(int64_t count, std::string_view words) {
  for (; count > 0; --count) {
    for (size_t begin = 0; begin < words.size();) {
      const size_t end = std::min(words.find(' ', begin), words.size());
      do_word(words.substr(begin, end - begin));
      begin = end + 1;
    }
  }
  return *this;
}

std::vector<int64_t> looped_stages(const TableOptions& sizes, int64_t rank) {
  std::vector<int64_t> stages;
  for (int64_t i = 0; i < sizes.stages_per_rank; ++i) stages.push_back(rank + i * sizes.ranks);
  return stages;
}

std::vector<int64_t> v_stages(const TableOptions& sizes, int64_t rank) {
  return {rank, 2 * sizes.ranks - 1 - rank};
}

}  // namespace serried::detail
