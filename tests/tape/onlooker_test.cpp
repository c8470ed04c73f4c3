// Onlookers see ops before who records, and are no recording by themselves.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tape/recorder.h"
#include "serried/tape/state_update.h"
#include "tests/support/ignoring_recorder.h"

namespace serried {
namespace {

struct Counting final : testing::IgnoringRecorder {
  explicit Counting(tape::Recorder* behind_ = nullptr, bool replays_ = true) : next(behind_), is_replaying(replays_) {}
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    ++ops;
    const tape::Aside aside(next);
    tape::run(op, stack);
  }
  tape::Recorder* behind() const override { return next; }
  bool replays() const override { return next != nullptr ? next->replays() : is_replaying; }
  tape::Recorder* next;
  bool is_replaying;
  int ops = 0;
};

TEST(Onlooker, SeesEveryOpBeforeTheRecorderBehindIt) {
  const at::Tensor x = at::ones({2});
  Counting recorder;
  const tape::Scope recording(recorder);
  Counting onlooker(&recorder);
  {
    const tape::OnlookerScope scope(onlooker);
    EXPECT_TRUE(x.add(1).mul(3).eq(6).all().item<bool>());
    EXPECT_EQ(tape::current_recorder(), &recorder);
    EXPECT_TRUE(tape::is_replayed());
    EXPECT_GE(onlooker.ops, 2);
    EXPECT_EQ(onlooker.ops, recorder.ops);
  }
  const int seen = onlooker.ops;
  x.sin();
  EXPECT_EQ(onlooker.ops, seen);
  EXPECT_GT(recorder.ops, seen);
}

TEST(Onlooker, AloneIsNoRecording) {
  EXPECT_FALSE(tape::is_replayed());
  Counting onlooker(nullptr, false);
  const tape::OnlookerScope scope(onlooker);
  EXPECT_TRUE(tape::is_recording());
  EXPECT_FALSE(tape::is_replayed());
  at::ones({2}).sin();
  EXPECT_GE(onlooker.ops, 2);
}

TEST(StateUpdate, Nests) {
  EXPECT_FALSE(tape::StateUpdate::is_active());
  {
    const tape::StateUpdate outer;
    { const tape::StateUpdate inner; }
    EXPECT_TRUE(tape::StateUpdate::is_active());
  }
  EXPECT_FALSE(tape::StateUpdate::is_active());
}

}  // namespace
}  // namespace serried
