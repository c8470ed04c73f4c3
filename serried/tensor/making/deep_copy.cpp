// Lets torch::nn::Cloneable copy modules that hold DTensors.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "serried/tensor/meta.h"

namespace serried {
namespace {

// clone() makes a fresh module and gives each plain parameter the data of the original's copy through set_data, which
// asks this. A plain tensor may become a DTensor of the same sizes and dtype, as in distribute_parameter; never the
// other way round, which would drop the other ranks' parts.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  if (self.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(from.key_set())) return true;
  return dtensor_meta(from) != nullptr && dtensor_meta(self) == nullptr && self.defined() && self.device().is_cpu() &&
         self.layout() == at::kStrided && self.sizes() == from.sizes() && self.scalar_type() == from.scalar_type();
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradCPU, library) {
  library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
}

}  // namespace serried
