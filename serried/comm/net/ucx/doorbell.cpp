// An eventfd and an epoll set.
#include "serried/comm/net/ucx/doorbell.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>

#include "serried/base/error.h"

namespace serried::net {
namespace {

[[noreturn]] void raise_no_descriptor() {
  raise<c10::DistBackendError>({"new_group", c10::str("no descriptor to wait on: ", std::strerror(errno)),
                                "raise the limit on open files: ulimit -n"});
}

}  // namespace

Doorbell::Doorbell() : both_(::epoll_create1(EPOLL_CLOEXEC)), bell_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (both_ < 0 || bell_ < 0) raise_no_descriptor();
  add(bell_);
}

Doorbell::~Doorbell() {
  ::close(bell_);
  ::close(both_);
}

void Doorbell::add(int descriptor) {
  epoll_event event{};
  event.events = EPOLLIN;
  if (::epoll_ctl(both_, EPOLL_CTL_ADD, descriptor, &event) != 0) raise_no_descriptor();
}

void Doorbell::ring() {
  is_rung_ = true;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t size = ::write(bell_, &one, sizeof one);
}

bool Doorbell::answer() {
  if (!std::exchange(is_rung_, false)) return false;
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t size = ::read(bell_, &count, sizeof count);
  return true;
}

}  // namespace serried::net
