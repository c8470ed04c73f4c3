// srun by its environment alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

struct Step {
  std::string num_nodes = "2";
  std::string num_tasks = "2";
  std::string nodes = "127.0.0.[1-2]";
  int job = ::getpid();
};

std::vector<std::string> task(int node, const Step& step = {}) {
  return {"SLURM_JOB_ID=" + std::to_string(step.job), "SLURM_STEP_ID=0",
          "SLURM_STEP_NUM_NODES=" + step.num_nodes,   "SLURM_STEP_NUM_TASKS=" + step.num_tasks,
          "SLURM_STEP_NODELIST=" + step.nodes,        "SLURM_NODEID=" + std::to_string(node)};
}

TEST(LaunchSlurm, ALauncherPerNodeIsOneJob) {
  const std::string script = "echo $RANK/$WORLD_SIZE node $GROUP_RANK/$GROUP_WORLD_SIZE";
  Command second(shell({"-n", "2"}, script), task(1));
  Command first(shell({"-n", "1"}, script), task(0));
  const Result a = first.finish();
  EXPECT_EQ(a.exit_code, 0) << a.err;
  EXPECT_EQ(a.out, "[rank 0] 0/3 node 0/2\n");
  EXPECT_EQ(count_of(second.finish().out, "/3 node 1/2\n"), 2);
}

TEST(LaunchSlurm, StepsMeetAtPortsOfTheirOwn) {
  const auto place_of = [](const std::vector<std::string>& environment) {
    const std::string error = serried(shell({"--join-timeout", "0.05"}, "true"), environment).err;
    const size_t begin = error.find(" at 127.0.0.1:") + 4;
    return error.substr(begin, error.find(' ', begin) - begin);
  };
  const std::string one = place_of(task(1, {.job = 4711}));
  EXPECT_THAT(one, HasSubstr("127.0.0.1:"));
  EXPECT_EQ(place_of(task(1, {.job = 4711})), one);
  EXPECT_NE(place_of(task(1, {.job = 4712})), one);
}

TEST(LaunchSlurm, OneNodeOptionsAndRanksOfAnotherLauncherGoTheirOwnWay) {
  EXPECT_EQ(serried(shell({}, "echo $WORLD_SIZE"), task(0, {.num_nodes = "1"})).out, "[rank 0] 1\n");
  EXPECT_EQ(serried(shell({"--nnodes", "1"}, "echo $WORLD_SIZE"), task(0)).out, "[rank 0] 1\n");
  std::vector<std::string> of_rank = task(0);
  of_rank.emplace_back("SERRIED_LAUNCHER=1");
  EXPECT_EQ(serried(shell({}, "echo $WORLD_SIZE"), of_rank).out, "[rank 0] 1\n");
}

TEST(LaunchSlurm, WhatMakesNoJobIsRefused) {
  const auto error = [](const Step& step) {
    const Result result = serried(shell({}, "true"), task(1, step));
    EXPECT_EQ(result.exit_code, 2);
    return result.err;
  };
  EXPECT_EQ(
      error({.num_tasks = "8"}),
      "[run] srun starts 8 launchers on 2 nodes\n  fix: srun --ntasks-per-node=1 serried run -n 4 ./train; or leave "
      "serried run out: srun ./train works too\n");
  EXPECT_THAT(error({.nodes = ""}), HasSubstr("[run] SLURM_STEP_NODELIST is not set, though srun is at work\n"));
  EXPECT_THAT(error({.num_nodes = "two"}), HasSubstr("[run] SLURM_STEP_NUM_NODES is \"two\", which is no number"));
  EXPECT_THAT(error({.nodes = "node[1-2]"}), HasSubstr("and there is no token"));
}

}  // namespace
}  // namespace serried::testing
