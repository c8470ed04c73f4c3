// What is under way in a gloo group: collectives that have not come to an end, and who waits for a send or receive.
#pragma once

#include "serried/comm/agree/group_status.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <map>

namespace serried::gloo {

/// What a backend shares with its Works, which may outlive it.
class OpenCalls {
 public:
  explicit OpenCalls(std::unique_ptr<detail::GroupStatus> status) : status_(std::move(status)) {}

  detail::GroupStatus& status() { return *status_; }

  void start();
  void land();

  /// Whether all collectives have come to an end within `timeout`; gives up early if the group fails.
  bool drain(std::chrono::milliseconds timeout);

  /// A thread is about to wait in `work`, a send or receive. Only `abort` wakes it, so while it waits one thread of
  /// this process looks every 50 ms whether the group has failed, or whether all who could send are gone.
  static void add_wait(const std::shared_ptr<OpenCalls>& calls, c10d::Work* work, const watch::Record& record);
  void remove_wait(c10d::Work* work);

  /// Wakes all who wait in a send or receive.
  void abort_waits();

  /// Fails the group if a rank waits for a message from anybody and nobody is left.
  void find_lonely_waits();

  /// The group is dropped: wakes all who wait, now and later.
  void close();
  bool closed();

 private:
  const std::unique_ptr<detail::GroupStatus> status_;
  std::mutex mutex_;  // guards all below
  std::condition_variable landed_;
  int num_open_ = 0;
  std::map<c10d::Work*, watch::Record> waits_;
  bool closed_ = false;
  bool guarded_ = false;  // the guard thread knows of this group
};

}  // namespace serried::gloo
