// Addresses of this machine, as its kernel picks them.
#include "serried/comm/agree/host.h"

#include <gtest/gtest.h>

namespace serried::detail {
namespace {

TEST(Host, PacketsToLoopbackLeaveFromLoopback) {
  EXPECT_EQ(address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_TRUE(is_loopback(address_towards("127.0.1.1")));
  EXPECT_TRUE(is_loopback(address_towards("localhost")));
}

TEST(Host, ANameThatIsNobodysHasNoWay) {
  EXPECT_EQ(address_towards("nobody.invalid"), "");
}

TEST(Host, OnlyLoopbackIsLoopback) {
  EXPECT_TRUE(is_loopback("127.0.1.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_TRUE(is_loopback("::ffff:127.0.0.1"));
  EXPECT_FALSE(is_loopback("10.127.0.1"));
  EXPECT_FALSE(is_loopback("fe80::1"));
  EXPECT_FALSE(is_loopback(""));
}

}  // namespace
}  // namespace serried::detail
