// SERRIED_TRACE: a file per rank that grows while the program runs, because a rank may be killed at any time.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <thread>

#include <c10/util/StringUtil.h>
#include <c10/util/thread_name.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/fork.h"
#include "serried/base/log.h"
#include "serried/base/trace_file.h"

namespace serried::trace {
namespace {

constexpr std::chrono::milliseconds kPause{500};

// A job that is traced by mistake must not fill the disk: some 1 GB a rank.
constexpr size_t kMaxWritten = 1U << 22;

class FolderTrace {
 public:
  explicit FolderTrace(const std::filesystem::path& folder)
      : folder_(std::filesystem::absolute(folder)), thread_([this] { write_now_and_then(); }) {}

  void finish() {
    if (!home_.is_here()) return;  // the file is the parent's
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
    write(/*is_last=*/true);
  }

 private:
  void write_now_and_then() {
    c10::setThreadName("serried trace");
    std::unique_lock<std::mutex> lock(mutex_);
    while (!changed_.wait_for(lock, kPause, [this] { return ends_; })) {
      // Without a rank the file has no name yet.
      if (rank_label().rank >= 0) write(/*is_last=*/false);
    }
  }

  // Only ever on one thread: that of this object, or after its end the one that ends the program.
  void write(bool is_last) {
    if (gave_up_) return;
    try {
      const std::vector<TakenSlices> taken = take_slices();
      if (taken.empty() && !file_) return;  // a program that is none of a job must not touch the files of one
      if (!file_) {
        std::filesystem::create_directories(folder_);
        file_ = std::make_unique<TraceFile>(folder_ / c10::str("rank_", rank_or_zero(), ".json"));
      }
      append(taken);
      if (is_last && !gave_up_) file_->finish();
    } catch (const std::exception& error) {
      give_up(c10::str("the trace was not written: ", error.what(),
                       "\n  fix: name a folder that you may write to in SERRIED_TRACE"));
    }
  }

  void append(const std::vector<TakenSlices>& taken) {
    for (const TakenSlices& each : taken) num_written_ += each.slices.size();
    file_->append(taken);
    if (num_written_ < kMaxWritten) return;
    file_->finish();
    give_up("the trace is full; later spans are left out");
  }

  void give_up(const std::string& why) {
    gave_up_ = true;
    stop();
    log::warn_once(why);
  }

  const HomeProcess home_;
  const std::filesystem::path folder_;  // absolute: the program may change its own
  std::mutex mutex_;                    // guards ends_
  std::condition_variable changed_;
  bool ends_ = false;
  bool gave_up_ = false;
  size_t num_written_ = 0;
  std::unique_ptr<TraceFile> file_;
  std::thread thread_;
};

FolderTrace* folder_trace = nullptr;  // never destroyed: its thread may outlive everything but the process

[[maybe_unused]] const bool started_by_environment = [] {
  const auto folder = env::maybe_text("SERRIED_TRACE");
  if (!folder) return false;
  start();
  folder_trace = new FolderTrace(*folder);
  std::atexit([] { folder_trace->finish(); });
  return true;
}();

}  // namespace
}  // namespace serried::trace
