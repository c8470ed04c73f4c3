// Notices when parameters of a wrapped module become other tensors, or get other memory.
#pragma once

#include <c10/core/StorageImpl.h>
#include <torch/nn/module.h>

#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "serried/tensor/spec.h"

namespace serried::detail {

class ParameterWatch {
 public:
  /// `managed` are the parameters of `module` whose gradients are averaged; those that are ignored are not looked at.
  ParameterWatch(std::shared_ptr<const torch::nn::Module> module, std::set<std::string> ignored,
                 const std::vector<at::Tensor>& managed);

  /// Whether a parameter has other memory than at the last call, as after torch::load, to() or set_data(). ValueError
  /// for a managed one that is no longer the tensor it was or has other sizes, and for one that requires gradients
  /// though it is not managed. The same for one that has become a DTensor, or is placed otherwise.
  bool has_new_memory();

 private:
  using StoragePtr = c10::weak_intrusive_ptr<c10::StorageImpl>;  // weak: another one never has its address

  struct Seen {
    std::string name;
    at::Tensor tensor;
    bool is_ignored = false;
    bool is_managed = false;
    std::vector<int64_t> sizes = {};
    SpecPtr spec = {};  // of a DTensor
    StoragePtr storage{c10::intrusive_ptr<c10::StorageImpl>()};
    int64_t offset = 0;  // in the storage, which several parameters may share
  };

  std::vector<Seen> look() const;
  bool is_known(const std::vector<at::Tensor>& parameters) const;
  void check_all_are_there(const std::vector<Seen>& now) const;
  void check(const Seen& seen) const;

  std::shared_ptr<const torch::nn::Module> module_;
  std::set<std::string> ignored_;
  std::unordered_set<const void*> managed_;  // by TensorImpl
  std::vector<Seen> seen_;
};

}  // namespace serried::detail
