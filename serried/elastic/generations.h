// What a rank knows of the tables of ranks that follow each other: the newest one, and which are over.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "serried/comm/groups/group.h"

namespace serried::detail {

/// Who takes part in a generation, as one of its ranks sees it. Generations are numbered upwards, and no number is used
/// twice.
struct GenerationTable {
  int64_t generation = 0;
  int rank = -1;
  int world_size = -1;  // -1: known when the ranks have met
};

/// Where tables come from decides the class; whoever learns of them calls tell_table() and tell_over(), on any thread.
class Generations {
 public:
  Generations() = default;
  virtual ~Generations() = default;
  Generations(const Generations&) = delete;

  /// False where there is one table for ever, so that nothing is waited for.
  virtual bool can_change() const = 0;
  /// Writes into `options` where the ranks of `table` meet.
  virtual void place(const GenerationTable& table, GroupOptions& options) = 0;
  /// Waits in the store of `generation`, those that come later included, end with an error.
  virtual void end_waits(int64_t /*generation*/) {}

  /// A table newer than all before; an older one is not taken.
  void tell_table(const GenerationTable& table);
  /// A rank of `generation` was lost: it and all before it are over.
  void tell_over(int64_t generation);

  std::optional<GenerationTable> newest() const;
  bool is_over(int64_t generation) const;
  /// Over, or followed by another one.
  bool has_ended(int64_t generation) const;

  /// Whether `holds` holds before `deadline`; it is asked at each news.
  bool wait(const std::function<bool()>& holds, std::chrono::steady_clock::time_point deadline) const;

  /// `news` is called after each news, on the thread that told. Null: nobody is, from the return of this call on.
  void listen(std::function<void()> news);

 private:
  void tell_listener();

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::optional<GenerationTable> newest_;
  int64_t over_ = -1;  // this one, and all before it
  std::mutex listener_mutex_;
  std::function<void()> listener_;
};

/// One table: the ranks that new_group() meets.
std::shared_ptr<Generations> fixed_generation();

}  // namespace serried::detail
