// Runs all chosen cases on rank threads.
#include "tests/conformance/scorer.h"

#include <signal.h>
#include <unistd.h>

#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "serried/comm/groups/ranks.h"

namespace serried::testing {
namespace {

constexpr std::chrono::seconds kTimeout{10};  // of a collective: above it some rank took another way

// What each rank thread is doing, for the last words of a crash.
thread_local char current_trial[512] = "nothing";

void say_last_words(int signal) {
  const char* parts[] = {"\ncrash in ", current_trial, "\n"};
  for (const char* part : parts) {
    [[maybe_unused]] const ssize_t count = ::write(STDERR_FILENO, part, std::strlen(part));
  }
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

void name_crashes() {
  for (int signal : {SIGSEGV, SIGABRT, SIGFPE, SIGBUS, SIGILL}) ::signal(signal, say_last_words);
}

// Thrown to end a run of ranks; the outcome is already noted.
struct TrialFailed : std::exception {
  const char* what() const noexcept override { return "a trial failed"; }
};

// The trials from one on until the first that fails on any rank.
class Run {
 public:
  Run(Score& score, const ScoreOptions& options, size_t begin)
      : score_(score), options_(options), begin_(begin), failed_(score.trials.size()) {}

  /// The trial to go on with.
  size_t run() {
    int64_t world_size = 1;
    for (int64_t size : options_.mesh_shape) world_size *= size;
    const auto rank = [&](const Group& group) { run_rank(group); };
    try {
      run_ranks(int(world_size), rank, {.timeout = kTimeout});
    } catch (const std::exception& error) {
      if (failed_ == score_.trials.size()) note(begin_, {Status::raises, false, error.what()});
    }
    if (failed_ == score_.trials.size()) return failed_;
    score_.trials[failed_].outcome = failure_;
    return failed_ + 1;
  }

 private:
  void run_rank(const Group& group) {
    std::vector<std::string> names;
    for (size_t axis = 0; axis < options_.mesh_shape.size(); ++axis) names.push_back(std::string(1, char('x' + axis)));
    std::optional<DeviceMesh> mesh;
    if (!options_.plain) mesh = init_device_mesh("cpu", options_.mesh_shape, names, {.group = group});
    const RankSetting setting{mesh ? &*mesh : nullptr};
    for (size_t i = begin_; i < score_.trials.size(); ++i) run_trial(i, setting, group->getRank());
  }

  void run_trial(size_t i, const RankSetting& setting, int rank) {
    Trial& trial = score_.trials[i];
    const VectorFile& file = score_.files[trial.file];
    std::strncpy(current_trial, describe(score_, trial).c_str(), sizeof current_trial - 1);
    const Outcome outcome = run_case(file.op, file.cases[trial.index], trial.combination, setting);
    if (rank == 0) trial.outcome = outcome;
    if (outcome.status == Status::right) return;
    note(i, {outcome.status, outcome.took_default, c10::str("rank ", rank, ": ", outcome.text)});
    throw TrialFailed();
  }

  // Ranks may be several trials apart: the earliest trial that failed counts, and of it the first rank that did.
  void note(size_t trial, const Outcome& outcome) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (trial >= failed_) return;
    failed_ = trial;
    failure_ = outcome;
  }

  Score& score_;
  const ScoreOptions& options_;
  const size_t begin_;
  std::mutex mutex_;
  size_t failed_;
  Outcome failure_;
};

// `count` of the cases, evenly spread: neighbours are alike.
std::vector<size_t> spread(size_t size, size_t count) {
  std::vector<size_t> chosen;
  const size_t taken = std::min(size, count);
  for (size_t i = 0; i < taken; ++i) chosen.push_back(i * size / taken);
  return chosen;
}

void add_trials(Score& score, size_t file, const ScoreOptions& options) {
  std::vector<VectorCase>& cases = score.files[file].cases;
  for (size_t index : spread(cases.size(), options.max_cases)) {
    if (expect_plain_result(score.files[file].op, cases[index])) {
      score.local.push_back(score.files[file].name + " " + cases[index].id);
    }
    for (Combination& combination : combinations(cases[index], int64_t(options.mesh_shape.size()))) {
      score.trials.push_back({file, index, std::move(combination), {}});
    }
  }
}

}  // namespace

Score score(const std::vector<std::string>& names, const std::string& folder, const ScoreOptions& options) {
  Score score;
  for (const std::string& name : names) {
    score.files.push_back(load_vectors(name, folder));
    add_trials(score, score.files.size() - 1, options);
  }
  name_crashes();
  for (size_t next = 0; next < score.trials.size();) next = Run(score, options, next).run();
  return score;
}

std::string describe(const Score& score, const Trial& trial) {
  const VectorFile& file = score.files[trial.file];
  return c10::str(file.name, " ", file.cases[trial.index].id, " ", to_string(trial.combination));
}

}  // namespace serried::testing
