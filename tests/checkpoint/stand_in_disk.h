// Stands in for functions of the C library that reach a disk, so that one file of a program includes it.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <string>

#include "tests/checkpoint/disk_calls.h"

namespace serried::testing {

inline std::string path_of_file(int file) {
  char path[PATH_MAX];
  const ssize_t size = ::readlink(("/proc/self/fd/" + std::to_string(file)).c_str(), path, sizeof path);
  return std::string(path, size_t(std::max<ssize_t>(size, 0)));
}

/// The moment behind a call, for whoever counts, records and kills. `text` gives what is recorded.
template <class Text>
void after_disk_call(const Text& text) {
  DiskCalls& calls = disk_calls();
  const int error = errno;
  ++calls.num_calls;
  if (calls.records) {
    const std::lock_guard<std::mutex> lock(calls.mutex);
    calls.recorded.push_back(text());
  }
  if (calls.kill_after > 0 && --calls.kill_after == 0) ::kill(::getpid(), SIGKILL);
  errno = error;
}

inline int rename_by_kernel(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) {
  const auto result = int(::syscall(SYS_renameat2, from_folder, from, to_folder, to, flags));
  DiskCalls& calls = disk_calls();
  if (calls.kill_after_renames > 0 && --calls.kill_after_renames == 0) ::kill(::getpid(), SIGKILL);
  after_disk_call([&] { return std::string("rename ") + from + " " + to; });
  return result;
}

}  // namespace serried::testing

extern "C" int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  if (flags != 0 && !serried::testing::disk_calls().can_exchange) {
    errno = EINVAL;
    return -1;
  }
  return serried::testing::rename_by_kernel(from_folder, from, to_folder, to, flags);
}

extern "C" int rename(const char* from, const char* to) noexcept {
  const std::string& refused = serried::testing::disk_calls().cannot_rename;
  if (!refused.empty() && std::string(from).ends_with(refused)) {
    errno = EBUSY;
    return -1;
  }
  return serried::testing::rename_by_kernel(AT_FDCWD, from, AT_FDCWD, to, 0);
}

extern "C" int unlink(const char* path) noexcept {
  const auto result = int(::syscall(SYS_unlink, path));
  serried::testing::after_disk_call([&] { return std::string("unlink ") + path; });
  return result;
}

extern "C" int mkdir(const char* path, mode_t mode) noexcept {
  const auto result = int(::syscall(SYS_mkdir, path, mode));
  serried::testing::after_disk_call([&] { return std::string("mkdir ") + path; });
  return result;
}

extern "C" int ftruncate(int file, off_t size) noexcept {
  const auto result = int(::syscall(SYS_ftruncate, file, size));
  serried::testing::after_disk_call([&] { return "ftruncate " + serried::testing::path_of_file(file); });
  return result;
}

extern "C" int rmdir(const char* path) noexcept {
  const auto result = int(::syscall(SYS_rmdir, path));
  serried::testing::after_disk_call([&] { return std::string("rmdir ") + path; });
  return result;
}

extern "C" int fsync(int file) {
  const std::string& refused = serried::testing::disk_calls().cannot_sync;
  if (!refused.empty() && serried::testing::path_of_file(file).ends_with(refused)) {
    errno = EIO;
    return -1;
  }
  const auto result = int(::syscall(SYS_fsync, file));
  serried::testing::after_disk_call([&] { return "fsync " + serried::testing::path_of_file(file); });
  return result;
}

extern "C" ssize_t pwrite(int file, const void* data, size_t size, off_t offset) {
  serried::testing::DiskCalls& calls = serried::testing::disk_calls();
  if (!calls.is_full_for.empty() && serried::testing::path_of_file(file).find(calls.is_full_for) != std::string::npos) {
    errno = ENOSPC;
    return -1;
  }
  const size_t most = calls.most_of_a_write > 0 ? size_t(calls.most_of_a_write) : size;
  const ssize_t result = ::syscall(SYS_pwrite64, file, data, std::min(size, most), offset);
  serried::testing::after_disk_call([&] { return "pwrite " + serried::testing::path_of_file(file); });
  return result;
}
