// How ranks of one host come to share a segment.
#pragma once

#include "serried/comm/backends/shm/engine.h"

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <string>

namespace serried::shm {

struct ConnectArgs {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::chrono::milliseconds timeout{};
  int64_t heap_bytes = 0;
  bool always_stage = false;    // take the way of processes even between threads
  bool one_process = false;     // the ranks must be threads of this process
  std::string backend = "shm";  // for messages
};

/// An engine whose peers are all there. Every rank calls it; if one cannot take part, all raise and say which and why.
std::unique_ptr<Engine> connect(const ConnectArgs& args);

}  // namespace serried::shm
