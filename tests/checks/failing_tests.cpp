// Tests that fail in every way a test can: what scripts/run_gtests.py has to survive and to name.
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

namespace {

TEST(Good, Passes) {
  EXPECT_EQ(1 + 1, 2);
}
TEST(Good, LeavesALineUnfinished) {
  std::printf("no newline");
}
TEST(Bad, Fails) {
  EXPECT_EQ(1 + 1, 3) << "said by the test";
}
TEST(Bad, Crashes) {
  std::fprintf(stderr, "last words\n");
  std::raise(SIGSEGV);
}
TEST(Bad, Exits) {
  std::exit(0);
}
// A child that outlives the test keeps its output open.
TEST(Bad, Hangs) {
  ::fork();
  for (;;) ::pause();
}
TEST(Bad, DISABLED_IsNotRun) {
  FAIL();
}

class Numbered : public ::testing::TestWithParam<int> {};
TEST_P(Numbered, IsNotTwo) {
  EXPECT_NE(GetParam(), 2);
}
INSTANTIATE_TEST_SUITE_P(All, Numbered, ::testing::Values(1, 2, 3));

TEST(Late, CrashesAfterTheLastTest) {
  std::atexit([] { std::abort(); });
}
TEST(Later, Passes) {}

}  // namespace
