// Refuses what a function does to its arguments without an op: a replay would not do it again.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "serried/graph/record/call.h"
#include "serried/graph/record/recorder.h"

namespace serried::graph {

/// The arguments of one recorded call.
class ArgumentWatch {
 public:
  /// As they are before the function runs.
  explicit ArgumentWatch(const FlatValues& arguments);
  ~ArgumentWatch();
  ArgumentWatch(const ArgumentWatch&) = delete;
  ArgumentWatch& operator=(const ArgumentWatch&) = delete;

  /// CaptureError where `now`, the same arguments after the call, are not what ops have left, or where backward went on
  /// into what made one of them.
  void check(const Recorder& recorder, const FlatValues& now) const;

 private:
  class History;
  struct Before {
    explicit Before(const at::Tensor& t);

    at::Tensor tensor;
    Place place;
    bool requires_grad;
    WeakHistory made_by;
    std::shared_ptr<History> history;  // of one that is no leaf

    bool has_same_history() const;
  };

  std::vector<Before> tensors_;
  std::vector<std::string> constants_;
};

}  // namespace serried::graph
