// How fast serried and Gloo are on these ranks: the same calls, taking turns.
#include "demo.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>

namespace demo {
namespace {

using Clock = std::chrono::steady_clock;

struct Measured {
  const char* name;
  std::function<void(const Group&, int64_t bytes)> call;
};

// Every rank ends with `bytes` of floats, in buffers that all calls share.
std::vector<Measured> measured(const at::Tensor& in, const at::Tensor& out) {
  return {
      {"all_reduce", [in](const Group& g, int64_t bytes) { serried::all_reduce_(in.narrow(0, 0, bytes / 4), g); }},
      {"all_gather",
       [in, out](const Group& g, int64_t bytes) {
         const int64_t part = bytes / 4 / g->getSize();
         at::Tensor mine = in.narrow(0, 0, part), all = out.narrow(0, 0, part * g->getSize());
         c10d::AllgatherOptions options;
         options.asyncOp = false;
         g->all_gather_single(all, mine, options)->wait();
       }},
      {"broadcast", [in](const Group& g, int64_t bytes) { serried::broadcast_(in.narrow(0, 0, bytes / 4), g); }},
  };
}

int rounds_for(int64_t bytes) {
  if (bytes <= 64 << 10) return 60;
  return bytes <= 1 << 20 ? 30 : 7;
}

std::string size_text(int64_t bytes) {
  return bytes >= 1 << 20 ? c10::str(bytes >> 20, " MiB") : c10::str(bytes >> 10, " KiB");
}

/// Median over rounds of the slowest rank's time, in microseconds, for each group.
std::array<double, 2> take_turns(const std::array<Group, 2>& groups, const std::function<void(const Group&)>& call,
                                 int rounds) {
  const at::Tensor times = torch::zeros({2, rounds}, at::kDouble);
  for (int round = -2; round < rounds; ++round) {  // the first two warm up
    for (int i = 0; i < 2; ++i) {
      serried::barrier(groups[0]);
      const auto begin = Clock::now();
      call(groups[i]);
      const double time = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
      if (round >= 0) times[i][round] = time;
    }
  }
  serried::all_reduce_(times, groups[0], c10d::ReduceOp::MAX);
  const at::Tensor medians = std::get<0>(times.median(1));
  return {medians[0].item<double>(), medians[1].item<double>()};
}

void print_row(const char* name, int64_t bytes, const std::array<double, 2>& times) {
  const auto rate = [&](double time) { return double(bytes) / time / 1e3; };
  std::printf("  %-12s %7s %10.0f %10.0f  %10.3f %10.3f  %8.1fx\n", name, size_text(bytes).c_str(), times[0], times[1],
              rate(times[0]), rate(times[1]), times[1] / times[0]);
  std::fflush(stdout);
}

}  // namespace

void print_bandwidths(const Group& world, const Group& gloo) {
  constexpr int64_t kLargest = 16 << 20;
  const bool prints = world->getRank() == 0;
  const at::Tensor in = torch::ones({kLargest / 4}), out = torch::ones({kLargest / 4});
  if (prints) {
    std::printf("  %-20s %21s  %21s\n", "", "microseconds", "GB/s");
    std::printf("  %-20s %10s %10s  %10s %10s  %9s\n", "", "serried", "Gloo", "serried", "Gloo", "speed-up");
  }
  for (const Measured& one : measured(in, out)) {
    for (const int64_t bytes : {int64_t(1) << 10, int64_t(64) << 10, int64_t(1) << 20, kLargest}) {
      in.zero_();  // sums stay sums of zeros, however many rounds there are
      const auto times = take_turns(
          {world, gloo}, [&](const Group& g) { one.call(g, bytes); }, rounds_for(bytes));
      if (prints) print_row(one.name, bytes, times);
    }
  }
}

}  // namespace demo
