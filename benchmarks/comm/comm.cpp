// Collectives of the shm backend beside Open MPI's and Gloo's, in the same processes, taking turns.
//
// Run by mpirun: `mpirun -n 2 bench_comm [results.json]`. Each contender's buffer is rewritten before each call, as a
// training step would; a round gives every contender one call; times are the slowest rank's; medians over rounds.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/support/results.h"
#include "serried/comm/collectives/black_box.h"
#include "serried/comm/collectives/profiled.h"
#include "serried/serried.h"

namespace {

using serried::Group;
using serried::bench::Row;
using Clock = std::chrono::steady_clock;

constexpr long kLargest = 64l << 20;

class NeutralBarrier;

struct Bench {
  int rank = 0;
  int size = 1;
  Group shm;
  Group gloo;
  at::Tensor input = at::empty({kLargest / 4}, at::kFloat);
  at::Tensor output = at::empty({kLargest / 4}, at::kFloat);
  at::Tensor heap;  // in the symmetric heap
  std::shared_ptr<NeutralBarrier> barrier;
  std::vector<Row> rows;
};

/// A barrier that belongs to none of the contenders.
class NeutralBarrier {
 public:
  explicit NeutralBarrier(int size) : size_(size) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Win_allocate_shared(rank_ == 0 ? sizeof(std::atomic<int64_t>) : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &count_,
                            &window_);
    MPI_Aint bytes = 0;
    int unit = 0;
    MPI_Win_shared_query(window_, 0, &bytes, &unit, &count_);
    if (rank_ == 0) count_->store(0);
    MPI_Barrier(MPI_COMM_WORLD);
  }
  ~NeutralBarrier() { MPI_Win_free(&window_); }

  void wait() {
    const int64_t all = ++round_ * size_;
    count_->fetch_add(1);
    while (count_->load() < all) {
      if (size_ > 2) sched_yield();
    }
  }

 private:
  const int size_;
  int rank_ = 0;
  MPI_Win window_ = MPI_WIN_NULL;
  std::atomic<int64_t>* count_ = nullptr;
  int64_t round_ = 0;
};

struct Contender {
  const char* name;
  at::Tensor* buffer;
  std::function<void()> call;
};

/// Options of c10d's calls that say: the caller waits at once.
template <class Options>
Options blocking() {
  Options options;
  options.asyncOp = false;
  return options;
}

int rounds_for(long bytes) {
  if (bytes <= 64 << 10) return 400;
  if (bytes <= 1 << 20) return 120;
  return bytes <= 16 << 20 ? 24 : 9;
}

/// Median time of each contender, in microseconds, on rank 0.
std::vector<double> take_turns(const Bench& bench, long bytes, const std::vector<Contender>& contenders) {
  const int rounds = rounds_for(bytes);
  const int warm_up = 3;
  std::vector<std::vector<double>> times(contenders.size(), std::vector<double>(rounds));
  std::vector<size_t> order(contenders.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::mt19937 dice(1);
  for (int round = -warm_up; round < rounds; ++round) {
    // The order changes, alike on all ranks: a contender whose threads are still winding down slows the next.
    std::shuffle(order.begin(), order.end(), dice);
    for (const size_t i : order) {
      contenders[i].buffer->narrow(0, 0, bytes / 4).fill_(1);
      // Small calls are timed warm: else the one whose code the barrier shares would win.
      if (bytes <= 64 << 10) contenders[i].call();
      bench.barrier->wait();
      const auto begin = Clock::now();
      contenders[i].call();
      const double time = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
      if (round >= 0) times[i][round] = time;
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& mine : times) {
    std::vector<double> slowest(rounds);
    MPI_Reduce(mine.data(), slowest.data(), rounds, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    medians.push_back(bench.rank == 0 ? serried::bench::median(slowest) : 0);
  }
  return medians;
}

/// `contenders` end with Open MPI and Gloo; those before are ours, each with its own goal against Open MPI.
void compare(Bench& bench, const std::string& op, long bytes, const std::vector<Contender>& contenders,
             const std::vector<double>& goals) {
  const std::vector<double> times = take_turns(bench, bytes, contenders);
  if (bench.rank != 0) return;
  const double mpi = times[times.size() - 2];
  const double gloo = times[times.size() - 1];
  const std::string where = op + ", " + std::to_string(bench.size) + " ranks, " + serried::bench::size_text(bytes);
  for (size_t i = 0; i + 2 < contenders.size(); ++i) {
    const std::string name = where + (contenders[i].name[0] == '\0' ? "" : std::string(", ") + contenders[i].name);
    bench.rows.push_back({"comm", name, times[i], mpi, "Open MPI", goals[i]});
  }
  const double gloo_goal = bench.size == 2 && bytes < 1 << 20 ? 0.25 : 0;
  bench.rows.push_back({"comm", where, times[0], gloo, "Gloo", gloo_goal});
}

void all_reduce(Bench& bench, long bytes) {
  const int count = int(bytes / 4);
  const at::Tensor x = bench.input.narrow(0, 0, count);
  const at::Tensor in_heap = bench.heap.narrow(0, 0, count);
  std::vector<at::Tensor> list{x};
  const double heap_goal = bench.size == 2 && bytes >= 64 << 10 ? 0.5 : 0;
  compare(bench, "all_reduce", bytes,
          {{"", &bench.input, [&] { serried::all_reduce_(x, bench.shm); }},
           {"heap", &bench.heap, [&] { serried::all_reduce_(in_heap, bench.shm); }},
           {"mpi", &bench.input,
            [&] { MPI_Allreduce(MPI_IN_PLACE, x.mutable_data_ptr(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }},
           {"gloo", &bench.input, [&] { bench.gloo->allreduce(list, blocking<c10d::AllreduceOptions>())->wait(); }}},
          {1.0, heap_goal});
}

void all_gather(Bench& bench, long bytes) {
  const int part = int(bytes / 4 / bench.size);
  at::Tensor in = bench.input.narrow(0, 0, part);
  at::Tensor out = bench.output.narrow(0, 0, part * bench.size);
  compare(bench, "all_gather", bytes,
          {{"", &bench.input, [&] { serried::all_gather_into(out, in, bench.shm); }},
           {"mpi", &bench.input,
            [&] { MPI_Allgather(in.data_ptr(), part, MPI_FLOAT, out.data_ptr(), part, MPI_FLOAT, MPI_COMM_WORLD); }},
           {"gloo", &bench.input,
            [&] { bench.gloo->all_gather_single(out, in, blocking<c10d::AllgatherOptions>())->wait(); }}},
          {1.0});
}

void reduce_scatter(Bench& bench, long bytes) {
  const int part = int(bytes / 4 / bench.size);
  at::Tensor in = bench.input.narrow(0, 0, part * bench.size);
  at::Tensor out = bench.output.narrow(0, 0, part);
  compare(bench, "reduce_scatter", bytes,
          {{"", &bench.input, [&] { serried::reduce_scatter_into(out, in, bench.shm); }},
           {"mpi", &bench.input,
            [&] { MPI_Reduce_scatter_block(in.data_ptr(), out.data_ptr(), part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); }},
           {"gloo", &bench.input,
            [&] { bench.gloo->reduce_scatter_single(out, in, blocking<c10d::ReduceScatterOptions>())->wait(); }}},
          {1.0});
}

void broadcast(Bench& bench, long bytes) {
  const int count = int(bytes / 4);
  const at::Tensor x = bench.input.narrow(0, 0, count);
  std::vector<at::Tensor> list{x};
  compare(bench, "broadcast", bytes,
          {{"", &bench.input, [&] { serried::broadcast_(x, bench.shm); }},
           {"mpi", &bench.input, [&] { MPI_Bcast(x.data_ptr(), count, MPI_FLOAT, 0, MPI_COMM_WORLD); }},
           {"gloo", &bench.input, [&] { bench.gloo->broadcast(list, blocking<c10d::BroadcastOptions>())->wait(); }}},
          {1.0});
}

void all_to_all(Bench& bench, long bytes) {
  const int part = int(bytes / 4 / bench.size);
  at::Tensor in = bench.input.narrow(0, 0, part * bench.size);
  at::Tensor out = bench.output.narrow(0, 0, part * bench.size);
  std::vector<int64_t> equal;
  compare(bench, "all_to_all", bytes,
          {{"", &bench.input, [&] { serried::all_to_all_into(out, in, bench.shm); }},
           {"mpi", &bench.input,
            [&] { MPI_Alltoall(in.data_ptr(), part, MPI_FLOAT, out.data_ptr(), part, MPI_FLOAT, MPI_COMM_WORLD); }},
           {"gloo", &bench.input,
            [&] { bench.gloo->all_to_all_single(out, in, equal, equal, blocking<c10d::AllToAllOptions>())->wait(); }}},
          {1.0});
}

/// What the watch costs: the same all_reduce with the NaN check, and the record of a call on its own.
void watch_cost(Bench& bench) {
  const at::Tensor x = bench.input.narrow(0, 0, 256);
  std::vector<double> plain;
  std::vector<double> checked;
  for (int round = 0; round < 400; ++round) {
    for (const bool check : {false, true}) {
      serried::watch::set_nan_check(bench.shm, check ? serried::watch::NanCheck::raise : serried::watch::NanCheck::off);
      x.fill_(1);
      bench.barrier->wait();
      const auto begin = Clock::now();
      serried::all_reduce_(x, bench.shm);
      (check ? checked : plain).push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    }
  }
  serried::watch::set_nan_check(bench.shm, serried::watch::NanCheck::off);
  constexpr int kCalls = 100000;
  uint64_t sum = 0;
  const auto begin = Clock::now();
  for (int i = 0; i < kCalls; ++i) {
    sum += serried::watch::fingerprint(serried::watch::make_record(serried::watch::Kind::all_reduce, x, -1));
  }
  const double record = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / kCalls;
  if (bench.rank != 0 || sum == 0) return;
  const double without = serried::bench::median(plain);
  bench.rows.push_back({"comm", "watch: record and fingerprint of a call", record, without, "1 KiB call", 0.1});
  bench.rows.push_back({"comm", "NaN check on, all_reduce 1 KiB", serried::bench::median(checked), without, "off", 0});
}

/// What events for PyTorch's profiler cost: the question whether one runs, on its own, and the same all_reduce while
/// one does.
void profiler_cost(Bench& bench) {
  const at::Tensor x = bench.input.narrow(0, 0, 256);
  std::vector<double> plain;
  std::vector<double> profiled;
  for (int round = 0; round < 400; ++round) {
    for (const bool profile : {false, true}) {
      at::CallbackHandle handle = 0;
      if (profile) {
        const auto note = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> { return nullptr; };
        handle = at::addThreadLocalCallback(at::RecordFunctionCallback(note).needsInputs(true));
      }
      x.fill_(1);
      bench.barrier->wait();
      const auto begin = Clock::now();
      serried::all_reduce_(x, bench.shm);
      (profile ? profiled : plain).push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
      if (profile) at::removeCallback(handle);
    }
  }
  constexpr int kCalls = 1000000;
  int num_profiled = 0;
  const auto begin = Clock::now();
  for (int i = 0; i < kCalls; ++i) num_profiled += int(serried::detail::is_profiled());
  const double question = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / kCalls;
  if (bench.rank != 0 || num_profiled != 0) return;
  const double without = serried::bench::median(plain);
  bench.rows.push_back({"comm", "profiler off: the question whether one runs", question, without, "1 KiB call", 0.02});
  bench.rows.push_back({"comm", "profiler on, all_reduce 1 KiB", serried::bench::median(profiled), without, "off", 0});
}

/// What the black box costs: the same all_reduce of 64 elements with it and without, in turn, and the entry of a call
/// on its own.
void black_box_cost(Bench& bench) {
  const at::Tensor x = bench.input.narrow(0, 0, 64);
  std::vector<double> with;
  std::vector<double> without;
  constexpr int kBatch = 100;
  for (int round = 0; round < 400; ++round) {
    for (const bool records : {false, true}) {
      serried::black_box::set_enabled(records);
      x.fill_(1);
      bench.barrier->wait();
      const auto begin = Clock::now();
      for (int i = 0; i < kBatch; ++i) serried::all_reduce_(x, bench.shm, c10d::ReduceOp::MAX);
      const double took = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / kBatch;
      (records ? with : without).push_back(took);
    }
  }
  serried::black_box::set_enabled(true);
  constexpr int kCalls = 1000000;
  const serried::watch::Record record = serried::watch::make_record(serried::watch::Kind::all_reduce, x);
  serried::black_box::GroupLog log;
  log.open("benchmark", 0, 1);
  const auto begin = Clock::now();
  for (uint64_t i = 1; i <= kCalls; ++i) {
    const serried::black_box::CallLog call = log.issue(record);
    call.begin(i, /*at_once=*/true);
    call.end(/*failed=*/false);
  }
  const double entry = std::chrono::duration<double, std::micro>(Clock::now() - begin).count() / kCalls;
  log.close();
  if (bench.rank != 0) return;
  const double plain = serried::bench::median(without);
  const double more = serried::bench::median(with) - plain;
  bench.rows.push_back({"comm", "black box on, all_reduce 256 B", plain + more, plain, "off", 0});
  bench.rows.push_back({"comm", "black box: added to that call", more, 0.1, "goal", 1});
  bench.rows.push_back({"comm", "black box: entry, nothing else to do", entry, plain, "that call", 0});
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  {
    at::set_num_threads(1);
    Bench bench;
    MPI_Comm_rank(MPI_COMM_WORLD, &bench.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &bench.size);
    bench.barrier = std::make_shared<NeutralBarrier>(bench.size);
    bench.shm = serried::new_group("shm");
    bench.gloo = serried::new_group("gloo");
    bench.heap = bench.shm->getBackend(at::kCPU)->allocateTensor(kLargest / 4, at::kFloat);
    for (at::Tensor* tensor : {&bench.input, &bench.output, &bench.heap}) tensor->fill_(1);
    const std::string only = argc > 2 ? argv[2] : "";
    for (const long bytes : {1l << 10, 8l << 10, 64l << 10, 256l << 10, 1l << 20, 4l << 20, 16l << 20, kLargest}) {
      if (only.empty() || only == "all_reduce") all_reduce(bench, bytes);
      // With more ranks than cores only all_reduce has a goal.
      if (bench.size > 2 && only.empty()) continue;
      if (only.empty() || only == "all_gather") all_gather(bench, bytes);
      if (only.empty() || only == "reduce_scatter") reduce_scatter(bench, bytes);
      if (only.empty() || only == "broadcast") broadcast(bench, bytes);
      if (only.empty() || only == "all_to_all") all_to_all(bench, bytes);
    }
    if (bench.size == 2 && only.empty()) watch_cost(bench);
    if (bench.size == 2 && (only.empty() || only == "black_box")) black_box_cost(bench);
    if (bench.size == 2 && (only.empty() || only == "profiler")) profiler_cost(bench);
    if (bench.rank == 0) {
      serried::bench::print_table(bench.rows);
      if (argc > 1 && argv[1][0] != '-') serried::bench::append_json(bench.rows, argv[1]);
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
  MPI_Finalize();
  return 0;
}
