// The GPT of the examples in a short form: the same loss on any number of ranks, and one trace of all of them.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <random>
#include <set>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

Result gpt(int num_ranks, std::vector<std::string> arguments) {
  std::vector<std::string> command = {"run", "-n", std::to_string(num_ranks), GPT_BINARY};
  command.insert(command.end(), arguments.begin(), arguments.end());
  return serried(command);
}

double loss_in(const Result& result) {
  EXPECT_EQ(result.exit_code, 0) << result.out << result.err;
  const std::string label = "final loss ";
  const size_t at = result.out.find(label);
  if (at == std::string::npos) return -1;
  return std::stod(result.out.substr(at + label.size()));
}

double final_loss(int num_ranks) {
  return loss_in(gpt(num_ranks, {"--steps", "8"}));
}

TEST(Gpt, ReachesTheSameLossOnAnyNumberOfRanks) {
  const double alone = final_loss(1);
  EXPECT_GT(alone, 1);
  EXPECT_LT(alone, 3.5);  // 4.1 is that of guessing
  for (int num_ranks : {2, 3, 4}) EXPECT_NEAR(final_loss(num_ranks), alone, 1e-5) << num_ranks << " ranks";
}

TEST(Gpt, ShowsSamplesAndProgressAndWritesOneTraceOfAllRanks) {
  const TemporaryFolder folder;
  const std::string trace = folder.path() + "/trace.json";
  const Result result = gpt(2, {"--steps", "3", "--trace", trace});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  for (const char* part : {"Before:", "3/3  loss ", " tokens/s  exposed communication ", "After:", "A wise man "}) {
    EXPECT_THAT(result.out, HasSubstr(part));
  }
  std::set<std::pair<int, std::string>> spans;
  const auto json = nlohmann::json::parse(read_file(trace));
  for (const auto& event : json["traceEvents"]) {
    spans.emplace(event["pid"].get<int>(), event["name"].get<std::string>());
  }
  for (int rank : {0, 1}) {
    for (const char* name : {"forward", "backward", "optimizer", "all_reduce: DDP bucket 0"}) {
      EXPECT_EQ(spans.count({rank, name}), 1u) << "rank " << rank << ": " << name;
    }
  }
  const auto files = std::filesystem::directory_iterator(folder.path());
  EXPECT_EQ(std::distance(begin(files), end(files)), 1);
}

/// Killed behind `after`, as the demo prints it, and started again on `num_ranks`.
double loss_after_kill(const std::string& after, int num_ranks) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/ckpt";
  const std::vector<std::string> saving = {"--steps", "20", "--checkpoint", path, "--save-every", "1"};
  {
    std::vector<std::string> command = {"run", "-n", "2", GPT_BINARY};
    command.insert(command.end(), saving.begin(), saving.end());
    Command first(command);
    first.wait_for(after);
    for (const pid_t process : first.processes()) ::kill(process, SIGKILL);
  }
  std::vector<std::string> going_on = saving;
  going_on.push_back("--resume");
  const Result result = gpt(num_ranks, going_on);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("  goes on after step "));
  return loss_in(result);
}

TEST(Gpt, GoesOnOnAnotherNumberOfRanksAfterAKill) {
  const unsigned seed = std::random_device()();
  std::mt19937 random(seed);
  const double uninterrupted = loss_in(gpt(2, {"--steps", "20"}));
  for (const int num_ranks : {1, 3}) {
    const std::string after = " " + std::to_string(3 + random() % 17) + "/20 ";
    EXPECT_NEAR(loss_after_kill(after, num_ranks), uninterrupted, 1e-5)
        << "killed after" << after << "of the seed " << seed << ", gone on with " << num_ranks << " ranks";
  }
}

// Where files cannot be exchanged a kill leaves the checkpoint under such a name.
TEST(Gpt, GoesOnFromACheckpointThatAKillHasSetAside) {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/ckpt";
  const std::vector<std::string> saving = {"--steps", "4", "--checkpoint", path, "--save-every", "2", "--resume"};
  const double reached = loss_in(gpt(1, saving));
  std::filesystem::rename(path, path + ".replaced-0123456789abcdef");
  const Result result = gpt(2, saving);
  EXPECT_THAT(result.out, HasSubstr("  goes on after step 4\n"));
  EXPECT_THAT(result.out, HasSubstr("  nothing is left to do of 4 steps\n"));
  EXPECT_EQ(loss_in(result), reached);
}

TEST(Gpt, SaysWhatItCannotDo) {
  EXPECT_THAT(gpt(1, {"--stops", "3"}).err,
              HasSubstr("usage: 06_gpt [--steps 700] [--text FILE] [--trace FILE] [--checkpoint FOLDER]"));
  EXPECT_THAT(gpt(1, {"--resume"}).err, HasSubstr("--resume needs --checkpoint FOLDER"));
  EXPECT_THAT(gpt(1, {"--text", "/nowhere"}).err, HasSubstr("there is no text to learn from in /nowhere"));
}

}  // namespace
}  // namespace serried::testing
