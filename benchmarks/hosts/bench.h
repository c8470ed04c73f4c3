// What the benchmarks between hosts have in common: who takes part, and how rows are made.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/serried.h"

namespace serried::bench {

struct HostsBench {
  Group ours, gloo;
  int num_hosts = 1;
  double mbits = 0;  // how fast a host may send; 0: as fast as it goes
  std::vector<Row> rows = {};

  int ranks_per_host() const { return ours->getSize() / num_hosts; }

  /// How long the bytes alone take, in microseconds.
  double least_us(double bytes) const { return mbits > 0 ? bytes * 8 / mbits : 0; }

  std::string where(const std::string& op, long bytes) const {
    const std::string link = mbits > 0 ? std::to_string(int(mbits)) + " Mbit/s" : "no limit";
    return op + ", " + std::to_string(num_hosts) + " x " + std::to_string(ranks_per_host()) + ", " + link + ", " +
           size_text(bytes);
  }
};

/// A step of DistributedDataParallel with 40 MB of gradients, beside what compute and link allow.
void data_parallel_step(HostsBench& bench);

}  // namespace serried::bench
