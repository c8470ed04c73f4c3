// Collectives between hosts beside Open MPI's, Gloo's and those of plain sockets, in the same processes, taking turns,
// and beside what the link alone would take: bench_hosts MBITS [results.json], where MBITS is how fast each host may
// send, 0 for as fast as it goes. Started by mpirun on all hosts; `bench_hosts MBITS results.json ddp` measures a step
// of DDP.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/hosts/bench.h"
#include "benchmarks/hosts/sockets.h"

namespace serried::bench {
namespace {

struct Case {
  const char* op;
  long bytes;
  double sent;      // of these, bytes that leave the host that sends most
  double mpi_goal;  // 0: none
  double gloo_goal;
  double link_goal;
};

struct Others {
  Step mpi, gloo, sockets = nullptr;
};

void compare(HostsBench& bench, const Case& what, const Step& ours, const Others& others) {
  std::vector<Contender> contenders{{"ours", ours}, {"Open MPI", others.mpi}, {"Gloo", others.gloo}};
  if (others.sockets) contenders.push_back({"sockets", others.sockets});
  const double least = bench.least_us(what.sent);
  take_turns(contenders, bench.ours, {.warm_up = 2, .rounds = 8, .block_us = least > 1e4 ? 1 : 60e3});
  std::vector<double> medians;
  for (Contender& contender : contenders) medians.push_back(median(contender.times));
  const std::string name = bench.where(what.op, what.bytes);
  const double goals[] = {0, least > 0 ? 0 : what.mpi_goal, least > 0 ? 0 : what.gloo_goal, 0};
  if (least > 0) bench.rows.push_back({"hosts", name, medians[0], least, "the link", what.link_goal});
  for (size_t i = 1; i < contenders.size(); ++i) {
    bench.rows.push_back({"hosts", name, medians[0], medians[i], contenders[i].name, goals[i]});
  }
}

void all_reduce(HostsBench& bench, long bytes, SocketPair* sockets) {
  const at::Tensor x = at::zeros({bytes / 4});
  std::vector<at::Tensor> list{x};
  float* const data = x.mutable_data_ptr<float>();
  const int count = int(x.numel());
  const double goal = bytes >= 4 << 20 ? 1.0 : 1.2;
  Others others{[=] { MPI_Allreduce(MPI_IN_PLACE, data, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); },
                [&] { bench.gloo->allreduce(list)->wait(); }};
  if (sockets != nullptr) others.sockets = [=] { sockets->all_reduce(data, count); };
  // Two hosts: each sends all of it once, as a sum of its own or as the result.
  compare(
      bench, {"all_reduce", bytes, double(bytes), goal, bytes <= 1 << 10 ? 0.1 : goal, 1.10},
      [&] { all_reduce_(x, bench.ours); }, others);
}

void all_gather(HostsBench& bench, long bytes) {
  const int64_t part = bytes / 4 / bench.ours->getSize();
  at::Tensor in = at::zeros({part}), out = at::zeros({part * bench.ours->getSize()});
  compare(bench, {"all_gather", bytes, double(bytes) / bench.num_hosts, 0, 1.0, 1.15},
          [&] { all_gather_into(out, in, bench.ours); },
          {[&] {
             MPI_Allgather(in.data_ptr(), int(part), MPI_FLOAT, out.data_ptr(), int(part), MPI_FLOAT, MPI_COMM_WORLD);
           },
           [&] { bench.gloo->all_gather_single(out, in)->wait(); }});
}

void reduce_scatter(HostsBench& bench, long bytes) {
  const int64_t part = bytes / 4 / bench.ours->getSize();
  at::Tensor in = at::zeros({part * bench.ours->getSize()}), out = at::zeros({part});
  // In the order of ranks a host of several ranks sends all of it up the chain.
  const double sent = bench.ranks_per_host() > 1 ? double(bytes) : double(bytes) / bench.num_hosts;
  compare(
      bench, {"reduce_scatter", bytes, sent, 0, 1.0, 1.15}, [&] { reduce_scatter_into(out, in, bench.ours); },
      {[&] { MPI_Reduce_scatter_block(in.data_ptr(), out.data_ptr(), int(part), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); },
       [&] { bench.gloo->reduce_scatter_single(out, in)->wait(); }});
}

void broadcast(HostsBench& bench, long bytes) {
  const at::Tensor x = at::zeros({bytes / 4});
  std::vector<at::Tensor> list{x};
  compare(bench, {"broadcast", bytes, double(bytes), 0, 1.0, 1.15}, [&] { broadcast_(x, bench.ours); },
          {[&] { MPI_Bcast(x.data_ptr(), int(x.numel()), MPI_FLOAT, 0, MPI_COMM_WORLD); },
           [&] { bench.gloo->broadcast(list)->wait(); }});
}

void measure_collectives(HostsBench& bench) {
  std::unique_ptr<SocketPair> sockets;
  if (bench.ours->getSize() == 2) {
    sockets = std::make_unique<SocketPair>(bench.ours->getRank(), std::getenv("MASTER_ADDR"), 29'777);
  }
  const std::vector<long> sizes = bench.mbits > 0
                                      ? std::vector<long>{4l << 20}
                                      : std::vector<long>{1l << 10, 64l << 10, 512l << 10, 4l << 20, 32l << 20};
  for (const long bytes : sizes) {
    all_reduce(bench, bytes, sockets.get());
    all_gather(bench, bytes);
    reduce_scatter(bench, bytes);
    broadcast(bench, bytes);
  }
}

void measure(int argc, char** argv) {
  HostsBench bench{.ours = new_group("hierarchical"), .gloo = new_group("gloo")};
  bench.mbits = std::atof(argv[1]);
  bench.num_hosts = bench.ours->getSize() / std::atoi(std::getenv("OMPI_COMM_WORLD_LOCAL_SIZE"));
  if (argc > 3)
    data_parallel_step(bench);
  else
    measure_collectives(bench);
  if (bench.ours->getRank() == 0) {
    print_table(bench.rows);
    if (argc > 2) append_json(bench.rows, argv[2]);
  }
  barrier(bench.gloo);
}

}  // namespace
}  // namespace serried::bench

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_hosts MBITS [results.json [ddp]], 0 for a link without a limit\n");
    return 2;
  }
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
  serried::bench::measure(argc, argv);
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Finalize();
}
