// `serried trace merge` as it is typed, with all the mistakes that can be made.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "tests/process/traces.h"

namespace serried::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::string refusal(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {"trace", "merge"});
  const Result result = serried(arguments);
  EXPECT_EQ(result.exit_code, 1) << result.err;
  EXPECT_EQ(result.out, "");
  return result.err;
}

size_t files_in(const TemporaryFolder& folder) {
  return size_t(
      std::distance(std::filesystem::directory_iterator(folder.path()), std::filesystem::directory_iterator()));
}

HandMade forward_of(int rank) {
  HandMade trace{.rank = rank};
  trace.add("forward", "forward", 0, 10);
  return trace;
}

TEST(TraceCommand, MergesIntoTheFolderAndSaysWhereTheTimeWent) {
  const TemporaryFolder folder;
  forward_of(0).write_to(folder);
  forward_of(1).write_to(folder);
  const Result result = serried({"trace", "merge", folder.path()});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.err, "");
  EXPECT_THAT(result.out, AllOf(StartsWith("rank   time  forward"),
                                HasSubstr("\nwritten: " + folder.path() + "/trace.json   open it at ")));
  EXPECT_EQ(of_kind(events_of(folder.path() + "/trace.json"), "X").size(), 2U);
}

TEST(TraceCommand, TakesFilesAndAnOutput) {
  const TemporaryFolder folder, other;
  const std::string first = forward_of(0).write_to(folder);
  const std::string second = forward_of(1).write_to(other);
  const std::string output = other.path() + "/all.json";
  EXPECT_EQ(serried({"trace", "merge", first, second, "-o", output}).exit_code, 0);
  EXPECT_EQ(of_kind(events_of(output), "X").size(), 2U);
  EXPECT_EQ(files_in(folder), 1U);
}

TEST(TraceCommand, WritesToAPipe) {
  const TemporaryFolder folder;
  forward_of(0).write_to(folder);
  EXPECT_THAT(serried({"trace", "merge", folder.path(), "-o", "/dev/stdout"}).out, HasSubstr("\"traceEvents\":["));
}

TEST(TraceCommand, HasHelp) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"trace"}, {"trace", "--help"}, {"trace", "merge", "--help"}}) {
    const Result result = serried(arguments);
    EXPECT_EQ(result.exit_code, 0);
    EXPECT_THAT(result.out, HasSubstr("Usage: serried trace "));
  }
  EXPECT_THAT(serried({"trace", "merge", "--help"}).out,
              AllOf(HasSubstr("Usage: serried trace merge [OPTIONS] DIR..."), HasSubstr("--output"),
                    HasSubstr("SERRIED_TRACE=traces serried run -n 4")));
  EXPECT_THAT(serried({}).out, HasSubstr("trace "));
}

TEST(TraceCommand, MistakesInOptionsExitWith2) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"trace", "merge"},
                                                    {"trace", "split"},
                                                    {"trace", "merge", "--bogus", "x"},
                                                    {"trace", "merge", "--progress=loud", "x"}}) {
    const Result result = serried(arguments);
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_THAT(result.err, AllOf(StartsWith("[serried] "), HasSubstr("\n  fix: serried trace merge --help")));
  }
}

TEST(TraceCommand, SaysWhatIsMissing) {
  const TemporaryFolder folder;
  EXPECT_EQ(refusal({"/no/such/folder"}),
            "[trace] there is no \"/no/such/folder\"\n"
            "  fix: pass the folder that SERRIED_TRACE named, or files in it\n");
  EXPECT_EQ(refusal({"/dev/null"}),
            "[trace] \"/dev/null\" is no file, and traces are read twice\n  fix: write it to a file first\n");
  EXPECT_EQ(refusal({folder.path()}), "[trace] there are no traces in \"" + folder.path() +
                                          "\"\n  fix: run the job with SERRIED_TRACE=" + folder.path() +
                                          ", then merge\n");
  write_file(folder.path() + "/other.json", "[]");
  EXPECT_EQ(refusal({folder.path()}), "[trace] there are no traces in \"" + folder.path() +
                                          "\"\n  fix: run the job with SERRIED_TRACE=" + folder.path() +
                                          ", then merge\n");
  EXPECT_EQ(refusal({folder.path() + "/other.json"}),
            "[trace] \"" + folder.path() +
                "/other.json\" is not a trace that serried wrote\n"
                "  fix: pass files that SERRIED_TRACE=<folder> or trace::write made\n");
  EXPECT_EQ(files_in(folder), 1U);
}

TEST(TraceCommand, FilesOfOneRankOrOfSeveralJobsAreNotMixed) {
  const TemporaryFolder folder;
  const std::string first = forward_of(0).write_to(folder);
  const std::string copy = folder.path() + "/rank_0_copy.json";
  write_file(copy, forward_of(0).text());
  const std::string fix = "  fix: merge the files of one job: remove what another one has left\n";
  EXPECT_EQ(refusal({folder.path()}), "[trace] rank 0 is in both \"" + first + "\" and \"" + copy + "\"\n" + fix);
  HandMade other = forward_of(1);
  other.job = "job/1";
  write_file(copy, other.text());
  EXPECT_EQ(refusal({folder.path()}), "[trace] \"" + first + "\" and \"" + copy + "\" are of different jobs\n" + fix);
  EXPECT_EQ(files_in(folder), 2U);
}

TEST(TraceCommand, DoesNotWriteOverWhatItReads) {
  const TemporaryFolder folder;
  const std::string first = forward_of(0).write_to(folder);
  const std::string before = read_file(first);
  EXPECT_EQ(refusal({folder.path(), "-o", first}),
            "[trace] the output \"" + first + "\" is one of the inputs\n  fix: choose another output\n");
  EXPECT_EQ(read_file(first), before);
  EXPECT_EQ(serried({"trace", "merge", folder.path()}).exit_code, 0);
  const std::string merged = folder.path() + "/trace.json";
  EXPECT_EQ(refusal({merged, "-o", folder.path() + "/again.json"}),
            "[trace] \"" + merged + "\" is merged already\n  fix: pass the files that it was made of\n");
}

TEST(TraceCommand, SaysWhyItCannotWrite) {
  const TemporaryFolder folder;
  forward_of(0).write_to(folder);
  const std::string fix = "  fix: pass a path in a folder that exists and is writable\n";
  EXPECT_EQ(refusal({folder.path(), "-o", "/no/such/folder/t.json"}),
            "[trace] cannot write \"/no/such/folder/t.json\": No such file or directory\n" + fix);
  EXPECT_EQ(refusal({folder.path(), "-o", folder.path()}),
            "[trace] cannot write \"" + folder.path() + "\": Is a directory\n" + fix);
  EXPECT_EQ(refusal({folder.path(), "-o", "/dev/full"}),
            "[trace] cannot write \"/dev/full\": No space left on device\n" + fix);
  EXPECT_EQ(files_in(folder), 1U);
}

}  // namespace
}  // namespace serried::testing
