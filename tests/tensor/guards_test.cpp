// Guards restore what was before.
#include "serried/tensor/guards.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>

namespace serried {
namespace {

TEST(Guards, ImplicitReplicationNestsAndRestores) {
  EXPECT_FALSE(ImplicitReplication::is_enabled());
  {
    const ImplicitReplication outer;
    {
      const ImplicitReplication inner;
      EXPECT_TRUE(ImplicitReplication::is_enabled());
    }
    EXPECT_TRUE(ImplicitReplication::is_enabled()) << "the inner scope does not turn the outer one off";
    {
      const ImplicitReplication off(false);
      EXPECT_FALSE(ImplicitReplication::is_enabled());
    }
    EXPECT_TRUE(ImplicitReplication::is_enabled());
  }
  EXPECT_FALSE(ImplicitReplication::is_enabled());
}

TEST(Guards, AnExceptionRestores) {
  try {
    const ImplicitReplication guard;
    const ExplicitRedistribution other;
    throw std::runtime_error("out of the scope");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(ImplicitReplication::is_enabled());
  EXPECT_EQ(ExplicitRedistribution::current().mode, HiddenCommunication::allow);
}

TEST(Guards, ExplicitRedistributionNestsAndRestores) {
  EXPECT_EQ(ExplicitRedistribution::current().mode, HiddenCommunication::allow);
  const ExplicitRedistribution outer;
  EXPECT_EQ(ExplicitRedistribution::current().mode, HiddenCommunication::forbid);
  {
    const ExplicitRedistribution inner({.mode = HiddenCommunication::warn, .strict = true});
    EXPECT_EQ(ExplicitRedistribution::current().mode, HiddenCommunication::warn);
    EXPECT_TRUE(ExplicitRedistribution::current().strict);
  }
  EXPECT_EQ(ExplicitRedistribution::current().mode, HiddenCommunication::forbid);
  EXPECT_FALSE(ExplicitRedistribution::current().strict);
}

TEST(Guards, AreOfTheirThread) {
  const ImplicitReplication guard;
  bool elsewhere = true;
  std::thread([&] { elsewhere = ImplicitReplication::is_enabled(); }).join();
  EXPECT_FALSE(elsewhere);
}

}  // namespace
}  // namespace serried
