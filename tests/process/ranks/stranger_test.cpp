// A job whose store a stranger writes to: it goes on, or says who did it; it listens on loopback only.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <regex>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::Each;
using ::testing::EndsWith;
using ::testing::HasSubstr;

std::vector<std::string> rank_program(std::vector<std::string> options, std::vector<std::string> arguments) {
  options.insert(options.begin(), "run");
  options.push_back(SERRIED_WORKER);
  options.insert(options.end(), arguments.begin(), arguments.end());
  return options;
}

// What three ranks say of groups that they make after a stranger's deed.
Result after(const std::string& deed) {
  const TemporaryFolder folder;
  const std::string fifo = make_fifo(folder);
  const std::string port = std::to_string(free_port());
  Command job(rank_program({"-n", "3", "--master-port", port}, {"meet_a_stranger", fifo}));
  job.wait_for("ready");
  const Result stranger = serried({"run", SERRIED_STRANGER, port, deed});
  EXPECT_EQ(stranger.exit_code, 0) << stranger.err;
  EXPECT_THAT(stranger.out, HasSubstr("meddled with "));
  EXPECT_EQ(count_of(stranger.out, "meddled with 0 keys"), 0);
  std::ofstream(fifo) << "go" << std::endl;
  Result result = job.finish();
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  // What the ranks have goes on.
  EXPECT_EQ(count_of(result.out, "sum 6 on shm"), 3) << result.out;
  EXPECT_EQ(count_of(result.out, "sum 6 on gloo"), 3) << result.out;
  EXPECT_EQ(count_of(result.out, "done"), 3) << result.out;
  EXPECT_TRUE(job.nothing_left());
  return result;
}

class StrangerWrites : public ::testing::TestWithParam<const char*> {};

TEST_P(StrangerWrites, NewGroupsSayThatAStrangerWroteWhichKey) {
  const Result result = after(GetParam());
  const std::string head = "\\[store\\] the key \"serried/0/3/[^\"]*\" holds what no rank of this job wrote: ";
  for (const std::string call : {"split: ", "new: "}) {
    const std::regex refused(call + head +
                             "its signature is missing or wrong, so a stranger wrote it to the store at 127.0.0.1:");
    EXPECT_EQ(std::distance(std::sregex_iterator(result.out.begin(), result.out.end(), refused), {}), 3) << result.out;
  }
}

INSTANTIATE_TEST_SUITE_P(To, StrangerWrites, ::testing::Values("overwrite", "sign", "replay"),
                         [](const auto& info) { return std::string(info.param); });

TEST(Stranger, WhoDeletesKeysStopsNothingThatRuns) {
  const Result result = after("delete");
  EXPECT_LT(result.seconds, 15);
}

TEST(Stranger, MemoryOnOfferIsNotTaken) {
  // The keys of the next group are there before its ranks come: what no rank has signed yet is replaced, not used.
  const Result result = after("offer");
  EXPECT_EQ(count_of(result.out, "Segmentation"), 0);
  EXPECT_EQ(count_of(result.out, "split: fine"), 3) << result.out;
}

std::vector<std::string> places(const Result& result) {
  std::vector<std::string> found;
  for (const std::string& line : lines_of(result.out)) {
    if (line.find("listens at ") != std::string::npos) found.push_back(line);
  }
  return found;
}

TEST(Listening, OneMachineListensOnLoopbackOnly) {
  for (const char* backend : {"shm", "gloo"}) {
    const Result result = serried(rank_program({"-n", "2"}, {"listening", backend, "launcher"}));
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_GE(places(result).size(), 1) << result.out;
    EXPECT_THAT(places(result), Each(EndsWith("listens at 127.0.0.1")));
  }
}

TEST(Listening, AMasterPortIsOpenedOnLoopbackToo) {
  const Result result =
      serried(rank_program({"-n", "2", "--master-port", std::to_string(free_port())}, {"listening", "shm", "port"}));
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(places(result), ::testing::ElementsAre("[rank 0] listens at 127.0.0.1"));
}

}  // namespace
}  // namespace serried::testing
