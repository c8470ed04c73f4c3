// Lines through measured times, with intervals.
#pragma once

#include <vector>

#include "tools/serried/simulate/machine.h"

namespace serried::simulation {

/// What was measured at one size, several times.
struct Point {
  double x = 0;
  std::vector<double> times = {};
};

/// time = intercept + slope * x, neither below 0. Intervals hold nine of ten fits to samples drawn again from what was
/// measured.
struct Line {
  Fitted intercept;
  Fitted slope;
};

/// Through the medians of two points or more, by squares of relative errors: small times count as much as large ones.
/// Deterministic. SimulationError where there is no line.
Line fit_line(const std::vector<Point>& points);

/// The slope alone, whatever the intercept is: links let some bytes pass at once before they count.
Fitted fit_slope(const std::vector<Point>& points);

/// The median, and where nine of ten medians of samples drawn again lie.
Fitted fit_median(const std::vector<double>& times);

double median_of(std::vector<double> values);

/// Half of the distance between the values that leave a sixth of all below and above, by the median: of normally
/// distributed numbers the standard deviation by the mean, and some wild ones change little.
double relative_spread(std::vector<double> values);

}  // namespace serried::simulation
