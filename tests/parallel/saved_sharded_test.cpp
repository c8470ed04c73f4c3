// SavedSharded keeps a part of what every rank has whole, and changes no bit of the gradients.
#include "serried/parallel/saved_sharded.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/recompute.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/weak_tensor.h"
#include "tests/parallel/recompute/trained.h"
#include "tests/support/errors.h"
#include "tests/support/models.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

const SavedShardedOptions kAnySize{.min_bytes = 0};

torch::nn::Sequential cut_mlp(const DeviceMesh& mesh, int64_t axis) {
  torch::nn::Sequential net(torch::nn::Linear(6, 8), torch::nn::GELU(), torch::nn::Linear(8, 6), torch::nn::Tanh());
  models::fill_parameters(*net);
  net->to(at::kDouble);
  Placements rows(size_t(mesh.ndim())), columns(size_t(mesh.ndim()));
  rows[size_t(axis)] = Shard(0);
  columns[size_t(axis)] = Shard(1);
  distribute_parameter(net[0]->as<torch::nn::Linear>()->weight, mesh, rows);
  distribute_parameter(net[0]->as<torch::nn::Linear>()->bias, mesh, rows);
  distribute_parameter(net[2]->as<torch::nn::Linear>()->weight, mesh, columns);
  distribute_module(*net, mesh);
  return net;
}

// Transposes and views make saved tensors of many layouts.
at::Tensor body(torch::nn::Sequential& net, const at::Tensor& x) {
  const at::Tensor y = DTensor(net->forward(x.sin())).redistribute(Placements(size_t(DTensor(x).device_mesh().ndim())));
  return (y.transpose(0, 1).exp() * y.transpose(0, 1)).transpose(0, 1).cos() * x;
}

std::vector<at::Tensor> gradients(torch::nn::Sequential& net, const DTensor& x,
                                  const std::function<at::Tensor()>& call) {
  net->zero_grad();
  at::Tensor(x).mutable_grad().reset();
  call().sum().backward();
  std::vector<at::Tensor> all{full(x.grad())};
  for (const at::Tensor& p : net->parameters()) all.push_back(full(p.grad()));
  return all;
}

TEST(SavedSharded, GradientsAreTheSameBitForBit) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    for (const int64_t dim : {0, 1, -1}) {
      on_mesh({ranks}, [&](const DeviceMesh& mesh) {
        torch::nn::Sequential net = cut_mlp(mesh, 0);
        const DTensor x(
            at::Tensor(place(models::values({5, 6}, 1).to(at::kDouble), mesh, {Replicate()})).requires_grad_());
        const auto plain = gradients(net, x, [&] { return body(net, x); });
        CommDebugMode comm;
        const auto sharded = gradients(net, x, [&] {
          const SavedSharded guard(mesh, dim, kAnySize);
          return body(net, x);
        });
        if (ranks > 1) EXPECT_GT(comm.count("all_gather"), 0);
        ASSERT_EQ(sharded.size(), plain.size());
        for (size_t i = 0; i < plain.size(); ++i) expect_equal(sharded[i], plain[i], std::to_string(i));
      });
    }
  }
}

TEST(SavedSharded, OneAxisOfAMeshOfTwoIsEnough) {
  on_mesh({2, 2}, [&](const DeviceMesh& unnamed) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = unnamed.root_group()});
    torch::nn::Sequential net = cut_mlp(mesh, 1);
    const DTensor x(
        at::Tensor(place(models::values({5, 6}, 1).to(at::kDouble), mesh, {Shard(0), Replicate()})).requires_grad_());
    const auto plain = gradients(net, x, [&] { return net->forward(x.sin()).exp(); });
    CommDebugMode comm;
    const auto sharded = gradients(net, x, [&] {
      const SavedSharded guard(mesh["tp"], 1, kAnySize);
      return net->forward(x.sin()).exp();
    });
    EXPECT_GT(comm.count("all_gather"), 0);
    for (size_t i = 0; i < plain.size(); ++i) expect_equal(sharded[i], plain[i], std::to_string(i));
  });
}

TEST(SavedSharded, TheWholeIsLetGoAndATensorSavedTwiceIsCutOnce) {
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const DTensor x(at::Tensor(place(iota({7, 4}), mesh, {Replicate()})).requires_grad_());
    at::Tensor middle, result;
    {
      const SavedSharded guard(mesh, 0, kAnySize);
      middle = x.sin();
      result = middle * middle.cos();
    }
    const WeakTensor whole = DTensor(middle).to_local();
    const auto storage =
        c10::weak_intrusive_ptr<c10::StorageImpl>(DTensor(middle).to_local().storage().getWeakStorageImpl());
    middle.reset();
    EXPECT_TRUE(storage.expired());
    CommDebugMode comm;
    result.sum().backward();
    EXPECT_EQ(comm.count("all_gather"), 3) << "middle by sin... cos and mul, cos(middle) by mul";
    const at::Tensor plain = iota({7, 4}).requires_grad_();
    (plain.sin() * plain.sin().cos()).sum().backward();
    expect_close(full(x.grad()), plain.grad());
  });
}

TEST(SavedSharded, ParametersSmallAndUndividableTensorsStayWhole) {
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const DTensor x(at::Tensor(place(iota({2, 4}), mesh, {Replicate()})).requires_grad_());
    const auto gathers = [&](int64_t dim, SavedShardedOptions options, auto forward) {
      at::Tensor y;
      {
        const SavedSharded guard(mesh, dim, options);
        y = forward(x);
      }
      CommDebugMode comm;
      y.sum().backward();
      return comm.count("all_gather");
    };
    const auto twice = [](const at::Tensor& t) { return (t * 2).sin(); };
    EXPECT_EQ(gathers(1, kAnySize, twice), 1);
    EXPECT_EQ(gathers(0, kAnySize, twice), 0) << "fewer rows than ranks";
    EXPECT_EQ(gathers(5, kAnySize, twice), 0) << "no such dim";
    EXPECT_EQ(gathers(1, {}, twice), 0) << "64 bytes";
    EXPECT_EQ(gathers(1, kAnySize, [](const at::Tensor& t) { return t.sin(); }), 0) << "a leaf";
    const auto cut = [](const at::Tensor& t) { return DTensor(t).redistribute({Shard(1)}).exp(); };
    EXPECT_EQ(gathers(1, kAnySize, cut), 1) << "cut already: only its gradient is gathered";
  });
}

TEST(SavedSharded, WhatStaysWholeMayNotChangeBeforeBackward) {
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    const DTensor x(at::Tensor(place(iota({2, 4}), mesh, {Replicate()})).requires_grad_());
    const SavedSharded guard(mesh, 0);
    const at::Tensor y = x.exp();
    y.add_(1);
    EXPECT_THAT(error_text<c10::Error>([&] { y.sum().backward(); }),
                HasSubstr("[SavedSharded] a tensor that autograd saved, f64[2,4], has been changed by an in-place "
                          "operation since: it is at version 1, expected version 0"));
  });
}

TEST(SavedSharded, InputsOfRecomputedSegmentsAreCutToo) {
  on_mesh({2}, [&](const DeviceMesh& mesh) {
    torch::nn::Sequential net = cut_mlp(mesh, 0);
    const DTensor x(at::Tensor(place(models::values({5, 6}, 1).to(at::kDouble), mesh, {Replicate()})).requires_grad_());
    const auto forward = [&](auto call) {
      const at::Tensor first = x.sin();
      return at::Tensor(call(call(first)));
    };
    const auto block = [&](const at::Tensor& t) {
      return at::Tensor(DTensor(net->forward(t)).redistribute({Replicate()}));
    };
    const auto plain = gradients(net, x, [&] { return forward(block); });
    c10::weak_intrusive_ptr<c10::StorageImpl> input{c10::intrusive_ptr<c10::StorageImpl>()};
    const auto both = gradients(net, x, [&] {
      const SavedSharded guard(mesh, 1, kAnySize);
      return forward([&](const at::Tensor& t) { return recompute(block, t); });
    });
    for (size_t i = 0; i < plain.size(); ++i) expect_equal(both[i], plain[i], std::to_string(i));
  });
}

TEST(SavedSharded, TheMeshHasOneAxisAndThisRank) {
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    EXPECT_THAT(error_text<c10::ValueError>([&] { const SavedSharded guard(mesh, 0); }),
                HasSubstr("[SavedSharded] mesh 2x2 has 2 axes\n"
                          "  fix: pass the axis over which activations are whole: mesh[\"tp\"]"));
    const DeviceMesh half("cpu", torch::tensor({0, 1}), {}, {.group = mesh.root_group()});
    if (half.contains_this_rank()) return;
    EXPECT_THAT(error_text<c10::ValueError>([&] { const SavedSharded guard(half, 0); }),
                HasSubstr(c10::str("[SavedSharded] rank ", mesh.get_rank(), " is not in mesh 2")));
  });
}

}  // namespace
}  // namespace serried::testing
