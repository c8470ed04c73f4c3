// Topics, rank prefixes and warnings.
#include "serried/base/log.h"

#include "serried/base/error.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using log::Topic;

std::string captured(const std::function<void()>& body) {
  ::testing::internal::CaptureStderr();
  body();
  return ::testing::internal::GetCapturedStderr();
}

class Log : public ::testing::Test {
 protected:
  void TearDown() override { log::set_topics("none"); }
};

TEST_F(Log, OnlyChosenTopicsArePrinted) {
  log::set_topics("comm,plan");
  EXPECT_TRUE(log::enabled(Topic::comm));
  EXPECT_TRUE(log::enabled(Topic::plan));
  EXPECT_FALSE(log::enabled(Topic::graph));
  ThreadRankLabel label({.rank = 2, .world_size = 4});
  EXPECT_EQ(captured([] { log::line(Topic::comm, "made group ", 7); }), "[serried rank 2/4 comm] made group 7\n");
  EXPECT_EQ(captured([] { log::line(Topic::graph, "unseen"); }), "");
}

TEST_F(Log, AllAndNoneNameEveryTopic) {
  log::set_topics("all");
  EXPECT_TRUE(log::enabled(Topic::checkpoint));
  log::set_topics("");
  EXPECT_FALSE(log::enabled(Topic::checkpoint));
}

TEST_F(Log, UnknownTopicListsTheKnownOnes) {
  EXPECT_EQ(testing::error_text<c10::ValueError>([] { log::set_topics("comm,speed"); }),
            "[log] unknown topic \"speed\"\n"
            "  fix: use all, none, or some of comm, launch, plan, dispatch, graph, checkpoint");
}

TEST_F(Log, AWarningIsPrintedOncePerText) {
  static int run = 0;  // the process remembers its warnings, also when tests are repeated
  const std::string text = c10::str("low on memory ", ++run);
  ThreadRankLabel label({.rank = 0, .world_size = 1});
  EXPECT_EQ(captured([&] {
              log::warn_once(text);
              log::warn_once(text);
            }),
            "[serried rank 0/1 warning] " + text + "\n");
}

}  // namespace
}  // namespace serried
