// What a recorder learns from DistributedDataParallel that no op shows.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "tests/support/ignoring_recorder.h"
#include "tests/support/models.h"

namespace serried {
namespace {

using testing::models::Mlp;

class Listener final : public testing::IgnoringRecorder {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    ++num_calls[op.operator_name().name];
    tape::run_unrecorded(op, stack);
  }
  void rely_on(tape::Fact fact) override { facts_.push_back(std::move(fact)); }

  std::map<std::string, uint64_t> values() const {
    std::map<std::string, uint64_t> values;
    for (const tape::Fact& fact : facts_) values[fact.name] = fact.value();
    return values;
  }

  std::map<std::string, int> num_calls;

 private:
  std::vector<tape::Fact> facts_;
};

TEST(RecordableDdp, IsToldWhatChangesAStepWithoutAnOp) {
  run_ranks(2, [](const Group& group) {
    Listener told;
    {
      auto net = std::make_shared<Mlp>();
      DistributedDataParallel ddp(net, {.process_group = group});
      const auto step = [&] { Mlp::loss(ddp, group->getRank()).backward(); };
      step();
      {
        const tape::Scope scope(told);
        step();
      }
      const auto before = told.values();
      step();
      EXPECT_EQ(told.values(), before) << "buckets are rebuilt before the second forward, and stay";
      net->dropout->eval();
      EXPECT_NE(told.values(), before);
      net->dropout->train();
      EXPECT_EQ(told.values(), before);
      const double probability = net->dropout->options.p();
      net->dropout->options.p(0.875);
      EXPECT_NE(told.values(), before);
      net->dropout->options.p(probability);
      EXPECT_EQ(told.values(), before);
      {
        const auto guard = ddp.no_sync();
        EXPECT_NE(told.values(), before);
      }
      EXPECT_EQ(told.values(), before);
      ddp.set_process_group(group);
      EXPECT_NE(told.values(), before);
    }
    EXPECT_EQ(told.values().size(), 5u) << "may be asked when the module is gone";
  });
}

TEST(RecordableDdp, DoesNotSeeTheRebuildOfBuckets) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel ddp(std::make_shared<Mlp>(), {.process_group = group});
    const auto step = [&] { Mlp::loss(ddp, group->getRank()).backward(); };
    step();
    Listener told;
    const tape::Scope scope(told);
    step();
    EXPECT_TRUE(ddp.reducer().has_rebuilt_buckets());
    EXPECT_EQ(told.num_calls.count("serried::broadcast_"), 0u);
    const auto reduces = [](const auto& call) { return call.first.find("all_reduce") != std::string::npos; };
    EXPECT_TRUE(std::any_of(told.num_calls.begin(), told.num_calls.end(), reduces)) << "averaging is part of the step";
  });
}

}  // namespace
}  // namespace serried
