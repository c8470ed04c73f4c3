// Checks and copies: the engine sees only dense bytes of the CPU.
#include "serried/comm/backends/shm/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::shm {

at::Tensor readable(std::string_view where, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu()) {
    raise<c10::ValueError>({where,
                            !tensor.defined() ? std::string("the tensor is undefined")
                                              : c10::str("the tensor is ", watch::describe_tensor(tensor), " on ",
                                                         tensor.device(), " with layout ", tensor.layout()),
                            "pass a dense tensor on the CPU"});
  }
  // Below autograd: moving bytes is no part of anybody's graph.
  at::AutoDispatchBelowAutograd guard;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

at::Tensor writable(std::string_view where, const at::Tensor& tensor, Task& task) {
  at::Tensor dense = readable(where, tensor);
  task.keep_alive.push_back(tensor);
  if (dense.is_same(tensor)) return dense;
  task.keep_alive.push_back(dense);
  task.after = [earlier = std::move(task.after), tensor, dense] {
    if (earlier) earlier();
    at::AutoDispatchBelowAutograd guard;
    tensor.copy_(dense);
  };
  return dense;
}

const at::Tensor& only(std::string_view where, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return tensors.front();
  raise<c10::ValueError>(
      {where, c10::str("got ", tensors.size(), " tensors, and every rank passes one: there is one device, the CPU"),
       tensors.empty() ? "pass one tensor" : "make a call for each, or a coalesced one"});
}

void check_dtype(std::string_view where, const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.scalar_type() == like.scalar_type()) return;
  raise<c10::ValueError>(
      {where, c10::str("dtypes differ: ", watch::describe_tensor(tensor), " and ", watch::describe_tensor(like)),
       "use one dtype for inputs and outputs"});
}

void check_count(std::string_view where, std::string_view what, int64_t count, int64_t expected) {
  if (count == expected) return;
  raise<c10::ValueError>(
      {where, c10::str("got ", count, " ", what, ", expected ", expected), c10::str("pass ", expected, " ", what)});
}

}  // namespace serried::shm
