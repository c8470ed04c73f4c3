// Captured training steps beside the same steps run eagerly, taking turns; and what capture itself costs.
//
// `serried run -n <ranks> bench_graph <case> <results.json> [pytorch.jsonl]` measures one case from the start of the
// process on; the last file holds what pytorch.py has measured.
#include <c10/core/CPUAllocator.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "benchmarks/graph/trainings.h"
#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/graph/replay/guards.h"

namespace {

using namespace serried;
using namespace serried::bench;

constexpr int kWarmUp = 8;            // one eager call, two recorded ones, two more where buckets are rebuilt
constexpr double kStartBudget = 3;    // seconds
constexpr double kGuardBudget = 2;    // microseconds
constexpr double kGrowthBudget = 64;  // KiB over 10,000 replays: what the allocator's own pages may do
constexpr double kLongStepUs = 5e3;   // beyond this 10,000 steps take too long

/// Since the launcher was started; SERRIED_BENCH_START holds when, in nanoseconds since 1970.
double seconds_since_start() {
  const char* start = std::getenv("SERRIED_BENCH_START");
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return start == nullptr ? 0 : std::chrono::duration<double>(now).count() - std::atof(start) / 1e9;
}

struct RecordingCost {
  double eager, recorded, compared;
};

/// The first three calls of captures that begin anew: eager, recorded, recorded and made ready to replay.
RecordingCost recording_cost(const Training& training, const std::vector<Pass>& passes, const Group& group) {
  std::vector<double> times[3];
  for (int i = 0; i < 15; ++i) {
    auto step = capture(training.step, {.passes = passes});
    for (auto& of_call : times) {
      barrier(group);
      of_call.push_back(us_of([&] { step(training.batch.input, training.batch.target); }));
    }
  }
  return {median(times[0]), median(times[1]), median(times[2])};
}

/// What a graph with ten inputs has to look at before it runs.
double guard_us() {
  graph::CallArguments arguments;
  for (int i = 0; i < 10; ++i) arguments.tensors.push_back(at::randn({8, 16 + i}));
  const graph::CallGuards guards(arguments);
  std::vector<double> times;
  bool all_hold = true;
  for (int round = 0; round < 200; ++round) {
    times.push_back(us_of([&] {
                      for (int i = 0; i < 100; ++i) all_hold &= guards.hold(arguments);
                    }) /
                    100);
  }
  return all_hold ? lower_quartile(times) : -1;
}

/// KiB of memory that this process has in use.
double resident_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) return std::atof(line.c_str() + 6);
  }
  return 0;
}

double growth_kib(const std::function<void()>& captured) {
  for (int i = 0; i < 1000; ++i) captured();
  const double before = resident_kib();
  for (int i = 0; i < 10000; ++i) captured();
  return resident_kib() - before;
}

std::atomic<int64_t> live_bytes = 0;
std::atomic<int64_t> peak_bytes = 0;

/// As LibTorch's allocator, with a count of what lives. Stays until the process ends.
class CountingAllocator final : public c10::Allocator {
 public:
  static void install() { c10::SetCPUAllocator(new CountingAllocator, 200); }

  // Some kernels want the memory itself as the context of its deleter, so its size stands in front of it.
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &release, c10::kCPU};
    char* block = static_cast<char*>(std::aligned_alloc(kAlignment, (bytes / kAlignment + 2) * kAlignment));
    *reinterpret_cast<int64_t*>(block) = int64_t(bytes);
    live_bytes += int64_t(bytes);
    peak_bytes = std::max(peak_bytes.load(), live_bytes.load());
    return {block + kAlignment, block + kAlignment, &release, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static constexpr size_t kAlignment = 64;
  static void release(void* memory) {
    if (memory == nullptr) return;
    char* block = static_cast<char*>(memory) - kAlignment;
    live_bytes -= *reinterpret_cast<int64_t*>(block);
    std::free(block);
  }
};

/// The most that a model, its optimizer and a step in full swing hold, in KiB.
double peak_kib(const Case& one, const Group& group, bool is_captured) {
  const int64_t before = live_bytes;
  const Training training = one.make(group);
  auto step = capture(training.step, {.passes = one.passes});
  const auto call = [&] {
    is_captured ? step(training.batch.input, training.batch.target)
                : training.step(training.batch.input, training.batch.target);
  };
  for (int i = 0; i < kWarmUp; ++i) call();
  peak_bytes = live_bytes.load();
  for (int i = 0; i < 3; ++i) call();
  return double(peak_bytes - before) / 1024;
}

/// One case, measured from the start of the process on.
class Measurement {
 public:
  Measurement(const Case& one, const char* theirs) : case_(one), theirs_(theirs), group_(new_group()) {
    torch::manual_seed(one.same_batch ? 0 : group_->getRank());
  }

  std::vector<std::vector<Row>> rows() {
    const Training recorded = case_.make(group_);
    auto step = capture(recorded.step, {.passes = case_.passes});
    const auto captured = [&] { step(recorded.batch.input, recorded.batch.target); };
    while (step.replays() == 0) captured();
    const double first_replay = slowest({seconds_since_start()}, group_)[0];
    const double eager_us = add_steps(captured);
    add_recording(recorded);
    return {times_, starts(first_replay), memory(captured, eager_us < kLongStepUs)};
  }
  bool is_reporter() const { return group_->getRank() == 0; }

 private:
  double theirs(const char* what) const { return theirs_ == nullptr ? 0 : number_in_lines(theirs_, case_.name, what); }

  /// Leaves out what was not measured.
  void add(const std::string& name, double ours, double reference, const char* reference_name, double goal) {
    if (reference > 0) times_.push_back({"capture", case_.text + name, ours, reference, reference_name, goal, "us"});
  }

  double add_steps(const std::function<void()>& captured) {
    const Training training = case_.make(group_);
    const auto eager = [&] { training.step(training.batch.input, training.batch.target); };
    std::vector<Contender> both = {{"eager", eager}, {"captured", captured}};
    take_turns(both, group_, {.warm_up = kWarmUp, .rounds = 12, .block_us = 60e3});
    const double eager_us = lower_quartile(both[0].times), captured_us = lower_quartile(both[1].times);
    add("", captured_us, eager_us, "eager", case_.goal);
    add("", captured_us, theirs("compiled_us"), "PyTorch, compiled", 0);
    add(", eager", eager_us, theirs("eager_us"), "PyTorch, eager", 0);
    return eager_us;
  }

  void add_recording(const Training& training) {
    const RecordingCost cost = recording_cost(training, case_.passes, group_);
    add(", recorded", cost.recorded, cost.eager, "eager", 2.0);
    add(", recorded and made ready", cost.compared, cost.eager, "eager", 0);
    if (case_.name == "mlp3") add(": guards of ten inputs", guard_us(), kGuardBudget, "2 us budget", 1.0);
  }

  std::vector<Row> starts(double first_replay) const {
    const std::string table = "capture: start to first replay";
    std::vector<Row> rows = {{table, case_.text, first_replay, kStartBudget, "3 s budget", 1.0, "s"}};
    const double first = theirs("first_s");
    if (first > 0) rows.push_back({table, case_.text, first_replay, first, "PyTorch's first step", 0, "s"});
    return rows;
  }

  std::vector<Row> memory(const std::function<void()>& captured, bool is_short) const {
    const std::string table = "capture: memory";
    std::vector<Row> rows;
    if (is_short) {
      const std::string text = case_.text + ", 10,000 replays add";
      rows.push_back({table, text, growth_kib(captured), kGrowthBudget, "64 KiB budget", 1.0, "KiB"});
    }
    const double eager_kib = peak_kib(case_, group_, false);
    rows.push_back({table, case_.text + ", peak", peak_kib(case_, group_, true), eager_kib, "eager", 1.0, "KiB"});
    return rows;
  }

  const Case case_;
  const char* theirs_;
  const Group group_;
  std::vector<Row> times_;
};

void run(const Case& one, const char* results, const char* theirs) {
  Measurement measurement(one, theirs);
  const auto tables = measurement.rows();
  if (!measurement.is_reporter()) return;
  for (const auto& rows : tables) {
    print_table(rows);
    append_json(rows, results);
  }
}

}  // namespace

int main(int argc, char** argv) {
  CountingAllocator::install();
  at::set_num_threads(1);
  const std::string name = argc >= 3 ? argv[1] : "";
  for (const Case& one : cases()) {
    if (one.name != name) continue;
    run(one, argv[2], argc > 3 ? argv[3] : nullptr);
    return 0;
  }
  std::fprintf(stderr, "usage: bench_graph mlp20|mlp3|mlp20_tp|gpt_ddp|gpt_tp <results.json> [pytorch.jsonl]\n");
  return 2;
}
