// Weighted least squares of medians, and the same of samples drawn again.
#include "tools/serried/simulate/fit.h"

#include <algorithm>
#include <random>
#include <utility>

#include "tools/serried/simulate/error.h"

namespace serried::simulation {
namespace {

constexpr int kDraws = 400;

double quantile(std::vector<double> values, double share) {
  std::sort(values.begin(), values.end());
  return values[size_t(share * double(values.size() - 1) + 0.5)];
}

using Points = std::vector<std::pair<double, double>>;

// Intercept and slope.
std::pair<double, double> free_line_through(const Points& points) {
  double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
  for (const auto& [x, y] : points) {
    const double weight = 1 / std::max(y * y, 1e-12);
    w += weight, wx += weight * x, wy += weight * y, wxx += weight * x * x, wxy += weight * x * y;
  }
  const double determinant = w * wxx - wx * wx;
  const double slope = (w * wxy - wx * wy) / determinant;
  return {(wy - slope * wx) / w, slope};
}

// One that would be below 0 is 0, and the line goes as near as it can with the other.
std::pair<double, double> line_through(const Points& points) {
  const auto [intercept, slope] = free_line_through(points);
  if (intercept >= 0 && slope >= 0) return {intercept, slope};
  double w = 0, wy = 0, wxx = 0, wxy = 0;
  for (const auto& [x, y] : points) {
    const double weight = 1 / std::max(y * y, 1e-12);
    w += weight, wy += weight * y, wxx += weight * x * x, wxy += weight * x * y;
  }
  if (slope < 0) return {wy / w, 0};
  return {0, wxy / wxx};
}

double median_of_draw(const std::vector<double>& times, std::mt19937& random) {
  std::vector<double> drawn;
  for (size_t i = 0; i < times.size(); ++i) drawn.push_back(times[random() % times.size()]);
  return median_of(std::move(drawn));
}

Points medians_of_draw(const std::vector<Point>& points, std::mt19937& random) {
  Points medians;
  for (const Point& point : points) medians.emplace_back(point.x, median_of_draw(point.times, random));
  return medians;
}

// SimulationError where no line goes through them.
Points medians_of(const std::vector<Point>& points) {
  Points medians;
  for (const Point& point : points) {
    if (!point.times.empty()) medians.emplace_back(point.x, median_of(point.times));
  }
  const bool has_two = std::any_of(medians.begin(), medians.end(),
                                   [&](const auto& point) { return point.first != medians.front().first; });
  if (has_two && medians.size() == points.size()) return medians;
  throw SimulationError("there is no line through what was measured at " + std::to_string(medians.size()) + " sizes",
                        "measure two sizes or more, each at least once");
}

Fitted with_interval(double value, const std::vector<double>& draws) {
  return {value, std::min(value, quantile(draws, 0.05)), std::max(value, quantile(draws, 0.95))};
}

}  // namespace

double median_of(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

Fitted fit_median(const std::vector<double>& times) {
  if (times.empty()) throw SimulationError("nothing was measured", "measure it once or more");
  std::mt19937 random(1);
  std::vector<double> medians;
  for (int draw = 0; draw < kDraws; ++draw) medians.push_back(median_of_draw(times, random));
  return with_interval(median_of(times), medians);
}

double relative_spread(std::vector<double> values) {
  const double median = median_of(values);
  if (values.size() < 3 || median <= 0) return 0;
  return (quantile(values, 0.841) - quantile(values, 0.159)) / 2 / median;
}

Line fit_line(const std::vector<Point>& points) {
  const auto [intercept, slope] = line_through(medians_of(points));
  std::mt19937 random(1);
  std::vector<double> intercepts, slopes;
  for (int draw = 0; draw < kDraws; ++draw) {
    const auto [drawn_intercept, drawn_slope] = line_through(medians_of_draw(points, random));
    intercepts.push_back(drawn_intercept);
    slopes.push_back(drawn_slope);
  }
  return {with_interval(intercept, intercepts), with_interval(slope, slopes)};
}

Fitted fit_slope(const std::vector<Point>& points) {
  const double slope = free_line_through(medians_of(points)).second;
  std::mt19937 random(1);
  std::vector<double> slopes;
  for (int draw = 0; draw < kDraws; ++draw) {
    slopes.push_back(std::max(0.0, free_line_through(medians_of_draw(points, random)).second));
  }
  return with_interval(std::max(0.0, slope), slopes);
}

}  // namespace serried::simulation
