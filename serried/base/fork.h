// Forks: what a process shares with others is the business of the process that made it, not of its children.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

namespace serried {

namespace detail {
extern std::atomic<uint32_t> num_forks;  // between the first process and this one
}

/// The process that made it. A forked child gets copies of all objects, but none of the threads, and shares memory,
/// sockets and stores with its parent: it may neither use them nor say goodbye on them.
class HomeProcess {
 public:
  HomeProcess();

  /// Whether this is that process; costs one load.
  bool is_here() const noexcept { return num_forks_ == detail::num_forks.load(std::memory_order_relaxed); }

  /// DistBackendError that names both processes where it is not.
  void require(std::string_view where) const {
    if (!is_here()) raise_elsewhere(where);
  }

 private:
  [[noreturn]] void raise_elsewhere(std::string_view where) const;

  uint32_t num_forks_;
  int pid_;
};

/// As std::make_shared, for what has threads, or speaks to other processes when it ends: a forked child, which can do
/// neither, forgets it without destroying it.
template <class T, class... Args>
std::shared_ptr<T> make_shared_at_home(Args&&... args) {
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), [home = HomeProcess()](T* made) {
    if (home.is_here()) delete made;
  });
}

}  // namespace serried
