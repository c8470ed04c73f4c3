// A job of `serried run`, and a look at what it said and left.
#include "tests/process/ranks/fault.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>

#include <filesystem>
#include <iostream>
#include <set>

#include "tests/process/command.h"
#include "tests/process/shared_memory.h"

namespace serried::testing {
namespace {

std::string text_of(const Fault& fault) {
  return fault.fault + " of rank " + std::to_string(fault.victim) + " of " + std::to_string(fault.num_ranks) +
         " in step " + std::to_string(fault.step) + " of " + fault.call + " on " + fault.backend + ", " +
         std::to_string(fault.delay_us) + " us after its begin";
}

/// What the line of `rank` that begins with `word` says after it; empty where there is none.
std::string said(const Result& result, int rank, const std::string& word) {
  const std::string begin = "[rank " + std::to_string(rank) + "] " + word;
  for (const std::string& line : lines_of(result.out)) {
    if (line.starts_with(begin)) return line.substr(begin.size()) + " ";
  }
  return "";
}

void expect_all_fine(const Fault& fault, const Result& result) {
  EXPECT_EQ(result.exit_code, 0);
  for (int rank = 0; rank < fault.num_ranks; ++rank) EXPECT_NE(said(result, rank, "fine"), "") << "rank " << rank;
}

/// Every rank that lives has raised, and all but the victim name it.
void expect_all_raised(const Fault& fault, const Result& result) {
  const std::string victim = "rank " + std::to_string(fault.victim);
  for (int rank = 0; rank < fault.num_ranks; ++rank) {
    if (rank == fault.victim && fault.fault == "kill") continue;
    const std::string text = said(result, rank, "raised: ");
    EXPECT_NE(text, "") << "rank " << rank;
    if (rank == fault.victim) continue;
    EXPECT_THAT(text.substr(0, text.find("  at: ")), ::testing::HasSubstr(victim));
  }
  EXPECT_EQ(result.exit_code, fault.fault == "kill" ? 128 + SIGKILL : 4);
  if (fault.fault == "kill") EXPECT_THAT(result.err, ::testing::HasSubstr("[run] " + victim + " of "));
}

/// That the last checkpoint is whole, whatever has come over those who saved it, and that no more is left than one
/// folder of a save that did not end.
void expect_whole_checkpoint(const std::string& folder) {
  const Result verified = serried({"checkpoint", "verify", folder + "/saved"});
  EXPECT_EQ(verified.exit_code, 0) << verified.out << verified.err;
  const auto items = std::filesystem::directory_iterator(folder);
  EXPECT_LE(std::distance(begin(items), end(items)), 2);
}

}  // namespace

bool waits_in_store(const std::string& call) {
  return call == "rendezvous" || call == "split" || call == "capture";
}

void check_fault(const Fault& fault) {
  SCOPED_TRACE(text_of(fault));
  const std::set<std::string> before = shared_memory_files();
  // A stopped rank is found at the timeout, as is one that dies where the others wait for a word of it in the store;
  // other faults must not have to wait for it.
  const bool is_late = fault.fault == "stop" || (fault.fault != "slow" && waits_in_store(fault.call));
  const TemporaryFolder folder;
  const Result result =
      serried({"run", "-n", std::to_string(fault.num_ranks), "--grace", "10", SERRIED_FAULT_WORKER, fault.call,
               fault.fault, fault.backend, std::to_string(fault.victim), std::to_string(fault.step),
               std::to_string(fault.delay_us), is_late ? "1500" : "15000"},
              {"FAULT_FOLDER=" + folder.path()});
  if (fault.fault == "slow" || (fault.fault == "memory" && result.exit_code == 0)) {
    expect_all_fine(fault, result);
  } else {
    expect_all_raised(fault, result);
  }
  if (fault.call.starts_with("checkpoint") && fault.step > 0) expect_whole_checkpoint(folder.path());
  EXPECT_EQ(count_of(result.out, "WRONG"), 0);
  // gloo cannot take back a call that waits for a stopped rank: its connections stay as long as the process.
  if (fault.backend != "gloo") EXPECT_EQ(count_of(result.out, "LEFT OPEN"), 0);
  EXPECT_EQ(count_of(result.err, "killing them"), 0);
  EXPECT_EQ(shared_memory_files(), before);
  if (::testing::Test::HasFailure()) std::cout << result.out << result.err << result.seconds << " s\n";
}

}  // namespace serried::testing
