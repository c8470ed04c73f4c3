// Gloo's Work with the watch around its wait: a failure of any rank ends it, a timeout says who is missing.
#pragma once

#include "serried/comm/backends/gloo/open_calls.h"
#include "serried/comm/collectives/traced.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace serried::gloo {

/// A call as the watch sees it.
struct Call {
  watch::Record record;
  std::chrono::milliseconds timeout;
  detail::SeenCall seen = {};
};

/// Raises a DistBackendError that names the group's first failure.
[[noreturn]] void raise_unusable(detail::GroupStatus& status, const watch::Record& record);

/// Raises the group's first failure as the outcome of this very call.
[[noreturn]] void raise_failure(detail::GroupStatus& status, const watch::Record& record);

/// Raises what went wrong in `call`, and fails the group with it: a timeout if gloo's `text` speaks of one.
[[noreturn]] void raise_broken(detail::GroupStatus& status, const Call& call, int64_t waited_ms,
                               const std::string& text);

/// What is left to do when gloo is done, on its thread, and the outputs that are then ready.
struct Epilogue {
  std::function<void()> run;
  std::vector<at::Tensor> outputs;
};

/// The Work of a collective; with an epilogue, done when that is.
c10::intrusive_ptr<c10d::Work> watch_collective(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<OpenCalls> calls,
                                                const Call& call, Epilogue epilogue = {});

/// The Work of a send or receive: gloo tells nobody when it is done but the thread that waits.
c10::intrusive_ptr<c10d::Work> watch_peer(c10::intrusive_ptr<c10d::Work> inner, std::shared_ptr<OpenCalls> calls,
                                          const Call& call);

/// Whether this thread is one of an engine's own, as callbacks of futures find it: it cannot wait for its engine's end.
bool on_engine_thread();

}  // namespace serried::gloo
