// A rank that sleeps says so in its page, for those who look from outside.
#pragma once

#include "serried/base/watch_page.h"

#include <chrono>

namespace serried::detail {

/// While it lives, the rank of `page` waits: for peers of the collective `sequence`, or, from `waits_for` on, for a
/// send or a receive. Several threads of a rank may wait at once: the last word stays, and who leaves takes it back;
/// those that repeat it, as waits in slices do, are seen again.
class SaysThatItWaits {
 public:
  using Time = std::chrono::steady_clock::time_point;

  explicit SaysThatItWaits(watch_page::RankPage& page) : page_(page) {}
  SaysThatItWaits(watch_page::RankPage& page, uint64_t sequence, Time since) : page_(page) { say(0, sequence, since); }
  ~SaysThatItWaits() {
    if (said_) page_.waits_since.store(0, std::memory_order_relaxed);
  }
  SaysThatItWaits(const SaysThatItWaits&) = delete;
  SaysThatItWaits& operator=(const SaysThatItWaits&) = delete;

  void waits_in(uint64_t sequence, Time since) { say(0, sequence, since); }
  void waits_for(bool sends, int peer, Time since) { say(watch_page::RankPage::peer_word(sends, peer), 0, since); }

 private:
  void say(uint32_t peer, uint64_t sequence, Time since) {
    const auto time = std::chrono::duration_cast<std::chrono::nanoseconds>(since.time_since_epoch());
    page_.waits_for.store(peer, std::memory_order_relaxed);
    page_.waits_in.store(sequence, std::memory_order_relaxed);
    page_.waits_since.store(uint64_t(time.count()), std::memory_order_relaxed);
    said_ = true;
  }

  watch_page::RankPage& page_;
  bool said_ = false;
};

}  // namespace serried::detail
