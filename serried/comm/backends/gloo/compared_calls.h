// Collectives of ranks that share no memory, compared before they begin: gloo ends the process where ranks send
// different sizes.
#pragma once

#include "serried/comm/backends/gloo/open_calls.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>

namespace serried::gloo {

/// A collective on gloo's own backend; null where it is over when this returns.
using Issue = std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend& engine)>;

/// One thread that makes the collectives of a group in their order. Before each all ranks gather what all of them call;
/// where that differs nothing is sent and every rank fails the group with the same words. Costs one small all_gather
/// per call, and the caller no wait.
class ComparedCalls {
 public:
  ComparedCalls(c10::intrusive_ptr<c10d::Backend> engine, std::shared_ptr<OpenCalls> calls);

  /// Waits for calls under way unless the group has failed, or this is a thread of the engine.
  ~ComparedCalls();
  ComparedCalls(const ComparedCalls&) = delete;
  ComparedCalls& operator=(const ComparedCalls&) = delete;

  /// The Work is over when the one that `issue` makes is.
  c10::intrusive_ptr<c10d::Work> add(const watch::Record& record, std::chrono::milliseconds timeout, Issue issue);

 private:
  class Queue;
  std::shared_ptr<Queue> queue_;
};

}  // namespace serried::gloo
