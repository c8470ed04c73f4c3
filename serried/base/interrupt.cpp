// The one check of the process.
#include "serried/base/interrupt.h"

namespace serried::interrupt {

std::atomic<void (*)()> detail::installed{nullptr};

void set_check(void (*check)()) {
  detail::installed.store(check);
}

void check() {
  if (auto* const installed = detail::installed.load()) installed();
}

std::string reason(int rank) {
  return "rank " + std::to_string(rank) + " was interrupted";
}

}  // namespace serried::interrupt
