// Collectives between hosts beside Gloo's, and beside what the link alone would take: bench_hosts MBITS [results.json],
// where MBITS is how fast each host may send, 0 for as fast as it goes. Started by `serried run` on every host.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/serried.h"

namespace {

using serried::Group;
using serried::bench::Contender;
using serried::bench::Row;

struct Bench {
  Group ours, gloo;
  int num_hosts = 1;
  double mbits = 0;
  std::vector<Row> rows = {};

  std::string where(const char* op, long bytes) const {
    const std::string link = mbits > 0 ? std::to_string(int(mbits)) + " Mbit/s" : "no limit";
    return std::string(op) + ", " + std::to_string(num_hosts) + " x " + std::to_string(ours->getSize() / num_hosts) +
           ", " + link + ", " + serried::bench::size_text(bytes);
  }
};

struct Case {
  const char* op;
  long bytes;
  double sent;       // of these, bytes that leave the host that sends most
  double gloo_goal;  // 0: none
};

double median_of(const Contender& contender) {
  std::vector<double> times = contender.times;
  return serried::bench::median(times);
}

void compare(Bench& bench, const Case& what, const serried::bench::Step& ours, const serried::bench::Step& gloo) {
  std::vector<Contender> contenders{{"ours", ours}, {"gloo", gloo}};
  const double least = bench.mbits > 0 ? what.sent * 8 / bench.mbits : 0;
  serried::bench::take_turns(contenders, bench.ours, {.warm_up = 2, .rounds = 8, .block_us = least > 1e4 ? 1 : 60e3});
  const double mine = median_of(contenders[0]), theirs = median_of(contenders[1]);
  const std::string name = bench.where(what.op, what.bytes);
  if (least > 0) bench.rows.push_back({"hosts", name, mine, least, "the link", 1.10});
  bench.rows.push_back({"hosts", name, mine, theirs, "Gloo", bench.mbits > 0 ? 0 : what.gloo_goal});
}

void all_reduce(Bench& bench, long bytes) {
  const at::Tensor x = at::zeros({bytes / 4});
  std::vector<at::Tensor> list{x};
  // Two hosts: each sends all of it once, as a sum of its own or as the result.
  compare(
      bench, {"all_reduce", bytes, double(bytes), bytes <= 1 << 10 ? 0.15 : 1.0},
      [&] { serried::all_reduce_(x, bench.ours); }, [&] { bench.gloo->allreduce(list)->wait(); });
}

void all_gather(Bench& bench, long bytes) {
  const int64_t part = bytes / 4 / bench.ours->getSize();
  at::Tensor in = at::zeros({part}), out = at::zeros({part * bench.ours->getSize()});
  compare(
      bench, {"all_gather", bytes, double(bytes) / bench.num_hosts, 1.0},
      [&] { serried::all_gather_into(out, in, bench.ours); }, [&] { bench.gloo->all_gather_single(out, in)->wait(); });
}

void broadcast(Bench& bench, long bytes) {
  const at::Tensor x = at::zeros({bytes / 4});
  std::vector<at::Tensor> list{x};
  compare(
      bench, {"broadcast", bytes, double(bytes), 1.0}, [&] { serried::broadcast_(x, bench.ours); },
      [&] { bench.gloo->broadcast(list)->wait(); });
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_hosts MBITS [results.json], 0 for a link without a limit\n");
    return 2;
  }
  Bench bench{.ours = serried::new_group("hierarchical"), .gloo = serried::new_group("gloo")};
  bench.mbits = std::atof(argv[1]);
  bench.num_hosts = bench.ours->getSize() / std::atoi(std::getenv("LOCAL_WORLD_SIZE"));
  const std::vector<long> sizes = bench.mbits > 0
                                      ? std::vector<long>{4l << 20}
                                      : std::vector<long>{1l << 10, 64l << 10, 512l << 10, 4l << 20, 32l << 20};
  for (const long bytes : sizes) {
    all_reduce(bench, bytes);
    all_gather(bench, bytes);
    broadcast(bench, bytes);
  }
  if (bench.ours->getRank() == 0) {
    serried::bench::print_table(bench.rows);
    if (argc > 2) serried::bench::append_json(bench.rows, argv[2]);
  }
  serried::barrier(bench.gloo);
}
