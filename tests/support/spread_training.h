// A small training under each way to spread parameters or optimizers over ranks, the same in one process, and what
// both have come to.
#pragma once

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/checkpoint/state.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/mesh/mesh.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/modules.h"

namespace serried::testing::spread {

enum class Way {
  replicated_shards,  // fully_shard over pairs where ranks are even, copies of these beside each other
  shards,             // fully_shard over all ranks
  zero_of_pairs,      // DDP, and ZeRO over pairs
  zero,               // DDP, and ZeRO over all ranks
  tensor_parallel,    // DTensors over pairs, DDP over these
  copies,             // DDP: nothing is spread
};
inline constexpr int kNumWays = 6;

inline Way way_of(const std::string& name) {
  static const std::vector<std::string> names = {"replicated_shards", "shards", "zero_of_pairs", "zero",
                                                 "tensor_parallel",   "copies"};
  const auto found = std::find(names.begin(), names.end(), name);
  TORCH_CHECK_VALUE(found != names.end(), "no way is called ", name);
  return Way(found - names.begin());
}

/// Sizes that no number of ranks divides.
struct NetImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(5, 7));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(7, 3));
  at::Tensor seen = register_buffer("seen", at::zeros({}, at::kLong));
  at::Tensor forward(const at::Tensor& x) {
    seen += 1;
    return down(torch::tanh(up(x)));
  }
};
TORCH_MODULE(Net);

inline Net make_net() {
  Net net = seeded(3, [] { return Net(); });
  net->to(at::kDouble);
  return net;
}

/// The rows of a step that the `part`-th of `parts` gets: as many for each.
inline at::Tensor batch(int64_t step, int64_t part, int64_t parts) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(step + 1));
  const at::Tensor rows = at::randn({12, 5}, generator, at::TensorOptions(at::kDouble));
  return rows.narrow(0, part * (12 / parts), 12 / parts);
}

inline at::Tensor loss_of(const at::Tensor& output) {
  return output.square().mean() + output.sum(1).mean() * 0.1;
}

/// Built for the ranks of `world`: 1, 2, 3, 4 or 6.
class Trainer {
 public:
  Trainer(Way way, const Group& world)
      : way_(way),
        inner_(inner_size(way, world->getSize())),
        mesh_(init_device_mesh("cpu", {world->getSize() / inner_, inner_}, {"outer", "inner"}, {.group = world})),
        net_(make_net()) {
    switch (way) {
      case Way::replicated_shards:
      case Way::shards:
        for (torch::nn::Module* layer : {(torch::nn::Module*)net_->up.get(), (torch::nn::Module*)net_->down.get()}) {
          fully_shard(*layer, {.mesh = mesh_});
        }
        break;
      case Way::zero_of_pairs:
      case Way::zero:
      case Way::copies:
        ddp_ = std::make_unique<DistributedDataParallel<Net>>(net_,
                                                              DistributedDataParallelOptions{.process_group = world});
        break;
      case Way::tensor_parallel:
        distribute_parameter(net_->up->weight, mesh_["inner"], {Shard(0)});
        distribute_parameter(net_->up->bias, mesh_["inner"], {Shard(0)});
        distribute_parameter(net_->down->weight, mesh_["inner"], {Shard(1)});
        distribute_parameter(net_->down->bias, mesh_["inner"], {Replicate()});
        ddp_ = std::make_unique<DistributedDataParallel<Net>>(
            net_, DistributedDataParallelOptions{.process_group = mesh_.get_group("outer")});
        break;
    }
    const torch::optim::AdamWOptions rate(0.02);
    if (way == Way::zero_of_pairs || way == Way::zero) {
      optimizer_ = std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
          net_->parameters(), rate, ZeroOptions{.process_group = way == Way::zero ? world : mesh_.get_group("inner")});
    } else {
      optimizer_ = std::make_unique<AdamW>(net_->parameters(), rate);
    }
  }

  checkpoint::Contents contents() {
    return {{"model", checkpoint::state_of(*net_)}, {"optimizer", checkpoint::state_of(*optimizer_)}};
  }

  at::Tensor loss(int64_t step) {
    const bool by_pair = way_ == Way::tensor_parallel;
    const int64_t parts = by_pair ? mesh_.size(0) : mesh_.size();
    const at::Tensor rows = batch(step, by_pair ? mesh_.get_local_rank("outer") : mesh_.get_rank(), parts);
    const at::Tensor x = by_pair ? DTensor::from_local(rows, mesh_["inner"], {Replicate()}) : rows;
    const at::Tensor y = ddp_ ? (*ddp_)(x) : net_(x);
    return loss_of(by_pair ? DTensor(y).full_tensor() : y);
  }

  /// Where nothing is spread.
  void set_world(const Group& world) {
    mesh_ = init_device_mesh("cpu", {world->getSize(), 1}, {"outer", "inner"}, {.group = world});
    ddp_->set_process_group(world);
  }

  torch::optim::Optimizer& optimizer() { return *optimizer_; }

  /// Whole, on every rank; all call it.
  std::vector<at::Tensor> values() const {
    std::vector<at::Tensor> all;
    for (const at::Tensor& each : net_->parameters()) {
      all.push_back((is_dtensor(each) ? DTensor(each).full_tensor() : each).detach().clone());
    }
    all.push_back(net_->seen.clone());
    return all;
  }

 private:
  static int64_t inner_size(Way way, int64_t num_ranks) {
    if (way == Way::shards) return num_ranks;
    if (way == Way::copies || num_ranks % 2 == 1) return 1;
    return way == Way::zero_of_pairs && num_ranks == 2 ? 1 : 2;  // two have copies of all
  }

  const Way way_;
  const int64_t inner_;
  DeviceMesh mesh_;
  Net net_;
  std::unique_ptr<DistributedDataParallel<Net>> ddp_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

/// What one process gets that nothing ever happens to.
inline std::vector<at::Tensor> trained_alone(int64_t num_steps) {
  Net net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  for (int64_t step = 0; step < num_steps; ++step) {
    optimizer.zero_grad();
    loss_of(net(batch(step, 0, 1))).backward();
    optimizer.step();
  }
  std::vector<at::Tensor> all;
  for (const at::Tensor& each : net->parameters()) all.push_back(each.detach().clone());
  all.push_back(net->seen.clone());
  return all;
}

/// The first tensor that is off by more than `most`; empty if none is.
inline std::string difference(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected,
                              double most) {
  for (size_t i = 0; i < expected.size(); ++i) {
    const double off = (actual.at(i) - expected[i]).abs().max().item<double>();
    if (!(off <= most)) return c10::str("tensor ", i, " is off by ", off);
  }
  return actual.size() == expected.size() ? "" : "there are more tensors";
}

}  // namespace serried::testing::spread
