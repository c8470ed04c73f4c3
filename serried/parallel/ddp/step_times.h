// When the parts of training steps happened, and what that says about overlap.
#pragma once

#include <chrono>
#include <cstdint>

namespace serried::detail {

/// Nanoseconds on the steady clock; 0: has not happened.
struct StepTimes {
  int64_t forward_start = 0;
  int64_t backward_start = 0;       // of compute
  int64_t backward_end = 0;         // of compute: all gradients are there
  int64_t communication_start = 0;  // the first bucket was launched
  int64_t communication_end = 0;    // the last one was done

  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }

  int64_t forward() const { return backward_start - forward_start; }
  int64_t backward() const { return backward_end - backward_start; }
  int64_t communication() const { return communication_end - communication_start; }
  /// What backward would not have had to wait for.
  int64_t overlap() const { return backward_end - communication_start > 0 ? backward_end - communication_start : 0; }
  int64_t exposed() const { return communication_end - backward_end; }
};

/// Times of sampled iterations: the first ten, then one in every `stats_every`.
class StepStatistics {
 public:
  explicit StepStatistics(int64_t stats_every) : stats_every_(stats_every) {}

  /// `iteration` counts from 1. Whether it was taken.
  bool add(int64_t iteration, const StepTimes& times) {
    if (iteration > kAlways && iteration % stats_every_ != 0) return false;
    iteration_ = iteration;
    last_ = times;
    ++num_samples_;
    int64_t* sum = sums_;
    for (const auto part : kParts) *sum++ += (times.*part)();
    return true;
  }

  const StepTimes& last() const { return last_; }
  int64_t iteration() const { return iteration_; }
  int64_t average(int64_t (StepTimes::*part)() const) const {
    for (int i = 0; i < kNumParts; ++i) {
      if (kParts[i] == part && num_samples_ > 0) return sums_[i] / num_samples_;
    }
    return 0;
  }

 private:
  static constexpr int64_t kAlways = 10;
  static constexpr int kNumParts = 4;
  static constexpr int64_t (StepTimes::*kParts[kNumParts])() const = {&StepTimes::forward, &StepTimes::backward,
                                                                      &StepTimes::communication, &StepTimes::overlap};
  int64_t stats_every_;
  int64_t iteration_ = 0;
  int64_t num_samples_ = 0;
  int64_t sums_[kNumParts] = {};
  StepTimes last_;
};

}  // namespace serried::detail
