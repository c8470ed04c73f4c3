// Backends between real processes: forks, ranks that are stopped, ranks that are gone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::Combine;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Values;

std::vector<std::string> backend_worker(const std::string& ranks, std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"run", "-n", ranks, SERRIED_BACKEND_WORKER});
  return arguments;
}

using TwoTexts = std::tuple<const char*, const char*>;

std::string joined_name(const ::testing::TestParamInfo<TwoTexts>& info) {
  return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
}

class Forks : public ::testing::TestWithParam<TwoTexts> {};

TEST_P(Forks, LeaveTheGroupToTheParent) {
  const auto [backend, how] = GetParam();
  const Result result = serried(backend_worker("2", {"fork", backend, how}));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "parent: 4, child 7"), 2) << result.out << result.err;
  EXPECT_THAT(result.out, Not(HasSubstr("wrong")));
}

INSTANTIATE_TEST_SUITE_P(On, Forks, Combine(Values("shm", "gloo"), Values("return", "exit", "_exit", "use")),
                         joined_name);

class ForkedChildren : public ::testing::TestWithParam<const char*> {};

TEST_P(ForkedChildren, AreToldWhoseGroupItIs) {
  const Result result = serried(backend_worker("2", {"fork", GetParam(), "use"}));
  EXPECT_EQ(count_of(result.out, "child: ["), 20) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, " is a fork of process "), 20) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, ", to which the group belongs"), 20) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(On, ForkedChildren, Values("shm", "gloo"),
                         [](const auto& info) { return std::string(info.param); });

class Anybody : public ::testing::TestWithParam<const char*> {};

TEST_P(Anybody, IsNotWaitedForWhenAllHaveDied) {
  const Result result = serried(backend_worker("3", {"anybody", GetParam()}));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  const std::string text = GetParam() == std::string("gloo")
                               ? "nobody is left to send; the process of ranks 1, 2 has ended"
                               : "ranks 1, 2 are gone (they died or left the group) while rank 0 was in recv f32[3] "
                                 "from any rank, tag 4";
  EXPECT_THAT(result.out, HasSubstr(text));
}

INSTANTIATE_TEST_SUITE_P(On, Anybody, Values("shm", "gloo"), [](const auto& info) { return std::string(info.param); });

class StoppedRanks : public ::testing::TestWithParam<TwoTexts> {};

TEST_P(StoppedRanks, AreNamedAndRaiseWhenTheyGoOn) {
  const auto [backend, call] = GetParam();
  const Result result = serried(backend_worker("3", {"stop_in", backend, call}));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "right, then: ["), 3) << result.out << result.err;
  EXPECT_THAT(result.out, HasSubstr("timed out after"));
  EXPECT_THAT(result.out, HasSubstr("rank 1 (pid "));
  EXPECT_THAT(result.out, HasSubstr(") is stopped: SIGCONT lets it go on"));
}

INSTANTIATE_TEST_SUITE_P(Shm, StoppedRanks,
                         Combine(Values("shm"),
                                 Values("all_reduce", "in_heap", "all_gather", "reduce_scatter", "all_to_all",
                                        "broadcast", "reduce", "gather", "scatter", "barrier", "ring")),
                         joined_name);

INSTANTIATE_TEST_SUITE_P(Gloo, StoppedRanks,
                         Combine(Values("gloo"), Values("all_reduce", "all_gather", "reduce_scatter", "all_to_all",
                                                        "broadcast", "reduce", "gather", "scatter", "barrier", "ring")),
                         joined_name);

class Exits : public ::testing::TestWithParam<const char*> {};

TEST_P(Exits, MayComeBeforeTheGroupIsDropped) {
  const Result result = serried(backend_worker("2", {"leave_open", GetParam()}));
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "left"), 2) << result.out << result.err;
}

INSTANTIATE_TEST_SUITE_P(On, Exits, Values("shm", "gloo"), [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace serried::testing
