// When silence counts, by numbers.
#include "serried/launch/pulse.h"

#include <gtest/gtest.h>

namespace serried::launch {
namespace {

Time at(double seconds) {
  return Time() + std::chrono::duration_cast<Clock::duration>(Seconds(seconds));
}

void look_until(Pulse& pulse, double from, double to) {
  for (double t = from; t <= to; t += 0.5) pulse.look(at(t));
}

TEST(LaunchPulse, SilenceOfTheGivenLengthIsALoss) {
  Pulse pulse(Seconds(10), at(0));
  look_until(pulse, 0, 3);
  pulse.heard(at(3));
  look_until(pulse, 3, 12.5);
  EXPECT_FALSE(pulse.is_lost(at(12.9)));
  EXPECT_TRUE(pulse.is_lost(at(13)));
}

TEST(LaunchPulse, BeatsGoOutEveryHalfSecond) {
  Pulse pulse(Seconds(10), at(0));
  EXPECT_TRUE(pulse.takes_beat(at(0)));
  EXPECT_FALSE(pulse.takes_beat(at(0.4)));
  EXPECT_EQ(pulse.deadline(), at(0.5));
  EXPECT_TRUE(pulse.takes_beat(at(0.6)));
}

TEST(LaunchPulse, WhoStoodStillItselfBlamesNobody) {
  Pulse pulse(Seconds(10), at(0));
  look_until(pulse, 0, 2);
  pulse.look(at(60));  // was frozen for 58 s
  EXPECT_FALSE(pulse.is_lost(at(60)));
  look_until(pulse, 60, 67.5);
  EXPECT_FALSE(pulse.is_lost(at(67.5)));
  EXPECT_TRUE(pulse.is_lost(at(68)));
}

TEST(LaunchPulse, WhoSaysThatItIsStoppedMayBeSilent) {
  Pulse pulse(Seconds(10), at(0));
  pulse.pause();
  look_until(pulse, 0, 60);
  EXPECT_FALSE(pulse.is_lost(at(60)));
  pulse.heard(at(60));
  look_until(pulse, 60, 70);
  EXPECT_TRUE(pulse.is_lost(at(70)));
}

}  // namespace
}  // namespace serried::launch
