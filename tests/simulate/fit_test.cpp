// Lines through times of which the truth is known.
#include "tools/serried/simulate/fit.h"

#include <gtest/gtest.h>

#include <random>

#include "tests/simulate/machines.h"

namespace serried::simulation {
namespace {

std::vector<Point> points_of(double intercept, double slope, double noise, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<Point> points;
  for (const double x : {1e3, 1e4, 1e5, 1e6}) {
    points.push_back({.x = x});
    for (int i = 0; i < 31; ++i) points.back().times.push_back((intercept + slope * x) * (1 + noise * normal(random)));
  }
  return points;
}

TEST(Fit, FindsTheLineThatIsThere) {
  const Line line = fit_line(points_of(20, 0.008, 0));
  EXPECT_NEAR(line.intercept.value, 20, 1e-6);
  EXPECT_NEAR(line.slope.value, 0.008, 1e-9);
  EXPECT_NEAR(line.intercept.low, 20, 1e-6);
  EXPECT_NEAR(line.slope.high, 0.008, 1e-9);
}

TEST(Fit, IntervalsHoldTheTruthAsOftenAsTheySay) {
  int held = 0;
  for (unsigned seed = 0; seed < 100; ++seed) {
    const Line line = fit_line(points_of(20, 0.008, 0.1, seed));
    held += line.slope.low <= 0.008 && 0.008 <= line.slope.high ? 1 : 0;
    EXPECT_LE(line.slope.low, line.slope.value);
    EXPECT_LE(line.slope.value, line.slope.high);
  }
  EXPECT_GE(held, 75);
}

TEST(Fit, SomeWildTimesChangeLittle) {
  std::vector<Point> points = points_of(20, 0.008, 0.02);
  for (Point& point : points) {
    for (size_t i = 0; i < 6; ++i) point.times[5 * i] *= 10;
  }
  const Line line = fit_line(points);
  EXPECT_NEAR(line.slope.value / 0.008, 1, 0.05);
  EXPECT_NEAR(line.intercept.value / 20, 1, 0.1);
}

TEST(Fit, NothingIsBelowZero) {
  const Line falling = fit_line({{.x = 1, .times = {10}}, {.x = 100, .times = {5}}});
  EXPECT_EQ(falling.slope.value, 0);
  EXPECT_GE(falling.intercept.value, 5);
  const Line steep = fit_line({{.x = 10, .times = {1}}, {.x = 20, .times = {4}}});
  EXPECT_EQ(steep.intercept.value, 0);
  EXPECT_GT(steep.slope.value, 0.1);
}

TEST(Fit, SpreadIsTheDeviationByTheMean) {
  const std::vector<Point> points = points_of(1000, 0, 0.05, 3);
  std::vector<double> all;
  for (const Point& point : points) all.insert(all.end(), point.times.begin(), point.times.end());
  EXPECT_NEAR(relative_spread(all), 0.05, 0.015);
  EXPECT_EQ(relative_spread({5, 5, 5, 5}), 0);
  EXPECT_EQ(relative_spread({}), 0);
}

TEST(Fit, SlopesAreRightThoughSomeBytesPassAtOnce) {
  std::vector<Point> points;
  for (const double x : {1e5, 4e5, 1e6, 2e6}) points.push_back({.x = x, .times = {0.016 * (x - 6e4)}});
  EXPECT_NEAR(fit_slope(points).value, 0.016, 1e-9);
  EXPECT_LT(fit_line(points).slope.value, 0.016);
  EXPECT_EQ(fit_slope({{.x = 1, .times = {10}}, {.x = 100, .times = {5}}}).value, 0);
}

TEST(Fit, MediansHaveIntervalsToo) {
  const Fitted median = fit_median({9, 10, 10, 11, 12, 10, 9, 500});
  EXPECT_EQ(median.value, 10);
  EXPECT_GE(median.low, 9);
  EXPECT_LE(median.high, 12);
  EXPECT_EQ(fit_median({7, 7, 7}), Fitted::exactly(7));
  EXPECT_EQ(error_of([] { fit_median({}); }), "nothing was measured\n  fix: measure it once or more");
}

TEST(Fit, OnePointIsNoLine) {
  EXPECT_EQ(
      error_of([] {
        fit_line({{.x = 1, .times = {1, 2}}});
      }),
      "there is no line through what was measured at 1 sizes\n  fix: measure two sizes or more, each at least once");
  EXPECT_NE(error_of([] { fit_line({{.x = 1, .times = {1}}, {.x = 1, .times = {2}}}); }), "");
  EXPECT_NE(error_of([] { fit_line({}); }), "");
}

}  // namespace
}  // namespace serried::simulation
