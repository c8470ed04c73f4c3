// c10d's own Gloo backend, made without gloo's headers.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace serried::gloo {

struct EngineOptions {
  std::chrono::milliseconds timeout{0};
  int threads = 2;
  std::string interface;  // a network interface: "eth0"
  std::string hostname;   // or a name or address of this host
  std::string address;    // where neither is given; empty: what the host's own name resolves to
};

/// Connects the ranks; blocks until all have come. DistBackendError where they cannot be connected.
c10::intrusive_ptr<c10d::Backend> make_engine(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                              const EngineOptions& options);

}  // namespace serried::gloo
