// How ranks find each other: env://, tcp://, file://, and the environments of torchrun, mpirun and srun.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <string>

namespace serried {

struct Meeting {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = -1;
  int world_size = -1;
};

/// What the caller fixed; a url that gives the same wins, else these are merged into it.
struct RendezvousOptions {
  int rank = -1;
  int world_size = -1;
  std::chrono::milliseconds timeout;
};

/// Meets the other ranks at `url`. Processes that meet twice at one place share one store.
///     rendezvous("env://")                                  // RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
///     rendezvous("tcp://host:29500?rank=0&world_size=2")
///     rendezvous("file:///tmp/meet?rank=0&world_size=2")
Meeting rendezvous(const std::string& url, const RendezvousOptions& options);

using RendezvousHandler = std::function<Meeting(const std::string& url, const RendezvousOptions&)>;

/// Adds a scheme; ValueError if it is taken.
void register_rendezvous_handler(const std::string& scheme, RendezvousHandler handler);

}  // namespace serried
