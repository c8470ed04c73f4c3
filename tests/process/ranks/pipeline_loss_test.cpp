// A pipeline of which a rank is killed: the others name it, and where they were.
#include <gtest/gtest.h>

#include <signal.h>

#include <regex>
#include <set>
#include <string>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

class PipelineRanks : public ::testing::TestWithParam<const char*> {};

TEST_P(PipelineRanks, SurvivorsNameRankStageAndAction) {
  const TemporaryFolder folder;
  const Result result =
      serried({"run", "-n", "3", "--grace", "15", SERRIED_PIPELINE_WORKER, folder.path() + "/note", GetParam()});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  const std::regex raised(
      "raised after (\\d+) ms: .*rank 1 is gone[^]*?\\(at [FB] s([02]) m\\d on rank [02] of the pipeline, which waits "
      "for (F s1 m\\d|the gradient of stage 1) on rank 1\\)");
  std::set<std::string> stages;
  for (std::sregex_iterator it(result.out.begin(), result.out.end(), raised), end; it != end; ++it) {
    EXPECT_LE(std::stoi((*it)[1]), 200) << result.out;
    stages.insert((*it)[2]);
  }
  EXPECT_EQ(stages, (std::set<std::string>{"0", "2"})) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(At, PipelineRanks, ::testing::Values("F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace serried::testing
