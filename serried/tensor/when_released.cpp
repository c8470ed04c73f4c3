// A storage of the tensor's own: c10 lets go of it with the last handle, whoever watches.
#include "serried/tensor/when_released.h"

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <memory>

#include "serried/tensor/meta.h"

namespace serried {
namespace {

using Action = std::function<void()>;

void call_and_delete(void* context) {
  const std::unique_ptr<Action> action(static_cast<Action*>(context));
  (*action)();
}

}  // namespace

void detail::when_released(const at::Tensor& t, Action then) {
  c10::DataPtr token(nullptr, new Action(std::move(then)), &call_and_delete, c10::Device(c10::kCPU));
  c10::Storage own(c10::Storage::use_byte_size_t(), 0, std::move(token), /*allocator=*/nullptr, /*resizable=*/false);
  own.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(kDTensor.no_memory);
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(own));
}

}  // namespace serried
