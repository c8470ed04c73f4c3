// What captured steps of models with parameters placed by hand send: what eager ones do, at most.
#include <gtest/gtest.h>

#include "serried/graph/capture.h"
#include "serried/tensor/debug/comm_debug.h"
#include "tests/support/hand_placed.h"

namespace serried {
namespace {

namespace hand_placed = serried::testing::hand_placed;

template <class Net>
void expect_captured_sends_no_more() {
  testing::on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = hand_placed::batch(mesh);
    const auto step_of = [&](const std::shared_ptr<Net>& net) {
      return [net](const at::Tensor& x) {
        net->zero_grad();
        const at::Tensor loss = net->forward(x).square().mean();
        loss.backward();
        return loss;
      };
    };
    const auto by_hand = step_of(hand_placed::make<Net>(mesh, true));
    auto captured = capture(step_of(hand_placed::make<Net>(mesh, false)));
    while (captured.replays() == 0) captured(x);
    CommDebugMode eager_traffic;
    const at::Tensor expected = by_hand(x);
    const int64_t bytes = eager_traffic.bytes(), count = eager_traffic.count();
    CommDebugMode traffic;
    const at::Tensor loss = captured(x);
    EXPECT_EQ(captured.captures(), 1);
    EXPECT_GT(traffic.count(), 0);
    EXPECT_LE(traffic.bytes(), bytes);
    EXPECT_LE(traffic.count(), count);
    EXPECT_TRUE(at::allclose(testing::full(loss), testing::full(expected), 1e-9, 1e-9));
  });
}

TEST(CapturedTraffic, OfAnMlpIsNoMoreThanByHand) {
  expect_captured_sends_no_more<hand_placed::Mlp>();
}

TEST(CapturedTraffic, OfABlockIsNoMoreThanByHand) {
  expect_captured_sends_no_more<hand_placed::Block>();
}

TEST(CapturedTraffic, OfAResidualTransformerIsNoMoreThanByHand) {
  expect_captured_sends_no_more<hand_placed::Transformer>();
}

}  // namespace
}  // namespace serried
