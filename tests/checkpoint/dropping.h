// A small module that drops, so that what it computes shows whether generators went on where they were.
#pragma once

#include <torch/torch.h>

namespace serried::testing {

struct DroppingImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return out(dropout(torch::gelu(in(x)))); }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(6, 8)),
                    out = register_module("out", torch::nn::Linear(8, 2));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.3));
};
TORCH_MODULE(Dropping);

}  // namespace serried::testing
