// Renames that fail, and processes that are killed in the middle of them: stands in for functions of the C library, so
// that one file of a program includes it.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <string>

namespace serried::testing {

struct Renames {
  std::atomic<bool> can_exchange = true;
  std::atomic<int> kill_after = 0;  // this many renames from now; 0: never
  std::string refused = {};         // paths that end with it cannot be renamed; set while nobody renames
};

inline Renames& renames() {
  static Renames all;
  return all;
}

inline int rename_by_kernel(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  const auto result = int(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  if (renames().kill_after > 0 && --renames().kill_after == 0) ::kill(::getpid(), SIGKILL);
  return result;
}

}  // namespace serried::testing

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (flags != 0 && !serried::testing::renames().can_exchange) {
    errno = EINVAL;
    return -1;
  }
  return serried::testing::rename_by_kernel(from_folder, from, to_folder, to, flags);
}

extern "C" int rename(const char* from, const char* to) noexcept {
  const std::string& refused = serried::testing::renames().refused;
  if (!refused.empty() && std::string(from).ends_with(refused)) {
    errno = EBUSY;
    return -1;
  }
  return serried::testing::rename_by_kernel(AT_FDCWD, from, AT_FDCWD, to, 0);
}
