// The example whose ranks may be killed at will: some are, and the loss goes on falling.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <sstream>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::Each;
using ::testing::Ge;
using ::testing::Lt;
using ::testing::SizeIs;

/// The processes of the last line that names them.
std::vector<pid_t> processes_in(const std::string& out) {
  const std::string word = "processes";
  std::istringstream names(out.substr(out.rfind(word) + word.size()));
  std::string line;
  std::getline(names, line);
  std::istringstream numbers(line);
  std::vector<pid_t> found;
  for (pid_t process = 0; numbers >> process;) found.push_back(process);
  return found;
}

/// After each "loss".
std::vector<double> losses_in(const std::string& out) {
  std::vector<double> losses;
  const std::string word = "loss ";
  for (size_t at = out.find(word); at != std::string::npos; at = out.find(word, at + 1)) {
    losses.push_back(std::stod(out.substr(at + word.size())));
  }
  return losses;
}

TEST(ElasticExample, TheLossGoesOnFallingWhileRanksAreKilled) {
  Command command({"run", "-n", "4", "--keep-going", ELASTIC_BINARY, "400", "5"});
  command.wait_for("goes on with 4 ranks, processes");
  command.wait_for("step 40 ");
  const std::vector<pid_t> first = processes_in(command.so_far());
  ASSERT_THAT(first, SizeIs(4));
  ASSERT_EQ(::kill(first[2], SIGKILL), 0);
  command.wait_for("goes on with 3 ranks, processes");
  command.wait_for("  3 ranks\n");
  const std::vector<pid_t> left = processes_in(command.so_far());
  ASSERT_THAT(left, SizeIs(3));
  ASSERT_EQ(::kill(left[0], SIGKILL), 0);  // rank 0, which prints
  const Result result = command.finish();
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "goes on with 2 ranks, processes"), 1) << result.out << result.err;
  const std::vector<double> losses = losses_in(result.out);
  ASSERT_THAT(losses, SizeIs(Ge(15))) << result.out;
  EXPECT_LT(losses.back(), 0.5 * losses.front()) << result.out;
  const std::vector<double> end(losses.end() - 5, losses.end());  // when two were dead
  EXPECT_THAT(end, Each(Lt(losses[2]))) << result.out;
}

}  // namespace
}  // namespace serried::testing
