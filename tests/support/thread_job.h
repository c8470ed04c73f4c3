// A job whose ranks are threads that die and come, with tables of ranks from memory: what a launcher that keeps others
// alive does, without processes.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "serried/comm/groups/ranks_store.h"
#include "serried/elastic/generations.h"

namespace serried::testing {

/// Thrown by a rank that is to die: it takes its groups along, and the others are told.
struct Killed : std::exception {};

class ThreadJob {
 public:
  class Rank;

  /// What each rank runs. Any exception but Killed is a failure of the test, and a death for the others.
  explicit ThreadJob(std::function<void(Rank&)> body) : body_(std::move(body)) {}
  ~ThreadJob();

  /// The ranks of generation 0.
  void start(int num_ranks);
  /// One more rank, in a new generation; the last of its table, or the first.
  void add(bool as_first = false);
  /// Until all have ended.
  void wait();

  int num_living() const;
  /// What ranks have ended with, other than well or killed.
  std::vector<std::string> failures() const;

 private:
  class Tables;

  void run(const std::shared_ptr<Rank>& rank);
  void leave(const std::shared_ptr<Rank>& rank, bool is_loss);
  void tell_tables();
  void spawn(const std::shared_ptr<Rank>& rank);

  const std::function<void(Rank&)> body_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Rank>> members_;
  std::vector<std::thread> threads_;
  std::vector<std::string> failures_;
  int64_t generation_ = -1;
  int next_id_ = 0;
  c10::intrusive_ptr<detail::RanksStore> store_;  // of the newest generation
};

class ThreadJob::Rank {
 public:
  Rank(int id, std::shared_ptr<Tables> tables) : id_(id), tables_(std::move(tables)) {}

  /// By order of birth; not its place in a table.
  int id() const { return id_; }
  std::shared_ptr<detail::Generations> generations() const;
  /// Called where a meeting begins, on this rank.
  void before_meeting(std::function<void()> callback);

 private:
  friend class ThreadJob;
  const int id_;
  const std::shared_ptr<Tables> tables_;
};

}  // namespace serried::testing
