// Small models of every kind that data parallel training meets; scripts/record_ddp_gradients.py has the same in Python.
#pragma once

#include <torch/torch.h>

#include <tuple>

namespace serried::testing::models {

/// sin(0.37 i + salt) for element i: values that C++ and Python agree on to the last bit.
at::Tensor values(at::IntArrayRef sizes, int64_t salt);

/// `count` rows of `length` indices below `limit`, others on each rank.
at::Tensor indices(int64_t count, int64_t length, int64_t limit, int rank);

/// Gives parameter number i, shared ones counted once, half of `values` with salt i.
void fill_parameters(torch::nn::Module& module);

/// Each model has `loss(net, rank)`: what `net`, called as forward is, gives for the batch of a rank. Rank r has r + 2
/// samples.
inline int64_t batch_of(int rank) {
  return rank + 2;
}

struct Mlp : torch::nn::Module {
  torch::nn::Linear hidden{nullptr}, out{nullptr};
  torch::nn::Dropout dropout{nullptr};  // of nothing

  Mlp();
  at::Tensor forward(const at::Tensor& x);
  static at::Tensor loss(auto& net, int rank) { return net(values({batch_of(rank), 5}, rank)).square().mean(); }
};

struct ConvNorm : torch::nn::Module {
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};

  ConvNorm();
  at::Tensor forward(const at::Tensor& x);
  static at::Tensor loss(auto& net, int rank) { return net(values({batch_of(rank), 2, 6, 5}, rank)).square().mean(); }
};

struct Recurrent : torch::nn::Module {
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear out{nullptr};

  Recurrent();
  at::Tensor forward(const at::Tensor& x);
  static at::Tensor loss(auto& net, int rank) { return net(values({batch_of(rank), 5, 3}, rank)).square().mean(); }
};

struct Lookup : torch::nn::Module {
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear out{nullptr};

  explicit Lookup(bool sparse = false);
  at::Tensor forward(const at::Tensor& tokens);
  static at::Tensor loss(auto& net, int rank) { return net(indices(batch_of(rank), 3, 11, rank)).square().mean(); }
};

struct SparseLookup : Lookup {
  SparseLookup() : Lookup(true) {}
};

/// The table that reads tokens is the weight that scores them.
struct Tied : torch::nn::Module {
  torch::nn::Embedding table{nullptr};
  at::Tensor score;

  Tied();
  at::Tensor forward(const at::Tensor& tokens);
  static at::Tensor loss(auto& net, int rank) { return net(indices(batch_of(rank), 4, 7, rank)).square().mean(); }
};

/// `sometimes` runs on rank 0 only, `never` nowhere.
struct Branches : torch::nn::Module {
  torch::nn::Linear always{nullptr}, sometimes{nullptr}, never{nullptr};

  Branches();
  at::Tensor forward(const at::Tensor& x, bool both);
  static at::Tensor loss(auto& net, int rank) {
    return net(values({batch_of(rank), 4}, rank), rank == 0).square().mean();
  }
};

/// `fixed` is not trained.
struct Frozen : torch::nn::Module {
  torch::nn::Linear fixed{nullptr}, out{nullptr};

  Frozen();
  at::Tensor forward(const at::Tensor& x);
  static at::Tensor loss(auto& net, int rank) { return net(values({batch_of(rank), 4}, rank)).square().mean(); }
};

struct TwoHeads : torch::nn::Module {
  torch::nn::Linear trunk{nullptr}, left{nullptr}, right{nullptr};

  TwoHeads();
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x);
  static at::Tensor loss(auto& net, int rank) {
    const auto [left, right] = net(values({batch_of(rank), 4}, rank));
    return left.square().mean() + 2 * right.abs().mean();
  }
};

/// One layer, applied three times.
struct Reused : torch::nn::Module {
  torch::nn::Linear layer{nullptr};

  Reused();
  at::Tensor forward(at::Tensor x);
  static at::Tensor loss(auto& net, int rank) { return net(values({batch_of(rank), 5}, rank)).square().mean(); }
};

}  // namespace serried::testing::models
