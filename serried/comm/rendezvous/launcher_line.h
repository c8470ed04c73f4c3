// The rank's end of the socket to its launcher: questions to the store that the launcher keeps, and tables of ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "serried/base/channel/message.h"
#include "serried/base/fork.h"

namespace serried::detail {

/// This process's place among the ranks of a generation.
struct RankTable {
  int generation = 0;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int local_world_size = 1;
  int node_rank = 0;
  int num_nodes = 1;
};

/// The ranks of a generation and those before are no longer all there.
struct Over {
  int generation = 0;
  std::string why;
};

/// One per process; any thread may ask. A thread of its own listens.
class LauncherLine {
 public:
  using Clock = std::chrono::steady_clock;
  using Message = channel::Message;

  /// The line of this process; null where no launcher opened one. ValueError if SERRIED_LAUNCHER_FD is no socket.
  /// Taken at the first call: the variable is gone then, and no program that this one starts inherits the socket.
  static std::shared_ptr<LauncherLine> of_process();

  /// Takes over a socket; not for programs.
  explicit LauncherLine(int fd);
  ~LauncherLine();
  LauncherLine(const LauncherLine&) = delete;
  LauncherLine& operator=(const LauncherLine&) = delete;

  /// No callback is called from now on. In a forked child nothing: it has none of the threads.
  void silence();

  /// What the launcher answers to `question` (see launch/keys.h, without the space); nothing at `deadline`, and then it
  /// is forgotten. DistNetworkError if the launcher is gone.
  /// {"over"} if `ended` is so, or becomes so and is told.
  std::optional<Message> ask(const Message& question, Clock::time_point deadline,
                             const std::atomic<bool>* ended = nullptr);
  /// `ended` has become so.
  void tell_ended(const std::atomic<bool>& ended);

  /// Asks the launcher to keep this rank when others are lost; once. Tables come only to ranks that have said so.
  void say_elastic();

  /// The table that the launcher told last; nothing while that of the environment holds.
  std::optional<RankTable> newest_table() const;
  /// The first table that comes, or has come, of a generation above `newer_than`; nothing at `deadline`.
  /// DistNetworkError if the launcher is gone.
  std::optional<RankTable> wait_for_table(int newer_than, Clock::time_point deadline);

  /// As on_over, with each table that comes, or has come last.
  void on_table(std::function<void(const RankTable&)> callback);

  /// The address of the leader that the launcher has lost and waits for, which keeps the store; "" while it is there.
  std::string leader_away() const;

  /// The last generation that is over; nothing while none is.
  std::optional<Over> newest_over() const;
  /// Called by the listening thread with each generation that is over, at once with one that is already. Takes the
  /// place of the callback before; with none it returns when no call is under way. Must not be called by a callback.
  void on_over(std::function<void(const Over&)> callback);

 private:
  struct Question {
    const std::atomic<bool>* ended;
    std::optional<Message> answer;
    std::condition_variable answered;
  };

  class Entry;

  void listen();
  void take(const Message& message);
  void take_answer(const Message& message);
  void take_table(const Message& message);
  void take_over(const Message& message);
  void send(const Message& message, Clock::time_point deadline);
  [[noreturn]] void raise_gone() const;

  const int fd_;
  const int stop_;  // an eventfd: the listening thread is to end
  const HomeProcess home_;
  std::mutex sending_;
  std::mutex calling_;
  std::function<void(const Over&)> callback_;
  std::function<void(const RankTable&)> table_callback_;
  mutable std::mutex mutex_;  // of what follows
  std::optional<RankTable> table_;
  std::optional<Over> over_;
  std::string leader_away_;
  std::condition_variable table_came_;
  std::map<std::string, Question*> open_;
  uint64_t next_ = 0;
  bool closed_ = false;
  std::thread listener_;
};

}  // namespace serried::detail
