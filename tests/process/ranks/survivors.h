// What ranks that outlive another one have to show, whatever they train.
#pragma once

#include <gtest/gtest.h>

#include <signal.h>

#include <regex>
#include <string>

#include "tests/process/command.h"

namespace serried::testing {

/// Three ranks of `worker`, of which the second kills itself `how`: the others say so within 200 ms, leave nothing, and
/// train on. Returns what they printed.
inline std::string expect_survivors_train_on(const std::string& worker, const std::string& how) {
  const TemporaryFolder folder;
  const Result result = serried({"run", "-n", "3", "--grace", "15", worker, folder.path() + "/note", how});
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  const std::regex raised("raised after (\\d+) ms: .*rank 1 \\(pid \\d+\\) died");
  int survivors = 0;
  for (std::sregex_iterator it(result.out.begin(), result.out.end(), raised), end; it != end; ++it) {
    EXPECT_LE(std::stoi((*it)[1]), 200) << result.out;
    ++survivors;
  }
  EXPECT_EQ(survivors, 2) << result.out << result.err;
  EXPECT_EQ(count_of(result.out, "was left"), 0) << result.out;
  EXPECT_EQ(count_of(result.out, "trained on"), 2) << result.out << result.err;
  return result.out;
}

}  // namespace serried::testing
