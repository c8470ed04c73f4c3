// The line that says how far a command has come: its text, where it is drawn, and that it goes.
#include "tools/serried/progress.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include <chrono>

#include "serried/launch/fd.h"
#include "tests/process/command.h"

namespace serried::tools {
namespace {

using launch::Fd;
using std::chrono::seconds;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Progress, SaysWhatIsDoneAndWhatIsLeft) {
  EXPECT_EQ(progress_text("merging", 3, 12, seconds(4)), "merging 3/12 (25 %), 00:04, about 00:12 left");
  EXPECT_EQ(progress_text("merging", 0, 12, seconds(4)), "merging 0/12 (0 %), 00:04");
  EXPECT_EQ(progress_text("merging", 12, 12, seconds(4000)), "merging 12/12 (100 %), 1:06:40");
  EXPECT_EQ(progress_text("reading", 7, 0, seconds(61)), "reading 7, 01:01");
  EXPECT_EQ(progress_text("reading", 20, 10, seconds(1)), "reading 10/10 (100 %), 00:01");
}

TEST(Progress, TakesThreeWords) {
  EXPECT_EQ(Progress::mode_of("auto"), Progress::Mode::automatic);
  EXPECT_EQ(Progress::mode_of("always"), Progress::Mode::always);
  EXPECT_EQ(Progress::mode_of("never"), Progress::Mode::never);
  EXPECT_EQ(Progress::mode_of("loud"), std::nullopt);
}

TEST(Progress, OtherWordsAreRefused) {
  const testing::Result result = testing::serried({"run", "--progress=loud", "true"});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_EQ(result.err,
            "[serried] --progress: takes auto, always or never, not \"loud\"\n"
            "  fix: serried run --help lists the options\n");
}

TEST(Progress, TheWordBehindItIsTheProgram) {
  for (const char* option : {"--progress", "--no-progress", "--progress=never"}) {
    const testing::Result result = testing::serried({"run", option, "echo", "hello"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_EQ(result.out, "[rank 0] hello\n");
  }
}

std::string everything_in(const Fd& fd) {
  ::fcntl(fd.get(), F_SETFL, O_NONBLOCK);
  char buffer[65536];
  const ssize_t count = ::read(fd.get(), buffer, sizeof buffer);
  return {buffer, size_t(count < 0 ? 0 : count)};
}

bool has_come(const Fd& fd, int milliseconds) {
  pollfd entry{.fd = fd.get(), .events = POLLIN, .revents = 0};
  return ::poll(&entry, 1, milliseconds) > 0;
}

/// Everything that a progress of the mode draws on `write`, from its first drawing, for which it waits, to its end.
std::string drawn(Progress::Mode mode, const Fd& write, const Fd& read) {
  std::string text;
  {
    Progress progress("counting", 1000, mode, write.get(), seconds(3));
    progress.at(999, "item\x1b[2J");
    EXPECT_TRUE(has_come(read, 20'000));
    text = everything_in(read);
  }
  return text + everything_in(read);
}

TEST(Progress, WhatEndsSoonDrawsNothing) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd read(ends[0]);
  const Fd write(ends[1]);
  { const Progress progress("counting", 1000, Progress::Mode::always, write.get(), std::chrono::hours(1)); }
  EXPECT_EQ(everything_in(read), "");
}

TEST(Progress, APipeGetsLinesOnlyWhereTheyAreAskedFor) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Fd read(ends[0]);
  const Fd write(ends[1]);
  for (const Progress::Mode mode : {Progress::Mode::automatic, Progress::Mode::never}) {
    Progress progress("counting", 1000, mode, write.get());
    progress.at(999);
    EXPECT_FALSE(has_come(read, 700));
  }
  const std::string lines = drawn(Progress::Mode::always, write, read);
  EXPECT_THAT(lines, StartsWith("counting 999/1000 (99 %), 00:0"));
  EXPECT_THAT(lines, EndsWith(" left: item?[2J\n"));
}

TEST(Progress, ATerminalGetsOneLineThatIsGoneAtTheEnd) {
  const Fd master(::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(master);
  ASSERT_EQ(::grantpt(master.get()), 0);
  ASSERT_EQ(::unlockpt(master.get()), 0);
  const Fd terminal(::open(::ptsname(master.get()), O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal);
  const std::string line = drawn(Progress::Mode::automatic, terminal, master);
  EXPECT_THAT(line, StartsWith("\rcounting 999/1000 (99 %), 00:0"));
  EXPECT_THAT(line, HasSubstr(" left: item?[2J\x1b[K"));
  EXPECT_THAT(line, EndsWith("\r\x1b[K"));
  EXPECT_EQ(line.find('\n'), std::string::npos);
}

}  // namespace
}  // namespace serried::tools
