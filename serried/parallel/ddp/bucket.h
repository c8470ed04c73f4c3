// A bucket: the gradients of some parameters side by side in memory that the group can reach.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <vector>

#include "serried/parallel/ddp/bucket_memory.h"
#include "serried/parallel/ddp/parameters.h"

namespace serried::detail {

struct Bucket {
  std::vector<size_t> members;    // indices of parameters
  at::Tensor flat;                // all their gradients; for one sparse gradient, that one while it is reduced
  std::vector<at::Tensor> views;  // of `flat`, per member, in the layout of the parameter; empty for a sparse gradient
  std::vector<at::Tensor> gradients;  // the views as .grad has them; empty where the dtype is not the parameters'
  std::vector<size_t> offsets;        // elements
  std::vector<size_t> lengths;
  bool sparse = false;

  // Of the running backward.
  size_t num_pending = 0;
  c10::intrusive_ptr<c10d::Work> work = {};
  c10::intrusive_ptr<c10::ivalue::Future> future = {};  // of a hook

  bool launched = false;

  void end_round() {
    work = {};
    future = {};
    launched = false;
  }
  int64_t num_bytes(const std::vector<ManagedParameter>& parameters) const;
};

Bucket make_bucket(std::vector<size_t> members, const std::vector<ManagedParameter>& parameters, BucketMemory& memory);

/// Whether a gradient lies in `view` of a bucket; also if zero_grad() has put a detached tensor in its place.
bool is_same_memory(const at::Tensor& gradient, const at::Tensor& view);

/// What a communication hook sees of `bucket`.
c10d::GradBucket as_grad_bucket(const Bucket& bucket, size_t index, size_t count,
                                const std::vector<ManagedParameter>& parameters,
                                std::optional<at::Tensor> sparse_rows = {});

}  // namespace serried::detail
