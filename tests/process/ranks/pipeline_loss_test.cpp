// A pipeline of which a rank is killed: the others name it, and where they were.
#include <gtest/gtest.h>

#include <signal.h>

#include <regex>
#include <set>
#include <string>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

struct Death {
  const char* schedule;
  const char* cell;  // as in the schedule's table
  int victim;        // the rank that has its stage
  int width = 8;     // elements of a row
};

std::ostream& operator<<(std::ostream& out, const Death& death) {
  return out << death.schedule << " at " << death.cell;
}

class PipelineRanks : public ::testing::TestWithParam<Death> {};

TEST_P(PipelineRanks, SurvivorsNameRankStageAndAction) {
  const auto [schedule, cell, victim, width] = GetParam();
  const TemporaryFolder folder;
  const Result result = serried({"run", "-n", "3", "--grace", "15", SERRIED_PIPELINE_WORKER, folder.path() + "/note",
                                 schedule, cell, std::to_string(width)});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  // At an action, behind the last of the step or before its first; who waits for a rank says for which action of it.
  const std::regex raised(
      "raised after (\\d+) ms: [^]*?rank " + std::to_string(victim) +
      " is gone[^]*?\\((at|after|before) [FBIW] s\\d m\\d on rank ([0-2]) of the pipeline(, which waits for "
      "(F s\\d m\\d|the gradient of stage \\d) on rank [0-2]|, while its last messages)?");
  std::set<std::string> ranks;
  for (std::sregex_iterator it(result.out.begin(), result.out.end(), raised), end; it != end; ++it) {
    EXPECT_LE(std::stoi((*it)[1]), 200) << result.out;
    ranks.insert((*it)[3]);
  }
  std::set<std::string> others = {"0", "1", "2"};
  others.erase(std::to_string(victim));
  EXPECT_EQ(ranks, others) << result.out << result.err;
}

std::string name_of(const ::testing::TestParamInfo<Death>& info) {
  const std::string schedule = info.param.schedule[0] == '1' ? "OneFOneB" : info.param.schedule;
  return schedule + "_" + info.param.cell + (info.param.width > 8 ? "_large" : "");
}

// Under the launcher; pipeline_deaths.cpp does every cell, without it.
INSTANTIATE_TEST_SUITE_P(At, PipelineRanks,
                         ::testing::Values(Death{"1F1B", "0F0", 0}, Death{"1F1B", "1F2", 1}, Death{"1F1B", "2B0", 2}),
                         name_of);

// Ranks 0, 1 and 2 have stages 0 and 5, 1 and 4, 2 and 3.
INSTANTIATE_TEST_SUITE_P(AtSplit, PipelineRanks,
                         ::testing::Values(Death{"ZBV", "5I0", 0}, Death{"ZBV", "1W3", 1}, Death{"ZBV", "3F0", 2}),
                         name_of);

// Messages that are longer than what is on its way at once: a rank may be done, but for these.
INSTANTIATE_TEST_SUITE_P(AtLarge, PipelineRanks,
                         ::testing::Values(Death{"1F1B", "1F3", 1, 1 << 16}, Death{"1F1B", "1B2", 1, 1 << 16},
                                           Death{"1F1B", "0B3", 0, 1 << 16}, Death{"ZBV", "4I2", 1, 1 << 16},
                                           Death{"ZBV", "0W3", 0, 1 << 16}),
                         name_of);

}  // namespace
}  // namespace serried::testing
