// Collectives as PyTorch's profiler sees them: an event from the call until it is done, with the shapes of what this
// rank puts in.
#pragma once

#include "serried/comm/collectives/watch.h"

#include <ATen/record_function.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace serried::detail {

/// Whether a profiler of this thread wants to know. What RECORD_FUNCTION asks in every op: a few nanoseconds.
inline bool is_profiled() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value();
}

/// What the event of a Work says; empty where nobody profiles.
class Profiled {
 public:
  Profiled() = default;
  /// `event` is "all_reduce"; its title "shm:all_reduce".
  Profiled(std::string_view backend, const char* event, at::TensorList inputs) {
    if (is_profiled()) describe(backend, event, inputs);
  }

  /// As the constructor of c10d::Work takes them.
  const char* title() const { return title_.empty() ? nullptr : title_.c_str(); }
  const std::optional<std::vector<at::Tensor>>& inputs() const { return inputs_; }

 private:
  void describe(std::string_view backend, const char* event, at::TensorList inputs);

  std::string title_;
  std::optional<std::vector<at::Tensor>> inputs_;
};

/// The event of a call that blocks, while it lives.
class ProfiledScope {
 public:
  ProfiledScope(std::string_view backend, watch::Kind kind, at::TensorList inputs) {
    if (is_profiled()) [[unlikely]]
      begin(backend, kind, inputs);
  }

 private:
  void begin(std::string_view backend, watch::Kind kind, at::TensorList inputs);

  std::vector<c10::IValue> inputs_;  // outlives the event, which refers to it
  std::optional<at::RecordFunction> event_;
};

}  // namespace serried::detail
