// The training steps that are measured eager and captured; pytorch.py has the same in Python.
#pragma once

#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/ddp/models.h"
#include "serried/graph/passes/passes.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/making/modules.h"

namespace serried::bench {

using StepFn = std::function<Tensor(const Tensor&, const Tensor&)>;

/// A step of a fresh model, and what it is called with.
struct Training {
  StepFn step;
  Batch batch;
};

struct Layers : nn::Module {
  nn::ModuleList linears;

  Layers(int count, int64_t width) {
    register_module("linears", linears);
    for (int i = 0; i < count; ++i) linears->push_back(nn::Linear(width, width));
  }
  nn::LinearImpl& linear(size_t i) { return *linears[i]->as<nn::Linear>(); }

  Tensor forward(Tensor x) {
    for (size_t i = 0; i < linears->size(); ++i) x = linear(i).forward(x).relu();
    return x;
  }
};

template <class Optimizer, class LossOf>
StepFn stepping(std::shared_ptr<Optimizer> optimizer, LossOf loss_of) {
  return [=](const Tensor& x, const Tensor& y) {
    optimizer->zero_grad();
    Tensor loss = loss_of(x, y);
    loss.backward();
    optimizer->step();
    return loss;
  };
}

inline Training layers(int count, int64_t width) {
  const auto model = std::make_shared<Layers>(count, width);
  const auto loss_of = [model](const Tensor& x, const Tensor& y) { return at::mse_loss(model->forward(x), y); };
  return {stepping(std::make_shared<torch::optim::SGD>(model->parameters(), 1e-3), loss_of),
          {at::randn({8, width}), at::randn({8, width})}};
}

inline DeviceMesh line_of(const Group& group) {
  return init_device_mesh("cpu", {group->getSize()}, {"tp"}, {.group = group});
}

/// Cut by columns, then a relu on parts, then by rows.
inline void cut_columns(const nn::LinearImpl& linear, const DeviceMesh& mesh) {
  distribute_parameter(linear.weight, mesh, {Shard(0)});
  distribute_parameter(linear.bias, mesh, {Shard(0)});
}
inline void cut_rows(const nn::LinearImpl& linear, const DeviceMesh& mesh) {
  distribute_parameter(linear.weight, mesh, {Shard(1)});
  distribute_parameter(linear.bias, mesh, {Replicate()});
}

inline Training tensor_parallel_layers(int count, int64_t width, const Group& group) {
  const auto model = std::make_shared<Layers>(count, width);
  const DeviceMesh mesh = line_of(group);
  for (int i = 0; i < count; ++i) i % 2 == 0 ? cut_columns(model->linear(i), mesh) : cut_rows(model->linear(i), mesh);
  const auto whole = [mesh](const Tensor& t) { return DTensor::from_local(t, mesh, {Replicate()}); };
  const auto loss_of = [=](const Tensor& x, const Tensor& y) {
    return at::mse_loss(model->forward(whole(x)), whole(y));
  };
  return {stepping(std::make_shared<torch::optim::SGD>(model->parameters(), 1e-3), loss_of),
          {at::randn({8, width}), at::randn({8, width})}};
}

inline Training data_parallel_gpt(const Group& group) {
  const auto ddp = std::make_shared<DistributedDataParallel<std::shared_ptr<Gpt>>>(
      std::make_shared<Gpt>(), DistributedDataParallelOptions{.process_group = group});
  const auto loss_of = [ddp](const Tensor& x, const Tensor& y) { return Gpt::loss((*ddp)(x), y); };
  return {stepping(std::make_shared<AdamW>(ddp->parameters(), torch::optim::AdamWOptions(1e-3)), loss_of),
          Gpt::batch()};
}

inline Training tensor_parallel_gpt(const Group& group) {
  const auto model = std::make_shared<Gpt>();
  const DeviceMesh mesh = line_of(group);
  for (const auto& module : *model->blocks) {
    Block& block = *module->as<Block>();
    for (const auto& projection : *block.projections) cut_columns(*projection->as<nn::Linear>(), mesh);
    cut_rows(*block.out, mesh);
    cut_columns(*block.up, mesh);
    cut_rows(*block.down, mesh);
  }
  distribute_module(*model, mesh);  // what is left is replicated
  const auto loss_of = [=](const Tensor& x, const Tensor& y) {
    const ImplicitReplication places;  // the model counts them by itself, as a plain tensor
    return Gpt::loss(model->forward(DTensor::from_local(x, mesh, {Replicate()})),
                     DTensor::from_local(y, mesh, {Replicate()}));
  };
  return {stepping(std::make_shared<AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3)), loss_of),
          Gpt::batch()};
}

/// A case, how often its captured step may last as long as the eager one, and whether ranks share the batch.
struct Case {
  std::string name;
  std::string text;
  double goal;
  bool same_batch;
  std::function<Training(const Group&)> make;
  std::vector<Pass> passes = passes::defaults();
};

/// Ranks of a tensor parallel step record and replay together, so they may leave collectives out.
inline std::vector<Pass> with_reuse() {
  std::vector<Pass> list = {passes::drop_dead(), passes::reuse_collectives()};
  for (const Pass& pass : passes::defaults()) list.push_back(pass);
  return list;
}

inline std::vector<Case> cases() {
  return {
      {"mlp20", "20 x 64", 0.45, true, [](const Group&) { return layers(20, 64); }},
      {"mlp3", "3 x 16", 0.35, true, [](const Group&) { return layers(3, 16); }},
      {"mlp20_tp", "20 x 64, tensor parallel", 0.5, true,
       [](const Group& group) { return tensor_parallel_layers(20, 64, group); }},
      {"gpt_ddp", "GPT, data parallel", 1.0, false, data_parallel_gpt},
      {"gpt_tp", "GPT, tensor parallel", 0.9, true, tensor_parallel_gpt, with_reuse()},
  };
}

}  // namespace serried::bench
