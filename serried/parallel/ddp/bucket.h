// A bucket: the gradients of some parameters side by side in memory that the group can reach.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <map>
#include <optional>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/ddp/parameters.h"

namespace serried::detail {

/// Memory from the group where it has some to give (shared with the other ranks), else ordinary memory.
at::Tensor allocate_for(const Group& group, int64_t num_elements, const at::TensorOptions& options);

/// Rebuilt buckets lie where the first ones lay: no second copy of all gradients, no fresh pages to fault in.
class BucketMemory {
 public:
  /// Room for the gradients of `parameters`, in any assignment to buckets. Floating ones are held in
  /// `floating_dtype`; none: the parameters'.
  BucketMemory(const std::vector<ManagedParameter>& parameters, Group group,
               std::optional<at::ScalarType> floating_dtype = {});

  /// The next `num_elements` for gradients of parameters like this one, aligned for the kernels that reduce them.
  at::Tensor take(int64_t num_elements, const at::Tensor& parameter);

  /// Everything taken may be given out again.
  void rewind() { taken_.clear(); }

 private:
  at::ScalarType dtype_for(const at::Tensor& parameter) const;

  Group group_;
  std::optional<at::ScalarType> floating_dtype_;
  std::map<at::ScalarType, int64_t> capacities_;  // elements
  std::map<at::ScalarType, at::Tensor> pieces_;
  std::map<at::ScalarType, int64_t> taken_;
};

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
