// Which wrappers have a parameter in common: one backward is averaged by one of them.
#pragma once

#include <memory>
#include <vector>

#include "serried/comm/groups/group.h"
#include "serried/parallel/ddp/parameters.h"

namespace serried::detail {

/// While it lives, a wrapper averages the gradients of these parameters.
class Claim {
 public:
  /// ValueError if a parameter belongs to another rank of this process, or if this or the other wrapper of a parameter
  /// changes its dtype on the way.
  Claim(const std::vector<ManagedParameter>& parameters, const Group& group, bool changes_dtype);
  ~Claim();
  Claim(const Claim&) = delete;

  /// Call it inside a backward that this wrapper is going to average. ValueError if another wrapper averages gradients
  /// of the same parameters in it.
  void begin_backward();

 private:
  struct Holder;
  struct Registry;
  static Registry& registry();
  void check(const Holder& other, const std::string& name) const;
  friend bool is_claimed(const at::Tensor& parameter);
  friend std::vector<Group> claiming_groups(const at::Tensor& parameter);

  std::vector<const void*> tensors_;
  std::shared_ptr<Holder> self_;
};

/// Whether a wrapper that is alive averages the gradient of `parameter`.
bool is_claimed(const at::Tensor& parameter);

/// Over whose ranks wrappers that are alive average the gradient of `parameter`.
std::vector<Group> claiming_groups(const at::Tensor& parameter);

/// ValueError if `module` is or contains a wrapper that averages one of `parameters`.
void check_no_wrapper_inside(const torch::nn::Module& module, const std::vector<ManagedParameter>& parameters);

}  // namespace serried::detail
