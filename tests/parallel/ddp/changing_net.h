// A small module to be changed after it was wrapped, and how to tell that it was trained as in one process.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <sstream>
#include <string>

#include "serried/comm/groups/ranks.h"
#include "tests/parallel/ddp/buckets.h"
#include "tests/support/close.h"

namespace serried::testing {

struct ChangingImpl : torch::nn::Module {
  ChangingImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1{5, 7}, fc2{7, 3};
};
TORCH_MODULE(Changing);

inline Changing changing_net(int seed = 0) {
  return seeded(seed, [] { return Changing(); });
}

inline std::string saved_bytes(const Changing& net) {
  std::ostringstream out;
  torch::save(net, out);
  return out.str();
}

inline void load_bytes(Changing& net, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::load(net, in);
}

inline at::Tensor changing_batch(int world_size, int step, at::ScalarType dtype) {
  return seeded(100 + step, [&] { return at::randn({2 * world_size, 5}); }).to(dtype);
}

inline at::Tensor rows_for(const at::Tensor& batch, const Group& group) {
  return batch.narrow(0, 2 * group->getRank(), 2);
}

inline void expect_trained_alike(Changing& net, Changing& plain, const Group& group, const std::string& what) {
  const auto wanted = plain->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const at::Tensor& parameter = item.value();
    EXPECT_EQ(parameter.scalar_type(), wanted[item.key()].scalar_type()) << what;
    // What was computed in float before a change to double is no closer.
    expect_close(parameter.detach().to(at::kFloat), wanted[item.key()].detach().to(at::kFloat),
                 what + ", " + item.key());
    expect_same_on_all_ranks(parameter.detach(), group);
  }
}

using ChangingSgd = torch::optim::SGD;

template <class Model>
void train_step(Model& model, torch::optim::Optimizer& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  model(x).pow(2).mean().backward();
  optimizer.step();
}

inline torch::optim::SGDOptions changing_options() {
  return torch::optim::SGDOptions(0.1).momentum(0.9);
}

}  // namespace serried::testing
