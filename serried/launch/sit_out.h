// Which nodes' ranks fail so often that they are better left out for a while. Pure: no clock.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "serried/launch/loop.h"
#include "serried/launch/options.h"

namespace serried::launch {

/// A node sits out for `span` when its ranks have failed `kFailures` times within `span`; then it begins anew. A span
/// of 0: none ever does.
class SitOut {
 public:
  static constexpr size_t kFailures = 3;

  explicit SitOut(Seconds span) : span_(std::chrono::duration_cast<Clock::duration>(span)) {}

  /// A rank of `node`, whatever names it, has failed.
  void failed(const std::string& node, Time now);

  bool sits_out(const std::string& node, Time now) const;

  /// When the next of them is back; kNever if none sits out.
  Time next_back(Time now) const;

  /// "h1 sits out for 600 s: its ranks failed 3 times within that time"
  std::string text(const std::string& host) const;

 private:
  struct Record {
    std::vector<Time> failures = {};  // not older than the span
    Time back_at = {};
  };

  Clock::duration span_;
  std::map<std::string, Record> records_;
};

}  // namespace serried::launch
