// Who records a thread is told what the thread says, and only while it is recorded.
#include "serried/tape/tape.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <thread>

#include "tests/support/errors.h"
#include "tests/support/ignoring_recorder.h"

namespace serried {
namespace {

using Told = std::vector<std::string>;

class ListingRecorder final : public testing::IgnoringRecorder {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    told.push_back(op.operator_name().name);
    tape::run_unrecorded(op, stack);
  }
  void rely_on(tape::Fact fact) override { told.push_back("fact " + fact.name); }
  void rely_on_life(const std::string& name, std::weak_ptr<const void>) override { told.push_back("life " + name); }
  void before_replay(std::function<void()>) override { told.push_back("before"); }
  void after_replay(std::function<void()>) override { told.push_back("after"); }

  int64_t count(const std::string& what) const { return std::count(told.begin(), told.end(), what); }

  Told told;
};

void say_all() {
  tape::rely_on({.name = "mode", .value = [] { return uint64_t(1); }});
  tape::rely_on_life("mesh", std::make_shared<int>(1));
  tape::before_replay([] {});
  tape::after_replay([] {});
}

at::Tensor run_neg(const at::Tensor& x) {
  torch::jit::Stack stack = {x};
  tape::run(c10::Dispatcher::singleton().findSchemaOrThrow("aten::neg", ""), stack);
  return stack.at(0).toTensor();
}

TEST(Tape, TellsTheRecorderOfItsThread) {
  ListingRecorder recorder;
  {
    const tape::Scope scope(recorder);
    EXPECT_TRUE(tape::is_recording());
    say_all();
    std::thread([] {
      EXPECT_FALSE(tape::is_recording());
      say_all();
    }).join();
  }
  EXPECT_EQ(recorder.told, Told({"fact mode", "life mesh", "before", "after"}));
}

TEST(Tape, SaysNothingWhereNobodyRecords) {
  EXPECT_FALSE(tape::is_recording());
  say_all();
  EXPECT_EQ(run_neg(at::ones({2})).sum().item<double>(), -2);
}

TEST(Tape, ShowsOpsThatRunBelowTheDispatcherOnce) {
  ListingRecorder recorder;
  const at::Tensor x = at::ones({2});
  at::Tensor y;
  {
    const tape::Scope scope(recorder);
    y = run_neg(x);
  }
  EXPECT_EQ(recorder.told, Told({"aten::neg"}));
  EXPECT_EQ(y.sum().item<double>(), -2);
}

TEST(Tape, PausedOpsAreNoPartOfIt) {
  ListingRecorder recorder;
  const tape::Scope scope(recorder);
  const at::Tensor x = at::ones({2});
  recorder.told.clear();
  {
    const tape::Pause pause;
    EXPECT_FALSE(tape::is_recording());
    EXPECT_EQ((x * x).sum().item<double>(), 2);
    const tape::Pause nested;
    say_all();
  }
  EXPECT_EQ(recorder.told, Told());
  EXPECT_EQ(tape::current_recorder(), &recorder);
  (x * x).sum();
  EXPECT_EQ(recorder.count("aten::mul"), 1);
}

TEST(Tape, OneRecorderAtATime) {
  ListingRecorder recorder;
  const tape::Scope scope(recorder);
  EXPECT_EQ(testing::error_text<c10::ValueError>([&] { const tape::Scope second(recorder); }),
            "[tape::Scope] this thread is being recorded already\n"
            "  fix: end the other scope first");
  EXPECT_EQ(tape::current_recorder(), &recorder);
}

}  // namespace
}  // namespace serried
