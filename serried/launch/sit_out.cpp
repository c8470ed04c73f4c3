// Failures of nodes, as times.
#include "serried/launch/sit_out.h"

#include <algorithm>

namespace serried::launch {

void SitOut::failed(const std::string& node, Time now) {
  if (span_ <= Clock::duration::zero()) return;
  Record& record = records_[node];
  std::erase_if(record.failures, [&](Time failure) { return now - failure >= span_; });
  record.failures.push_back(now);
  if (record.failures.size() < kFailures) return;
  record.failures.clear();
  record.back_at = now + span_;
}

bool SitOut::sits_out(const std::string& node, Time now) const {
  const auto found = records_.find(node);
  return found != records_.end() && now < found->second.back_at;
}

Time SitOut::next_back(Time now) const {
  Time next = kNever;
  for (const auto& [node, record] : records_) {
    if (now < record.back_at) next = std::min(next, record.back_at);
  }
  return next;
}

std::string SitOut::text(const std::string& host) const {
  return host + " sits out for " + to_text(Seconds(span_)) + ": its ranks failed " + std::to_string(kFailures) +
         " times within that time";
}

}  // namespace serried::launch
