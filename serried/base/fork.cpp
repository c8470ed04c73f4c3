// Counting forks.
#include "serried/base/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried {

namespace detail {
std::atomic<uint32_t> num_forks{0};
}

HomeProcess::HomeProcess() : pid_(::getpid()) {
  static const int counted = ::pthread_atfork(nullptr, nullptr, [] { detail::num_forks.fetch_add(1); });
  static_cast<void>(counted);
  num_forks_ = detail::num_forks.load(std::memory_order_relaxed);
}

void HomeProcess::raise_elsewhere(std::string_view where) const {
  raise<c10::DistBackendError>(
      {where, c10::str("process ", ::getpid(), " is a fork of process ", pid_, ", to which the group belongs"),
       "call it in the process that made the group; a child needs a group of its own"});
}

}  // namespace serried
