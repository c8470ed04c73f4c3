// Which parameters are copies of one in an earlier stage: they have its gradient, which a norm counts once.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace serried::detail {

/// While it lives, these parameters count as copies.
class TiedCopies {
 public:
  TiedCopies() = default;
  ~TiedCopies();
  TiedCopies(const TiedCopies&) = delete;
  TiedCopies& operator=(const TiedCopies&) = delete;

  void add(const at::Tensor& parameter);

 private:
  std::vector<at::Tensor> parameters_;
};

bool is_tied_copy(const at::Tensor& parameter);

}  // namespace serried::detail
