// The links of one rank to the ranks of other hosts: waiting for what comes, and the news of a group that ends.
#pragma once

#include "serried/comm/backends/hierarchical/tags.h"
#include "serried/comm/backends/hierarchical/topology.h"
#include "serried/comm/backends/shm/phase_sync.h"
#include "serried/comm/net/wire.h"

#include <c10/util/FunctionRef.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace serried::hierarchical {

/// Any thread may call what says so.
class Links {
 public:
  Links(std::unique_ptr<net::Wire> wire, const shm::Segment& segment, shm::PhaseSync& sync, const Topology& topology,
        int rank);
  ~Links();
  Links(const Links&) = delete;
  Links& operator=(const Links&) = delete;

  net::Wire& wire() { return *wire_; }

  /// Lets messages go on and takes news in; whether anything happened. Any thread.
  bool progress();

  /// Waits until `is_done`, which may start messages. Raises where the group has failed, a peer is lost, or the time of
  /// the collective is over; `look`, between slices, may raise for reasons of its own.
  void wait(c10::function_ref<bool()> is_done, c10::function_ref<void()> look);

  /// Sleeps until something comes, at most `longest`, unless `is_done`. Any thread.
  void sleep(std::chrono::milliseconds longest, c10::function_ref<bool()> is_done);

  /// Fails the group for the loss of a rank.
  [[noreturn]] void fail_for_lost(int peer, const std::string& why);

  /// Tells the ranks of all other hosts, once, why the group is unusable. Any thread.
  void tell_abort();

  /// Tells them that this rank closes the group in order after `num_calls` collectives.
  void tell_left(uint64_t num_calls);

 private:
  struct News {
    enum class Kind : uint32_t { aborted, left };
    Kind kind;
    uint32_t by_loss;
    uint64_t num_calls;
    char text[2048];
  };
  struct Inbox {
    int peer;
    net::Transfer transfer;
    News news;
  };
  struct Letter {
    net::Transfer transfer;
    News news;
  };

  void look_for_news();
  void take(int peer, const News& news, size_t bytes);
  void say_who_left();
  void tell_all(const News& news, size_t bytes);
  void check_health(std::chrono::steady_clock::time_point begin);

  const std::unique_ptr<net::Wire> wire_;
  const shm::Segment& segment_;
  shm::PhaseSync& sync_;
  const int rank_;
  std::atomic<bool> told_abort_{false};
  std::mutex sleep_mutex_;  // one thread sleeps on the descriptor
  std::atomic<bool> sleeps_{false};
  int bell_ = -1;          // rung by threads that find what it waits for
  std::mutex news_mutex_;  // guards all below
  std::deque<Inbox> inboxes_;
  std::deque<Letter> letters_;
  std::vector<std::pair<int, uint64_t>> leaving_;  // ranks, and after how many calls
};

}  // namespace serried::hierarchical
