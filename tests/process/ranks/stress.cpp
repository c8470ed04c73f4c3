// Random collectives with random kills: survivors must raise and name the dead; no sum may be wrong, nothing may hang.
//
// `stress <iterations> <seed> <folder>`. Each iteration forks a set of ranks before LibTorch has any thread.
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/group.h"

namespace {

using serried::Group;
using namespace std::chrono_literals;

enum Outcome : int { kRaised = 0, kWrongSum = 3, kOtherError = 4, kWrongRankNamed = 5 };

struct Plan {
  int world_size;
  int victim;
  int kill_after_us;
  unsigned seed;
  std::string meeting;
};

/// Runs the same random calls on every rank and checks each result.
[[noreturn]] void collectives_until_error(const Group& group, unsigned seed) {
  std::mt19937 dice(seed);
  const int n = group->getSize();
  const int rank = group->getRank();
  const auto check = [](const at::Tensor& got, double expected) {
    if (!got.eq(expected).all().item<bool>()) _exit(kWrongSum);
  };
  while (true) {
    const int64_t size = int64_t(1) << (dice() % 19);
    const int which = int(dice() % 5);
    const at::Tensor x = at::full({size * n}, double(rank + 1), at::kFloat);
    const double total = n * (n + 1) / 2.0;
    if (which == 0) {
      serried::all_reduce_(x, group);
      check(x, total);
    } else if (which == 1) {
      check(serried::all_gather(x, group).narrow(0, (n - 1) * size * n, size * n), n);
    } else if (which == 2) {
      check(serried::reduce_scatter(x, group), total);
    } else if (which == 3) {
      check(serried::all_to_all(x, group).narrow(0, (n - 1) * size, size), n);
    } else {
      serried::broadcast_(x, group, {.src = int(dice() % n)});
      check(x.narrow(0, 1, 1), x[0].item<double>());
    }
  }
}

[[noreturn]] void be_rank(const Plan& plan, int rank, int ready_fd) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  try {
    at::set_num_threads(1);
    const Group group = serried::new_group(
        "shm", {.timeout = 10s, .init_method = plan.meeting, .rank = rank, .world_size = plan.world_size});
    if (write(ready_fd, "r", 1) != 1) _exit(kOtherError);
    collectives_until_error(group, plan.seed);
  } catch (const c10::DistBackendError& error) {
    const bool named = error.msg().find(c10::str("rank ", plan.victim, " (pid")) != std::string::npos;
    if (!named) std::fprintf(stderr, "rank %d: %s\n", rank, error.msg().c_str());
    _exit(named ? kRaised : kWrongRankNamed);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    _exit(kOtherError);
  }
}

bool wait_until_ready(int fd, int count) {
  for (int i = 0; i < count; ++i) {
    pollfd entry{.fd = fd, .events = POLLIN, .revents = 0};
    char byte = 0;
    if (poll(&entry, 1, 20'000) <= 0 || read(fd, &byte, 1) != 1) return false;
  }
  return true;
}

/// Whether all children end within 5 s, and all but the victim by having raised.
bool all_raised(const std::vector<pid_t>& children, int victim) {
  bool good = true;
  const auto deadline = std::chrono::steady_clock::now() + 5s;
  for (size_t rank = 0; rank < children.size(); ++rank) {
    int status = 0;
    while (waitpid(children[rank], &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) {
        std::fprintf(stderr, "rank %zu hangs\n", rank);
        kill(children[rank], SIGKILL);
        good = false;
      }
      usleep(500);
    }
    if (int(rank) == victim) continue;
    const bool raised = WIFEXITED(status) && WEXITSTATUS(status) == kRaised;
    if (!raised) std::fprintf(stderr, "rank %zu ended with status %d\n", rank, status);
    good &= raised;
  }
  return good;
}

bool run(const Plan& plan) {
  std::array<int, 2> ready{};
  if (pipe(ready.data()) != 0) return false;
  std::vector<pid_t> children;
  for (int rank = 0; rank < plan.world_size; ++rank) {
    const pid_t child = fork();
    if (child == 0) be_rank(plan, rank, ready[1]);
    children.push_back(child);
  }
  const bool met = wait_until_ready(ready[0], plan.world_size);
  usleep(plan.kill_after_us);
  kill(children[plan.victim], SIGKILL);
  const bool good = all_raised(children, plan.victim) && met;
  close(ready[0]);
  close(ready[1]);
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  const int iterations = argc > 1 ? std::atoi(argv[1]) : 100;
  const unsigned seed = argc > 2 ? unsigned(std::atoi(argv[2])) : 1;
  const std::string folder = argc > 3 ? argv[3] : "/tmp";
  setenv("SERRIED_SHUTDOWN_TIMEOUT", "0", 1);
  std::mt19937 dice(seed);
  int failures = 0;
  for (int i = 0; i < iterations; ++i) {
    Plan plan;
    plan.world_size = 2 + int(dice() % 3);
    plan.victim = int(dice() % plan.world_size);
    plan.kill_after_us = int(dice() % 8000);
    plan.seed = dice();
    const std::string path = c10::str(folder, "/serried_stress_", getpid(), "_", i);
    plan.meeting = "file://" + path;
    if (!run(plan)) {
      std::fprintf(stderr, "iteration %d of seed %u failed: %d ranks, victim %d, killed after %d us\n", i, seed,
                   plan.world_size, plan.victim, plan.kill_after_us);
      ++failures;
    }
    unlink(path.c_str());
  }
  std::printf("%d iterations of seed %u, %d failures\n", iterations, seed, failures);
  return failures == 0 ? 0 : 1;
}
