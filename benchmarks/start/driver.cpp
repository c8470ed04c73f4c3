// Times the start of 4 ranks, from the launcher's own start to the last rank's first all_reduce; ours and mpirun
// alternate. `bench_start_driver <serried> <bench_start> [results.json]`
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "benchmarks/support/results.h"

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 4;
constexpr int kRuns = 7;
constexpr double kBudget = 0.8e6;  // microseconds

std::string quoted(const std::string& path) {
  return "'" + path + "'";
}

/// Microseconds until all ranks have said "done". Ends this program if they do not: a failed start has no time.
double time_start(const std::string& command) {
  const auto begin = Clock::now();
  FILE* output = popen(command.c_str(), "r");
  double time = 0;
  int done = 0;
  char line[4096];
  while (output != nullptr && std::fgets(line, sizeof(line), output) != nullptr) {
    if (std::string(line).find("done") != std::string::npos) ++done;
    if (done == kRanks && time == 0) time = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
  }
  const int status = output != nullptr ? pclose(output) : -1;
  if (status == 0 && time > 0) return time;
  std::fprintf(stderr,
               "[bench start] %d of %d ranks came to their first all_reduce, status %d\n  fix: try it alone: %s\n",
               done, kRanks, status, command.c_str());
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: bench_start_driver <serried> <bench_start> [results.json]\n");
    return 2;
  }
  const std::string ranks = std::to_string(kRanks);
  const std::string ours = quoted(argv[1]) + " run -n " + ranks + " " + quoted(argv[2]) + " ours";
  const std::string mpi = "mpirun --oversubscribe -n " + ranks + " " + quoted(argv[2]) + " mpi";
  std::vector<double> our_times, mpi_times;
  time_start(ours);  // both warm up: the libraries come from the disk once
  time_start(mpi);
  for (int run = 0; run < kRuns; ++run) {
    our_times.push_back(time_start(ours));
    mpi_times.push_back(time_start(mpi));
  }
  const double median = serried::bench::median(our_times);
  const std::string name = "launch to first all_reduce, 4 ranks";
  const std::vector<serried::bench::Row> rows = {
      {"start", name, median, kBudget, "0.8 s budget", 1.0},
      {"start", name, median, serried::bench::median(mpi_times), "mpirun", 0},
  };
  serried::bench::print_table(rows);
  if (argc > 3) serried::bench::append_json(rows, argv[3]);
  return 0;
}
