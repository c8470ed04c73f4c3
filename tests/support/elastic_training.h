// A small training whose ranks die where a test says, and the plain loop that it has to equal.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/support/thread_job.h"

namespace serried::testing {

/// Where a rank is when it dies.
enum class Phase {
  meeting_begins,
  meeting,    // at a collective of it
  transfer,   // at a send or recv of it
  on_change,  // in the callback
  forward,
  bucket,  // at a collective of the backward
  commit,  // at the one of commit()
  before_optimizer,
  behind_optimizer,
};
inline constexpr int kNumPhases = 9;
std::string to_string(Phase phase);

/// The first rank that comes by dies there.
struct Fault {
  int64_t step = 0;  // not before this one
  Phase phase = Phase::forward;
  int nth = 0;  // the time it comes by in that phase
  int id = -1;  // of that rank alone
};

struct TrainingOptions {
  int num_ranks = 2;
  int64_t num_steps = 6;
  int min_ranks = 1;
  bool adam = false;
  std::vector<Fault> faults = {};
  std::multiset<int64_t> joins = {};          // steps in which a rank is added
  bool joins_come_first = false;              // in the table
  std::multiset<int64_t> joins_at_loss = {};  // a rank is added when one dies, of these numbers counted from 0
};

/// Runs the training and expects that all who are left have the parameters of the plain loop, bit for bit.
class Training {
 public:
  explicit Training(TrainingOptions options);

  void run();

  int num_kills() const { return num_kills_; }
  int num_survivors() const { return int(results_.size()); }
  /// Ranks that took part in each step that counts.
  std::vector<int> members() const;

 private:
  class Points;

  void train(ThreadJob::Rank& rank);
  bool dies_here(Phase phase, int64_t step, int nth, int id);
  void join_at(int64_t step);
  void note_step(int64_t step, int world_size, const std::vector<at::Tensor>& before);
  void expect_plain_loop() const;

  const TrainingOptions options_;
  ThreadJob job_;
  mutable std::mutex mutex_;
  std::vector<Fault> faults_;
  std::multiset<int64_t> joins_;
  std::set<int> veterans_;  // living ranks that have met
  int num_kills_ = 0;
  std::map<int64_t, int> world_sizes_;
  std::vector<at::Tensor> start_;
  std::map<int, std::vector<at::Tensor>> results_;  // by id
};

}  // namespace serried::testing
