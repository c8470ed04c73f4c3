// Collectives of several sizes, and the lines through their times that the steps of simulate/collective.cpp give.
#include "tools/serried/calibrate.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "serried/comm/collectives/collectives.h"
#include "serried/mesh/mesh.h"
#include "tools/serried/simulate/fit.h"

namespace serried::tools {
namespace {

using simulation::Fitted;
using simulation::Line;
using simulation::Point;

template <class Call>
double us_of(const Call& call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

// Several short ones are one measurement: what a link lets pass at once after a pause counts for little then.
int64_t calls_in_a_row(double us) {
  return std::clamp(int64_t(20e3 / std::max(us, 1.0)), int64_t(1), int64_t(50));
}

Fitted times(const Fitted& number, double factor) {
  return {number.value * factor, number.low * factor, number.high * factor};
}

// Microseconds per byte as nanoseconds.
Fitted per_byte(const Fitted& slope, double bytes_per_x) {
  return times(slope, 1e3 / bytes_per_x);
}

class Calibration {
 public:
  Calibration(const Group& world, const CalibrateOptions& options)
      : world_(world),
        options_(options),
        num_hosts_(world->getSize() / options.ranks_per_host),
        mesh_(init_device_mesh("cpu", {num_hosts_, options.ranks_per_host}, {"host", "local"}, {.group = world})) {}

  simulation::Machine run() {
    machine_.ranks_per_host = options_.ranks_per_host;
    machine_.compute = computing();
    machine_.jitter_sigma = jitter();
    measure_memory();
    measure_link();
    return machine_;
  }

 private:
  /// Of all ranks, the slowest: a step lasts as long as its last rank.
  double slowest(double us) const {
    const at::Tensor time = at::full({1}, us, at::kDouble);
    all_reduce_(time, world_, c10d::ReduceOp::MAX);
    return time.item<double>();
  }

  /// All ranks measure at once, size by size in turns, so that what disturbs a while disturbs all sizes.
  std::vector<Point> measure(const std::vector<int64_t>& sizes,
                             const std::function<std::function<void()>(int64_t)>& make) const {
    std::vector<Point> points;
    std::vector<std::function<void()>> calls;
    for (const int64_t size : sizes) {
      points.push_back({.x = double(size)});
      calls.push_back(make(size));
      for (int i = 0; i < 3; ++i) calls.back()();
    }
    std::vector<int64_t> in_a_row;
    for (const auto& call : calls) in_a_row.push_back(calls_in_a_row(slowest(us_of(call))));
    for (int round = 0; round < options_.rounds; ++round) {
      for (size_t i = 0; i < sizes.size(); ++i) {
        barrier(world_);
        const double us = us_of([&] {
          for (int64_t k = 0; k < in_a_row[i]; ++k) calls[i]();
        });
        points[i].times.push_back(slowest(us) / double(in_a_row[i]));
      }
    }
    return points;
  }

  /// An op by itself; a product of matrices, which computes; a sum, which moves.
  simulation::Compute computing() const {
    const Line small = fit_line(measure({16, 64}, [](int64_t size) {
      return [x = at::ones({size})] {
        for (int i = 0; i < 100; ++i) at::add(x, x);
      };
    }));
    std::vector<Point> cubes = measure({64, 128, 256}, [](int64_t size) {
      return [x = at::ones({size, size})] { at::mm(x, x); };
    });
    for (Point& point : cubes) point.x = 2 * point.x * point.x * point.x;
    const Line products = fit_line(cubes);
    const Line sums = fit_line(measure({1 << 16, 1 << 18, 1 << 21}, [](int64_t size) {
      return
          [x = at::ones({size}), y = at::ones({size}), sum = at::empty({size})]() mutable { at::add_out(sum, x, y); };
    }));
    return {times(small.intercept, 0.01), per_byte(products.slope, 1), per_byte(sums.slope, 3 * sizeof(float))};
  }

  double jitter() const {
    const at::Tensor x = at::ones({128, 128});
    std::vector<double> all;
    for (int i = 0; i < 40; ++i) {
      all.push_back(us_of([&] {
        for (int k = 0; k < 10; ++k) at::mm(x, x);
      }));
    }
    return std::min(1.0, slowest(simulation::relative_spread(all)));
  }

  // One rank alone copies and adds without peers.
  void measure_memory() {
    const int64_t ranks = options_.ranks_per_host;
    if (ranks == 1) return measure_memory_alone();
    const Group local = mesh_.get_group("local");
    const std::vector<int64_t> sizes = {64 << 10, 256 << 10, 1 << 20, 4 << 20};
    const Line gathers = fit_line(measure(sizes, [&](int64_t bytes) {
      return [=, x = at::zeros({bytes / 4}), all = at::zeros({bytes / 4 * ranks})] { all_gather_into(all, x, local); };
    }));
    const Line sums = fit_line(
        measure(sizes, [&](int64_t bytes) { return [=, x = at::zeros({bytes / 4})] { all_reduce_(x, local); }; }));
    machine_.memory.alpha_us =
        simulation::fit_median(measure({0}, [&](int64_t) { return [=] { barrier(local); }; })[0].times);
    machine_.memory.beta_ns_per_byte = per_byte(gathers.slope, double(ranks * (ranks - 1)));
    // Of an all_reduce each rank adds one share after the other, and all copy the whole result.
    const Fitted copies = times(machine_.memory.beta_ns_per_byte, double(ranks));
    const Fitted whole = per_byte(sums.slope, 1);
    machine_.memory.gamma_ns_per_byte = {std::max(0.0, whole.value - copies.value),
                                         std::max(0.0, whole.low - copies.high),
                                         std::max(0.0, whole.high - copies.low)};
  }

  void measure_memory_alone() {
    const std::vector<int64_t> sizes = {64 << 10, 1 << 20, 4 << 20};
    const Line copies = fit_line(measure(sizes, [](int64_t bytes) {
      return [x = at::zeros({bytes}, at::kByte), y = at::zeros({bytes}, at::kByte)] { y.copy_(x); };
    }));
    const Line sums = fit_line(measure(
        sizes, [](int64_t bytes) { return [x = at::zeros({bytes / 4}), y = at::zeros({bytes / 4})] { y.add_(x); }; }));
    machine_.memory = {Fitted::exactly(0), per_byte(copies.slope, 1), per_byte(sums.slope, 1)};
  }

  // Each rank with those at its place on other hosts: what they call, then their pieces. All ranks of a host send at
  // once: some that waited meanwhile would take its cores.
  void measure_link() {
    if (num_hosts_ == 1) return;
    const Group across = mesh_.get_group("host");
    const Fitted slope = fit_slope(measure({64 << 10, 256 << 10, 1 << 20, 2 << 20}, [&](int64_t bytes) {
      const at::Tensor x = at::zeros({bytes / 4}), all = at::zeros({bytes / 4 * num_hosts_});
      return [=] { all_gather_into(all, x, across); };
    }));
    // A barrier is one step of short messages.
    const std::vector<Point> barriers = measure({0}, [&](int64_t) { return [=] { barrier(across); }; });
    machine_.nic_out.alpha_us = simulation::fit_median(barriers[0].times);
    machine_.nic_out.beta_ns_per_byte = per_byte(slope, double(options_.ranks_per_host * (num_hosts_ - 1)));
    machine_.nic_in.beta_ns_per_byte = machine_.nic_out.beta_ns_per_byte;
  }

  const Group world_;
  const CalibrateOptions options_;
  const int64_t num_hosts_;
  const DeviceMesh mesh_;
  simulation::Machine machine_ = {};
};

}  // namespace

simulation::Machine calibrate(const Group& world, const CalibrateOptions& options) {
  return Calibration(world, options).run();
}

}  // namespace serried::tools
