// The message format, and whose rank a message speaks for.
#include "serried/base/error.h"

#include <c10/util/StringUtil.h>

#include <atomic>

namespace serried {
namespace {

thread_local RankLabel thread_label;

// One word, so that a reader on another thread sees rank and size of the same label.
std::atomic<uint64_t> process_label{0};

uint64_t pack(RankLabel label) {
  return (uint64_t(uint32_t(label.rank)) << 32) | uint32_t(label.world_size);
}

RankLabel unpack(uint64_t word) {
  if (word == 0) return {};
  return {.rank = int(word >> 32), .world_size = int(word & 0xffffffff)};
}

}  // namespace

std::string format_error(const ErrorText& error) {
  std::string text = c10::str("[", error.where, "] ", error.what);
  if (!error.fix.empty()) text += "\n  fix: " + error.fix;
  const RankLabel label = rank_label();
  if (label.rank >= 0) text += c10::str("\n  at:  rank ", label.rank, "/", label.world_size);
  return text;
}

RankLabel rank_label() {
  if (thread_label.rank >= 0) return thread_label;
  return unpack(process_label.load(std::memory_order_relaxed));
}

void set_process_rank_label(RankLabel label) {
  uint64_t none = 0;
  process_label.compare_exchange_strong(none, pack(label));
}

ThreadRankLabel::ThreadRankLabel(RankLabel label) : previous_(thread_label) {
  thread_label = label;
}

ThreadRankLabel::~ThreadRankLabel() {
  thread_label = previous_;
}

}  // namespace serried
