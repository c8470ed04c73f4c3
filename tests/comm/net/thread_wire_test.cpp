// What the wire between threads does to order, so that tests can lose a peer.
#include "tests/support/thread_wire.h"

#include <gtest/gtest.h>

namespace serried::testing {
namespace {

using net::Transfer;
using State = net::Transfer::State;

TEST(ThreadWire, DiesAsAKilledProcessDoes) {
  Transfer receive, large;
  const auto wires = make_thread_wires(2);
  char byte = 0;
  const std::string bytes(1 << 20, 'x');
  wires[0]->receive(receive, 1, 7, &byte, 1);
  wires[0]->send(large, 1, 7, bytes.data(), bytes.size());
  wires[1]->die();
  EXPECT_TRUE(wires[0]->progress());
  EXPECT_EQ(receive.error, "rank 1 is lost: connection reset");
  EXPECT_EQ(large.error, "rank 1 is lost: connection reset");
}

TEST(ThreadWire, FreezesUntilItIsGivenUp) {
  Transfer receive, sent;
  const auto wires = make_thread_wires(2);
  char byte = 'x';
  wires[0]->receive(receive, 1, 7, &byte, 1);
  wires[1]->freeze();
  wires[1]->send(sent, 0, 7, &byte, 1);
  EXPECT_FALSE(wires[0]->progress());
  EXPECT_TRUE(wires[0]->arm());
  EXPECT_FALSE(receive.ended());
  wires[0]->give_up(1, "a test");
  EXPECT_EQ(receive.state, State::failed);
}

}  // namespace
}  // namespace serried::testing
