// Which topics are on, and lines that reach stderr whole.
#include "serried/base/log.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <set>
#include <string_view>

#include <unistd.h>

#include "serried/base/env.h"
#include "serried/base/error.h"

namespace serried::log {
namespace {

constexpr std::array<std::string_view, 6> kTopics{"comm", "launch", "plan", "dispatch", "graph", "checkpoint"};
constexpr uint32_t kAll = (1U << kTopics.size()) - 1;

uint32_t parse_topic(std::string_view word) {
  if (word.empty() || word == "none") return 0;
  if (word == "all") return kAll;
  for (size_t i = 0; i < kTopics.size(); ++i) {
    if (word == kTopics[i]) return 1U << i;
  }
  raise<c10::ValueError>({"log", c10::str("unknown topic \"", word, "\""),
                          "use all, none, or some of comm, launch, plan, dispatch, graph, checkpoint"});
}

uint32_t parse_topics(std::string_view topics) {
  uint32_t mask = 0;
  while (!topics.empty()) {
    const size_t comma = std::min(topics.find(','), topics.size());
    mask |= parse_topic(topics.substr(0, comma));
    topics.remove_prefix(std::min(comma + 1, topics.size()));
  }
  return mask;
}

void print(std::string_view tag, const std::string& text) {
  const RankLabel label = rank_label();
  const std::string rank = label.rank < 0 ? "" : c10::str("rank ", label.rank, "/", label.world_size, " ");
  const std::string line = c10::str("[serried ", rank, tag, "] ", text, "\n");
  // One write, not a stream: lines of several ranks on one terminal stay whole.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

// A wrong SERRIED_LOG must not stop a program before main: it is told and ignored.
uint32_t topics_at_start() {
  try {
    return parse_topics(env::text("SERRIED_LOG"));
  } catch (const c10::Error& error) {
    print("warning", error.what_without_backtrace());
    return 0;
  }
}

std::atomic<uint32_t> enabled_topics{topics_at_start()};

}  // namespace

bool enabled(Topic topic) {
  return (enabled_topics.load(std::memory_order_relaxed) >> int(topic)) & 1U;
}

void write(Topic topic, const std::string& text) {
  print(kTopics[size_t(topic)], text);
}

void warn_once(const std::string& text) {
  static std::mutex mutex;
  static auto* seen = new std::set<std::string>();  // never destroyed: warnings may come at exit
  {
    std::lock_guard<std::mutex> lock(mutex);
    if (!seen->insert(text).second) return;
  }
  print("warning", text);
}

void set_topics(const std::string& topics) {
  enabled_topics.store(parse_topics(topics), std::memory_order_relaxed);
}

}  // namespace serried::log
