// What models with parameters placed by hand send, beside the same with every pending sum reduced where it is made.
#include <gtest/gtest.h>

#include "serried/tensor/debug/comm_debug.h"
#include "tests/support/hand_placed.h"

namespace serried {
namespace {

using serried::testing::full;
using serried::testing::on_mesh;
namespace hand_placed = serried::testing::hand_placed;

struct Traffic {
  int64_t count = 0;
  int64_t bytes = 0;
  std::vector<at::Tensor> gradients;
  std::string report;
};

template <class Net>
Traffic traffic_of(const DeviceMesh& mesh, bool by_hand) {
  const auto net = hand_placed::make<Net>(mesh, by_hand);
  CommDebugMode comm;
  net->forward(hand_placed::batch(mesh)).square().mean().backward();
  Traffic traffic{.count = comm.count(), .bytes = comm.bytes(), .gradients = {}, .report = comm.report()};
  for (const at::Tensor& p : net->parameters()) traffic.gradients.push_back(full(p.grad()));
  return traffic;
}

template <class Net>
void expect_no_more_than_by_hand() {
  for (const int64_t ranks : {2, 4}) {
    on_mesh({ranks}, [&](const DeviceMesh& mesh) {
      const Traffic automatic = traffic_of<Net>(mesh, false);
      const Traffic by_hand = traffic_of<Net>(mesh, true);
      EXPECT_LE(automatic.bytes, by_hand.bytes) << automatic.report << by_hand.report;
      EXPECT_LE(automatic.count, by_hand.count);
      ASSERT_EQ(automatic.gradients.size(), by_hand.gradients.size());
      for (size_t i = 0; i < automatic.gradients.size(); ++i) {
        EXPECT_TRUE(at::allclose(automatic.gradients[i], by_hand.gradients[i], 1e-9, 1e-9)) << i;
      }
    });
  }
}

TEST(Traffic, OfAnMlpIsThatOfSumsReducedWhereTheyAreMade) {
  expect_no_more_than_by_hand<hand_placed::Mlp>();
}

TEST(Traffic, OfABlockIsThatOfSumsReducedWhereTheyAreMade) {
  expect_no_more_than_by_hand<hand_placed::Block>();
}

TEST(Traffic, OfAResidualTransformerIsThatOfSumsReducedWhereTheyAreMade) {
  expect_no_more_than_by_hand<hand_placed::Transformer>();
}

}  // namespace
}  // namespace serried
