// What a process asks of a disk: tests see it, refuse it, and kill the process in the middle of it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace serried::testing {

/// Of calls of fsync, ftruncate, mkdir, pwrite, rename, renameat2, rmdir and unlink, in programs with a file that
/// includes stand_in_disk.h. Texts are changed only while nobody calls.
struct DiskCalls {
  std::atomic<bool> can_exchange = true;     // two folders
  std::string cannot_rename = {};            // paths that end with it
  std::string is_full_for = {};              // files whose paths have it in them
  std::string cannot_sync = {};              // paths that end with it
  std::atomic<int64_t> most_of_a_write = 0;  // so many bytes of each are written; 0: all
  std::atomic<int> kill_after = 0;           // so many calls from now; 0: never
  std::atomic<int> kill_after_renames = 0;   // the same, of renames
  std::atomic<int> num_calls = 0;
  std::atomic<bool> records = false;

  /// "fsync PATH", "rename FROM TO": in the order in which they were done.
  std::vector<std::string> taken() {
    const std::lock_guard<std::mutex> lock(mutex);
    return std::move(recorded);
  }

  std::mutex mutex = {};
  std::vector<std::string> recorded = {};
};

inline DiskCalls& disk_calls() {
  static DiskCalls all;
  return all;
}

}  // namespace serried::testing
