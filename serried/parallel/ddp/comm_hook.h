// What is done with a full bucket of gradients instead of averaging it: the value that register_comm_hook takes.
#pragma once

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <concepts>
#include <functional>
#include <string>
#include <utility>

#include "serried/comm/groups/group.h"

namespace serried {

using HookFuture = c10::intrusive_ptr<c10::ivalue::Future>;

/// Gradients reach a hook undivided; its future holds a tensor as large as the bucket's buffer (it may be the buffer).
/// Buckets come in the same order on every rank. A copy shares the hook's state.
class CommHook {
 public:
  using Run = std::function<HookFuture(const Group&, c10d::GradBucket&)>;

  /// A hook of the library: it gets the group of the module it is registered with.
  CommHook(std::string name, Run run) : name_(std::move(name)), run_(std::move(run)) {}

  /// A user's own, which knows its group.
  template <class Fn>
  requires(!std::same_as<std::remove_cvref_t<Fn>, CommHook> &&
           std::is_invocable_r_v<HookFuture, Fn&, c10d::GradBucket&>) CommHook(Fn fn)  // NOLINT: lambdas convert
      : name_("user"),
        run_([fn = std::move(fn)](const Group&, c10d::GradBucket& bucket) mutable { return fn(bucket); }) {}

  const std::string& name() const { return name_; }
  HookFuture operator()(const Group& group, c10d::GradBucket& bucket) const { return run_(group, bucket); }

 private:
  std::string name_;
  Run run_;
};

}  // namespace serried
