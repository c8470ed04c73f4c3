// What `serried checkpoint` prints, where, and how it ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <filesystem>

#include "tests/process/command.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Saved by two ranks: "step4" and "step5", each with "x", 7 x 300 numbers, and "step".
class CheckpointCommand : public ::testing::Test {
 protected:
  void SetUp() override {
    const Result saved = serried({"run", "-n", "2", SAVING_RANKS, folder_.path()});
    ASSERT_EQ(saved.exit_code, 0) << saved.err;
  }
  std::string at(const std::string& name) const { return folder_.path() + "/" + name; }
  static Result checkpoint(std::vector<std::string> words) {
    words.insert(words.begin(), "checkpoint");
    return serried(words);
  }

 private:
  TemporaryFolder folder_;
};

TEST_F(CheckpointCommand, ListsInWordsAndAsJson) {
  const Result words = checkpoint({"ls", at("step5")});
  EXPECT_EQ(words.exit_code, 0) << words.err;
  for (const char* part : {"saved by 2 ranks", "  step = 5\n", "i64[7,300]", " 16.4 KiB\n"}) {
    EXPECT_THAT(words.out, HasSubstr(part));
  }
  const Result json = checkpoint({"ls", "--json", at("step5")});
  EXPECT_EQ(json.exit_code, 0) << json.err;
  const auto listed = nlohmann::json::parse(json.out);
  EXPECT_EQ(listed["ranks"], 2);
  EXPECT_EQ(listed["values"]["step"], 5);
  EXPECT_EQ(listed["entries"]["values"]["tensors"]["x"]["sizes"], nlohmann::json::parse("[7, 300]"));
}

TEST_F(CheckpointCommand, ShowsOneThingAnExcerptOrAllOfIt) {
  EXPECT_EQ(checkpoint({"cat", at("step5"), "step"}).out, "5\n");
  const Result excerpt = checkpoint({"cat", at("step5"), "x"});
  EXPECT_EQ(excerpt.exit_code, 0) << excerpt.err;
  EXPECT_THAT(excerpt.out, HasSubstr("i64[7,300]\n[[5, 6, 7, ..., "));
  EXPECT_THAT(excerpt.out, HasSubstr("--all shows all 2100 elements."));
  const Result all = checkpoint({"cat", "--all", at("step5"), "x"});
  EXPECT_THAT(all.out, Not(HasSubstr("...")));
  EXPECT_THAT(all.out, HasSubstr(" 1000, 1001, "));
  const auto json = nlohmann::json::parse(checkpoint({"cat", "--json", at("step5"), "x"}).out);
  EXPECT_EQ(json["elements"][6][299], 7 * 300 - 1 + 5);
}

TEST_F(CheckpointCommand, VerifyEndsWithOneWhereSomethingIsDamaged) {
  const Result whole = checkpoint({"verify", at("step5"), "--progress"});
  EXPECT_EQ(whole.exit_code, 0) << whole.out;
  EXPECT_EQ(whole.out, at("step5") + ": all of it is as it was saved\n");
  const std::string file = at("step5/values-00001-of-00001.safetensors");
  std::string content = read_file(file);
  content.back() ^= 1;
  write_file(file, content);
  const Result damaged = checkpoint({"verify", at("step5")});
  EXPECT_EQ(damaged.exit_code, 1);
  EXPECT_THAT(damaged.out, HasSubstr("values-00001-of-00001.safetensors: bytes 0 to "));
  EXPECT_THAT(damaged.out, HasSubstr(": damaged\n"));
  EXPECT_THAT(damaged.err, IsEmpty());
}

TEST_F(CheckpointCommand, DiffEndsWithOneWhereTheyDiffer) {
  const Result same = checkpoint({"diff", at("step5"), at("step5")});
  EXPECT_EQ(same.exit_code, 0) << same.err;
  EXPECT_EQ(same.out, "");
  const Result other = checkpoint({"diff", "--no-progress", at("step4"), at("step5")});
  EXPECT_EQ(other.exit_code, 1) << other.err;
  EXPECT_EQ(other.out, "step: 4 and 5\nx: 2100 of 2100 elements differ, by at most 1\n");
  EXPECT_THAT(other.err, IsEmpty());
}

TEST_F(CheckpointCommand, EndsWithTwoAndAFixWhereItCannot) {
  for (const char* word : {"ls", "verify"}) {
    const Result none = checkpoint({word, at("step9")});
    EXPECT_EQ(none.exit_code, 2);
    EXPECT_THAT(none.err, HasSubstr("[checkpoint] " + at("step9") + " does not exist\n  fix: pass the folder of a"));
    EXPECT_THAT(none.out, IsEmpty());
  }
  EXPECT_EQ(checkpoint({"diff", at("step5"), at("step9")}).exit_code, 2);
  const Result name = checkpoint({"cat", at("step5"), "steps"});
  EXPECT_EQ(name.exit_code, 2);
  EXPECT_THAT(name.err, HasSubstr("/step5 has no \"steps\"; it has: step, x\n  fix: name one of these"));
}

}  // namespace
}  // namespace serried::testing
