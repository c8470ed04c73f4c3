// The launcher's end of a line: numbers for questions, programs that follow each other, ranks that talk nonsense.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/socket.h>

#include "serried/base/channel/rank_line.h"
#include "serried/launch/lines.h"
#include "serried/launch/options.h"
#include "tests/process/command.h"

namespace serried::testing {
namespace {

using launch::Fd;
using launch::Lines;
using launch::Message;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class LaunchLines : public ::testing::Test {
 protected:
  LaunchLines() : said_(::open((folder_.path() + "/said").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {}

  void say(const Fd& end, const Message& message) const { say_bytes(end, launch::encode(message)); }
  void say_bytes(const Fd& end, const std::string& bytes) const {
    EXPECT_EQ(::send(end.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), ssize_t(bytes.size()));
  }

  std::vector<launch::Asked> turn() {
    std::vector<launch::Watch> watches;
    lines_.watch(watches);
    launch::poll_once(watches, launch::Clock::now());
    return lines_.take_asked();
  }

  // Whether the launcher has closed the line; what it said before is passed over.
  bool is_closed(const Fd& end) const {
    char bytes[4096];
    ssize_t count;
    while ((count = ::recv(end.get(), bytes, sizeof bytes, 0)) > 0) continue;
    return count == 0;
  }

  std::string said() {
    screen_.flush(launch::after(launch::Seconds(1)));
    return read_file(folder_.path() + "/said");
  }

  const TemporaryFolder folder_;
  const Fd said_;
  launch::Screen screen_{said_.get(), said_.get()};
  Lines lines_{screen_};
};

TEST_F(LaunchLines, AnswersGoToWhoAsked) {
  const Lines::Opened zero = lines_.open(0), one = lines_.open(1);
  for (const Lines::Opened* line : {&zero, &one}) {
    say(line->rank_end, {"begin"});
    say(line->rank_end, {"ask", "7.1", "get", "a"});
  }
  const std::vector<launch::Asked> asked = turn();
  ASSERT_EQ(asked.size(), 2);
  EXPECT_NE(asked[0].number, asked[1].number);
  EXPECT_THAT(asked[1].question, ElementsAre("0", "get", "a"));
  lines_.answer(asked[1].number, {"ok", "v"});
  lines_.answer(asked[1].number, {"ok", "again"});
  char bytes[100];
  std::string received(bytes, size_t(::recv(one.rank_end.get(), bytes, sizeof bytes, 0)));
  EXPECT_EQ(launch::decode(received), Message({"answer", "7.1", "ok", "v"}));
  EXPECT_EQ(received, "");
  EXPECT_EQ(::recv(zero.rank_end.get(), bytes, sizeof bytes, 0), -1);
}

TEST_F(LaunchLines, WhatARankSaidBeforeItEndedCountsAndWhatItAskedIsForgotten) {
  const Lines::Opened line = lines_.open(0);
  say(line.rank_end, {"begin"});
  say(line.rank_end, {"ask", "1", "set", "a", "b"});
  say(line.rank_end, {"ask", "2", "wait", "c"});
  say(line.rank_end, {"forget", "2"});
  lines_.close(line.line);
  const std::vector<launch::Asked> asked = turn();
  ASSERT_EQ(asked.size(), 4);
  EXPECT_THAT(asked[0].question, ElementsAre("0", "set", "a", "b"));
  EXPECT_THAT(asked[2].question, IsEmpty());
  EXPECT_EQ(asked[2].number, asked[1].number);
  EXPECT_THAT(asked[3].question, IsEmpty());
  EXPECT_TRUE(is_closed(line.rank_end));
}

TEST_F(LaunchLines, EachProgramOfARankHasAnotherSpace) {
  const Lines::Opened line = lines_.open(0);
  for (const char* id : {"1", "2"}) {
    say(line.rank_end, {"begin"});
    say(line.rank_end, {"ask", id, "count"});
  }
  const std::vector<launch::Asked> asked = turn();
  ASSERT_EQ(asked.size(), 2);
  EXPECT_THAT(asked[0].question, ElementsAre("0", "count"));
  EXPECT_THAT(asked[1].question, ElementsAre("1", "count"));
}

TEST_F(LaunchLines, WhoTalksNonsenseIsHungUpOnAndNamed) {
  const std::vector<std::string> nonsense = {
      launch::encode({"ask", "1", "count"}),  // before it has begun
      launch::encode({"begin"}) + launch::encode({"fly"}),
      launch::encode({"begin"}) + launch::encode({"ask", "1"}),
      launch::encode({"begin"}) + launch::encode({"ask", "1", "wait", "a"}) + launch::encode({"ask", "1", "count"}),
  };
  for (size_t rank = 0; rank < nonsense.size(); ++rank) {
    const Lines::Opened line = lines_.open(int(rank));
    say_bytes(line.rank_end, nonsense[rank]);
    turn();
    EXPECT_TRUE(is_closed(line.rank_end)) << rank;
    EXPECT_THAT(said(),
                HasSubstr("[run] rank " + std::to_string(rank) + " says what makes no sense: its line is closed"));
  }
  const Lines::Opened other = lines_.open(9);
  say_bytes(other.rank_end, "GET / HTTP/1.1\r\n");
  turn();
  EXPECT_TRUE(is_closed(other.rank_end));
}

TEST_F(LaunchLines, WhoAsksWithoutEndIsHungUpOn) {
  const Lines::Opened line = lines_.open(3);
  say(line.rank_end, {"begin"});
  size_t num_asked = 0;
  for (int i = 0; i < 5000; ++i) {
    const std::string bytes = launch::encode({"ask", std::to_string(i), "get", "never"});
    if (::send(line.rank_end.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) break;
    num_asked += turn().size();
  }
  EXPECT_EQ(num_asked, 2 * channel::kMostOpenQuestions);  // each is forgotten in the end
  EXPECT_TRUE(is_closed(line.rank_end));
  EXPECT_THAT(said(), HasSubstr("[run] rank 3 has more than 4096 questions open: its line is closed"));
}

TEST_F(LaunchLines, WhoDoesNotReadAnswersIsHungUpOn) {
  const Lines::Opened line = lines_.open(2);
  say(line.rank_end, {"begin"});
  const std::string long_value(8 << 20, 'x');
  for (int i = 0; i < 10; ++i) say(line.rank_end, {"ask", std::to_string(i), "get", "a"});
  for (const launch::Asked& asked : turn()) lines_.answer(asked.number, {"ok", long_value});
  EXPECT_TRUE(is_closed(line.rank_end));
  EXPECT_THAT(said(), HasSubstr("[run] rank 2 does not read the answers it asks for: its line is closed"));
}

}  // namespace
}  // namespace serried::testing
