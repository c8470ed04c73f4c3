// The variables that srun sets in each task of a step; sbatch and salloc alone set no SLURM_STEP_*.
#include "serried/launch/slurm.h"

#include <charconv>
#include <cstdlib>

#include "serried/base/first_host.h"
#include "serried/launch/error.h"
#include "serried/launch/options.h"

namespace serried::launch {
namespace {

std::string value_of(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

int64_t number_of(const char* name) {
  const std::string text = value_of(name);
  int64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && stop == text.data() + text.size() && number >= 0) return number;
  throw LaunchError(kExitUsage, std::string(name) + " is \"" + text + "\", which is no number, though srun is at work",
                    "start this by srun, or pass --nnodes and --rendezvous");
}

// Below the range from which systems hand out ports by themselves; every node computes the same.
int port_of_step() {
  constexpr int kFirst = 10000;
  constexpr int kCount = 20000;
  return kFirst +
         static_cast<int>((number_of("SLURM_JOB_ID") % kCount * 61 + number_of("SLURM_STEP_ID") % kCount) % kCount);
}

}  // namespace

std::optional<SlurmNodes> slurm_nodes() {
  if (value_of("SLURM_STEP_NUM_NODES").empty() || !value_of("SERRIED_LAUNCHER").empty()) return std::nullopt;
  const int64_t num_nodes = number_of("SLURM_STEP_NUM_NODES");
  if (num_nodes < 2) return std::nullopt;
  if (const int64_t num_tasks = number_of("SLURM_STEP_NUM_TASKS"); num_tasks != num_nodes) {
    throw LaunchError(
        kExitUsage,
        "srun starts " + std::to_string(num_tasks) + " launchers on " + std::to_string(num_nodes) + " nodes",
        "srun --ntasks-per-node=1 serried run -n 4 ./train; or leave serried run out: srun ./train works too");
  }
  const std::string first = detail::first_host(value_of("SLURM_STEP_NODELIST"));
  if (first.empty()) {
    throw LaunchError(kExitUsage, "SLURM_STEP_NODELIST is not set, though srun is at work",
                      "pass --rendezvous host:port");
  }
  return SlurmNodes{.num_nodes = static_cast<int>(num_nodes),
                    .node_rank = static_cast<int>(number_of("SLURM_NODEID")),
                    .rendezvous = to_text(Address{first, port_of_step()})};
}

}  // namespace serried::launch
