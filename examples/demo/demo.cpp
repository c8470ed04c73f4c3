// The demo: every collective with a check of its values, then bandwidths beside Gloo's. `make demo` starts it on 4
// ranks.
#include "demo.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace {

using demo::Check;
using demo::Group;
using namespace std::chrono_literals;

struct Verdict {
  bool passed = false;
  std::string why;
};

Verdict run_here(const Check& check, const Group& world) {
  try {
    return {check.passes(world), "wrong values"};
  } catch (const std::exception& error) {
    const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
    return {false, c10_error != nullptr ? c10_error->what_without_backtrace() : error.what()};
  }
}

/// "FAILED on rank 1 3", and what went wrong here.
std::string failure(const at::Tensor& passed, const Verdict& here) {
  std::string text = "FAILED on rank";
  for (int64_t rank = 0; rank < passed.size(0); ++rank) {
    if (passed[rank].item<int64_t>() == 0) text += c10::str(" ", rank);
  }
  return here.passed ? text : text + ": " + here.why;
}

/// Rank 0 prints one line. `referee` is another group: a broken collective cannot hide itself. True if all passed.
bool run_check(const Check& check, const Group& world, const Group& referee) {
  const Verdict here = run_here(check, world);
  const at::Tensor passed = serried::all_gather(torch::full({1}, int64_t(here.passed)), referee);
  const bool all_passed = passed.all().item<bool>();
  if (world->getRank() != 0) {
    if (!here.passed) std::fprintf(stderr, "%s, %s: %s\n", check.name.c_str(), check.what.c_str(), here.why.c_str());
    return all_passed;
  }
  const std::string result = all_passed ? "ok" : failure(passed, here);
  std::printf("  %-33s %-48s %s\n", check.name.c_str(), check.what.c_str(), result.c_str());
  std::fflush(stdout);
  return all_passed;
}

void say(const Group& world, const std::string& line) {
  if (world->getRank() != 0) return;
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

int run_demo() {
  at::set_num_threads(1);  // the ranks share the cores
  const Group world = serried::new_group("auto", {.timeout = 20s});
  const Group gloo = serried::new_group("gloo", {.timeout = 20s});
  if (world->getSize() < 2) {
    std::fprintf(stderr, "one rank has nobody to talk to\n  fix: serried run -n 4 build/bin/serried_demo\n");
    return EXIT_FAILURE;
  }
  say(world, c10::str(world->getSize(), " ranks, ", std::thread::hardware_concurrency(), " cores, backend ",
                      world->getBackend(at::kCPU)->getBackendName()));
  int failed = 0;
  say(world, "\nserried's collectives");
  for (const Check& check : demo::serried_checks()) failed += !run_check(check, world, gloo);
  say(world, "\nc10d's own, on the same group");
  for (const Check& check : demo::c10d_checks()) failed += !run_check(check, world, gloo);
  if (failed > 0) {
    say(world,
        c10::str("\n", failed, " of the checks above failed. \"serried doctor\" says what works on this machine."));
    return EXIT_FAILURE;
  }
  say(world, "\nTime and bandwidth, medians; size is what each rank ends with");
  demo::print_bandwidths(world, gloo);
  say(world, "\nEverything works here.\n");
  return EXIT_SUCCESS;
}

}  // namespace

int main() {
  try {
    return run_demo();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return EXIT_FAILURE;
}
