// The memory that buckets are cut from: one piece per dtype, cut anew when buckets change.
#pragma once

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

}  // namespace serried::detail
