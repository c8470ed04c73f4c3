// Rank-prefixed logging by topic: SERRIED_LOG=comm,plan (or all, or none).
#pragma once

#include <c10/util/StringUtil.h>

#include <string>

namespace serried::log {

enum class Topic { comm, launch, plan, dispatch, graph, checkpoint };

/// Whether lines of `topic` are printed; one relaxed load, so guard costly text with it.
bool enabled(Topic topic);

/// Prints "[serried rank 2/4 comm] text" to stderr as one write, so lines never interleave.
void write(Topic topic, const std::string& text);

/// Logs if the topic is on: `log::line(Topic::comm, "made group ", name)`.
template <class... Parts>
void line(Topic topic, const Parts&... parts) {
  if (enabled(topic)) write(topic, c10::str(parts...));
}

/// A warning is always printed, once per distinct text and process.
void warn_once(const std::string& text);

/// Replaces the topics that SERRIED_LOG chose at start; the same notation.
void set_topics(const std::string& topics);

}  // namespace serried::log
