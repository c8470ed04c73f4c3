// The answer was given at some moment between question and hearing: half of the way there and back is what may be
// wrong.
#include "serried/launch/clock_offset.h"

#include <charconv>
#include <stdexcept>

namespace serried::launch {
namespace {

// Quartz clocks that nobody disciplines are apart by less.
constexpr int64_t kDriftPerMillion = 100;
constexpr int64_t kLongestTime = int64_t(1) << 61;  // some 70 years: sums of two are numbers still

}  // namespace

int64_t ClockOffset::Sample::error_at(int64_t now_ns) const {
  return estimate.error_ns + (now_ns - heard_ns) / 1'000'000 * kDriftPerMillion;
}

void ClockOffset::add(int64_t asked_ns, int64_t answered_ns, int64_t heard_ns) {
  const bool makes_sense = asked_ns >= 0 && heard_ns >= asked_ns && heard_ns < kLongestTime && answered_ns >= 0 &&
                           answered_ns < kLongestTime;
  if (!makes_sense) return;
  const int64_t half = (heard_ns - asked_ns) / 2;
  const Sample sample{{answered_ns - (asked_ns + half), half + 1}, heard_ns};
  if (!best_ || sample.error_at(heard_ns) <= best_->error_at(heard_ns)) best_ = sample;
}

std::optional<ClockEstimate> ClockOffset::at(int64_t now_ns) const {
  if (!best_) return std::nullopt;
  return ClockEstimate{best_->estimate.offset_ns, best_->error_at(now_ns)};
}

int64_t nanoseconds_in(const std::string& field) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), number);
  if (error != std::errc() || end != field.data() + field.size()) throw std::runtime_error("not a time: " + field);
  return number;
}

}  // namespace serried::launch
