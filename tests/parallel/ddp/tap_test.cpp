// What a tap learns from DistributedDataParallel that no op shows.
#include <gtest/gtest.h>

#include <map>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/tensor/dispatch/local_ops.h"
#include "tests/support/models.h"

namespace serried {
namespace {

using testing::models::Mlp;

class Listener final : public LocalOpTap {
 public:
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    ++num_calls[op.operator_name().name];
    run_untapped(op, stack);
  }
  void meet(c10::TensorImpl*) override {}
  void rely_on(Witness witness) override { witnesses_.push_back(std::move(witness)); }
  void rely_on_life(const std::string&, std::weak_ptr<const void>) override {}
  void before_replay(std::function<void()>) override {}
  void after_replay(std::function<void()>) override {}

  std::map<std::string, uint64_t> values() const {
    std::map<std::string, uint64_t> values;
    for (const Witness& witness : witnesses_) values[witness.name] = witness.value();
    return values;
  }

  std::map<std::string, int> num_calls;

 private:
  std::vector<Witness> witnesses_;
};

TEST(DdpTap, IsToldWhatChangesAStepWithoutAnOp) {
  run_ranks(2, [](const Group& group) {
    Listener told;
    {
      auto net = std::make_shared<Mlp>();
      DistributedDataParallel ddp(net, {.process_group = group});
      const auto step = [&] { Mlp::loss(ddp, group->getRank()).backward(); };
      step();
      {
        const TapGuard guard(told);
        step();
      }
      const auto before = told.values();
      step();
      EXPECT_EQ(told.values(), before) << "buckets are rebuilt before the second forward, and stay";
      net->dropout->eval();
      EXPECT_NE(told.values(), before);
      net->dropout->train();
      EXPECT_EQ(told.values(), before);
      {
        const auto guard = ddp.no_sync();
        EXPECT_NE(told.values(), before);
      }
      EXPECT_EQ(told.values(), before);
      ddp.set_process_group(group);
      EXPECT_NE(told.values(), before);
    }
    EXPECT_EQ(told.values().size(), 3u) << "may be asked when the module is gone";
  });
}

TEST(DdpTap, DoesNotSeeTheRebuildOfBuckets) {
  run_ranks(2, [](const Group& group) {
    DistributedDataParallel ddp(std::make_shared<Mlp>(), {.process_group = group});
    const auto step = [&] { Mlp::loss(ddp, group->getRank()).backward(); };
    step();
    Listener told;
    const TapGuard guard(told);
    step();
    EXPECT_TRUE(ddp.reducer().has_rebuilt_buckets());
    EXPECT_EQ(told.num_calls.count("serried::broadcast_"), 0u);
    EXPECT_GT(told.num_calls["c10d::allreduce_"], 0) << "averaging is part of the step";
  });
}

}  // namespace
}  // namespace serried
