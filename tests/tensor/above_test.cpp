// Parameters that ask layouts of their consumers: which ops count as such, what is remembered, and what carries marks.
#include "serried/tensor/above.h"

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/torch.h>

#include <map>

#include "serried/graph/capture.h"
#include "serried/tape/library_hook.h"
#include "serried/tensor/above_key.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/making/modules.h"
#include "serried/tensor/meta.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using detail::AskedLayout;
using detail::Role;
using ::testing::HasSubstr;
using Counts = std::map<std::string, int64_t>;

bool is_marked(const at::Tensor& t) {
  return t.key_set().has(kAboveKey);
}

// A matrix [5, 4] cut by rows, whose consumers take all of the tokens and give a part of the features.
at::Tensor marked_matrix(const DeviceMesh& mesh, Placements input = {Replicate()}, Placements output = {Shard(-1)}) {
  at::Tensor w = seeded(1, [] { return torch::randn({5, 4}, at::kDouble); }).requires_grad_();
  distribute_parameter(w, mesh, {Shard(0)});
  set_role(w, mesh, Role::matrix, {AskedLayout(std::move(input)), AskedLayout(std::move(output))});
  return w;
}

at::Tensor tokens(at::IntArrayRef sizes = {2, 3, 4}) {
  return seeded(2, [&] { return torch::randn(sizes, at::kDouble); });
}

TEST(AskedLayouts, EveryConsumerOfAMatrixBringsItsInputAndOutputThere) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh), plain = full(w.detach());
    const at::Tensor bias = at::ones({5}, at::kDouble);
    const at::Tensor b = place(bias, mesh, {Shard(0)});
    const at::Tensor flat = tokens({6, 4}), deep = tokens();
    const auto on = [&](const at::Tensor& x, const Placement& p) { return at::Tensor(place(x, mesh, {p})); };
    const auto expect = [&](const at::Tensor& y, const at::Tensor& expected, const char* what) {
      EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(y.dim() - 1)})) << what;
      expect_close(full(y.detach()), expected, what);
    };
    expect(on(flat, Shard(0)).mm(w.t()), flat.mm(plain.t()), "mm");
    expect(flat.mm(w.t()), flat.mm(plain.t()), "mm of a plain tensor");
    expect(at::addmm(b, on(flat, Shard(0)), w.t()), at::addmm(bias, flat, plain.t()), "addmm");
    expect(on(deep, Shard(1)).matmul(w.transpose(0, 1)), deep.matmul(plain.t()), "matmul");
    expect(on(deep, Shard(0)).matmul(w.transpose(-1, 0)), deep.matmul(plain.t()), "matmul");
    expect(at::linear(on(deep, Shard(1)), w, b), at::linear(deep, plain, bias), "linear");
    expect(at::matmul(on(deep, Partial())[0][0], w.t()), deep[0][0].matmul(plain.t()), "a vector");
  });
}

TEST(AskedLayouts, WhatIsNoConsumptionGoesByRules) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh), plain = full(w.detach());
    const at::Tensor left = place(tokens({3, 5}), mesh, {Shard(1)});
    const at::Tensor y = left.mm(w);
    EXPECT_EQ(DTensor(y).placements(), (Placements{Partial()})) << "not transposed: a gradient of a layer";
    expect_close(full(y.detach()), full(left).mm(plain));
    const at::Tensor z = w.mm(place(tokens({4, 3}), mesh, {Replicate()}));
    EXPECT_EQ(DTensor(z).placements(), (Placements{Shard(0)})) << "on the left";
  });
}

TEST(AskedLayouts, OnlyParametersAndTheirTransposesCarryTheMark) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh);
    EXPECT_TRUE(is_marked(w));
    EXPECT_TRUE(is_marked(w.t()));
    EXPECT_TRUE(is_marked(w.transpose(0, -1)));
    for (const at::Tensor& t : {w.detach(), w.clone(), w * 1, w.t().t(), w.transpose(0, 0), w.view({4, 5}), w.alias(),
                                w.mm(w.t()), at::zeros_like(w), w.to(at::kFloat), w.unsqueeze(0)}) {
      EXPECT_FALSE(is_marked(t));
    }
    w.square().sum().backward();
    EXPECT_FALSE(is_marked(w.grad()));
    set_use(w, nullptr);
    EXPECT_FALSE(is_marked(w));
  });
}

TEST(AskedLayouts, TablesAndNormsHaveRolesOfTheirOwn) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh);
    set_role(w, mesh, Role::table, {AskedLayout({Replicate()}), AskedLayout({Shard(1)})});
    const at::Tensor ids = torch::tensor({{0, 4, 2, 1}}, at::kLong);
    const at::Tensor found = at::embedding(w, ids);
    EXPECT_EQ(DTensor(found).placements(), (Placements{Shard(1)}));
    expect_close(full(found.detach()), at::embedding(full(w.detach()), ids));
    EXPECT_EQ(DTensor(tokens().matmul(w.t())).placements(), (Placements{Shard(2)})) << "the other role stays";

    const at::Tensor scale = seeded(3, [] { return torch::randn({4}, at::kDouble); }).requires_grad_();
    const at::Tensor leaf = scale.detach().clone().requires_grad_();
    distribute_parameter(scale, mesh);
    set_role(scale, mesh, Role::norm, {AskedLayout({Shard(1)}), AskedLayout({Shard(1)})});
    const at::Tensor x = place(tokens(), mesh, {Replicate()});
    const at::Tensor y = at::rms_norm(x, {4}, scale), expected = at::rms_norm(tokens(), {4}, leaf);
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(1)}));
    expect_close(full(y.detach()), expected.detach());
    y.square().sum().backward();
    expected.square().sum().backward();
    expect_close(full(scale.grad()), leaf.grad());
  });
}

TEST(AskedLayouts, ATensorOfAnotherMeshIsRefusedByTheOp) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const DeviceMesh named = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = mesh.root_group()});
    const at::Tensor w = marked_matrix(named["tp"]);
    const at::Tensor x = place(tokens({6, 4}), named, {Shard(0), Replicate()});
    EXPECT_THAT(error_text<c10::ValueError>([&] { x.mm(w.t()); }), HasSubstr("bring both to one mesh"));
  });
}

TEST(AskedLayouts, MovesThatAStyleAsksForAreNoHiddenOnes) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh, {Replicate()}, {Replicate()});
    const at::Tensor x = place(tokens(), mesh, {Shard(1)});
    const ExplicitRedistribution guard;
    EXPECT_NO_THROW(x.matmul(w.t()));
  });
}

TEST(AskedLayouts, NothingIsRememberedAcrossTheEdgesOfARecording) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh), v = marked_matrix(mesh);
    const at::Tensor x = place(tokens(), mesh, {Shard(1)});
    const auto eager = [&] {
      const at::NoGradGuard no_grad;
      return full(x.matmul(w.t()) + x.matmul(v.t()));
    };
    auto captured = capture(eager);
    for (int call = 0; call < 6; ++call) {
      const at::Tensor expected = eager();  // leaves something behind
      expect_equal(captured(), expected);
      const at::NoGradGuard no_grad;
      x.add_(1);
    }
    EXPECT_GE(captured.replays(), 3);
    EXPECT_EQ(captured.graph().count("all_gather"), 2) << "one on the way in, one of full_tensor()";
  });
}

TEST(AskedLayouts, NewDataOfAnInputIsSeen) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh), plain = full(w.detach());
    const at::Tensor x = tokens({2, 4}).requires_grad_(), dx = place(tokens({6, 4}), mesh, {Shard(0)});
    for (int call = 0; call < 4; ++call) {
      expect_close(full(x.mm(w.t()).detach()), x.detach().mm(plain.t()));
      expect_close(full(dx.mm(w.t()).detach()), full(dx).mm(plain.t()));
      x.set_data(x.detach() + 1);
      expect_close(full(x.mm(w.t()).detach()), x.detach().mm(plain.t()), "set_data leaves the version as it is");
      dx.set_data(dx + 1);
    }
  });
}

TEST(AskedLayouts, GradientsOfGradients) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor w = marked_matrix(mesh);
    const at::Tensor plain = full(w.detach()).requires_grad_();
    const at::Tensor x = place(tokens({3, 4}), mesh, {Shard(0)}).detach().requires_grad_();
    const at::Tensor leaf = tokens({3, 4}).requires_grad_();
    const auto penalty = [](const at::Tensor& input, const at::Tensor& weight) {
      const at::Tensor loss = input.mm(weight.t()).pow(3).sum();
      return torch::autograd::grad({loss}, {input}, {}, true, true)[0].square().sum();
    };
    penalty(x, w).backward();
    penalty(leaf, plain).backward();
    expect_close(full(x.grad()), leaf.grad());
    expect_close(full(w.grad()), plain.grad());
  });
}

TEST(AskedLayouts, AutocastComesAfterThem) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor plain = seeded(1, [] { return torch::randn({5, 4}); });
    const at::Tensor w = plain.clone().requires_grad_();
    distribute_parameter(w, mesh, {Shard(0)});
    set_role(w, mesh, Role::matrix, {AskedLayout({Replicate()}), AskedLayout({Shard(-1)})});
    const at::Tensor x = tokens().to(at::kFloat), dx = place(x, mesh, {Shard(1)});
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const at::Tensor y = dx.matmul(w.t()), expected = x.matmul(plain.t());
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(DTensor(y).placements(), (Placements{Shard(2)}));
    expect_equal(full(y.detach()), expected);
  });
}

TEST(AskedLayouts, NewDataForAMarkedParameterIsRefused) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    torch::nn::Linear linear(4, 6);
    distribute_module(*linear, mesh);
    set_role(linear->weight, mesh, Role::matrix, {});
    EXPECT_EQ(error_text<c10::NotImplementedError>([&] { linear->to(at::kDouble); }),
              "[set_data] f32[6,4] R on mesh 2 has a style, which new data would not have\n"
              "  fix: convert the module before parallelize_module, or write values into the parameter: copy_ under a "
              "NoGradGuard\n  at:  rank " +
                  std::to_string(mesh.get_rank()) + "/2");
    EXPECT_NO_THROW(linear->to(at::kFloat));
  });
}

TEST(JoinedSums, ReplicatedParametersOfOneBackwardAreSummedUpTogether) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    std::vector<at::Tensor> parameters, leaves;
    for (int i = 0; i < 4; ++i) {
      const at::Tensor p = seeded(uint64_t(i), [&] { return torch::randn({i + 1}, i < 3 ? at::kDouble : at::kFloat); });
      leaves.push_back(p.clone().requires_grad_());
      parameters.push_back(p.requires_grad_());
      distribute_parameter(parameters.back(), mesh);
    }
    const at::Tensor rows = seeded(9, [] { return torch::randn({7, 1}, at::kDouble); });
    const auto loss = [&](const std::vector<at::Tensor>& ps, const at::Tensor& x) {
      at::Tensor sum;
      for (const at::Tensor& p : ps) {
        const at::Tensor term = (x.to(p.dtype()) * p).sin().sum().to(at::kDouble);
        sum = sum.defined() ? sum + term : term;
      }
      return sum;
    };
    const at::Tensor x = place(rows, mesh, {Shard(0)});
    for (int pass = 0; pass < 2; ++pass) {
      loss(leaves, rows).backward();
      const at::Tensor total = loss(parameters, x);
      const CommDebugMode comm;
      total.backward();
      EXPECT_EQ(comm.counts(), (Counts{{"all_reduce", pass == 0 ? 2 : 4}})) << "by dtype; sums meet what is there";
      for (size_t i = 0; i < leaves.size(); ++i) {
        EXPECT_EQ(DTensor(parameters[i].grad()).placements(), (Placements{Replicate()}));
        expect_close(full(parameters[i].grad()), leaves[i].grad());
      }
    }
    const CommDebugMode comm;
    const at::Tensor asked = torch::autograd::grad({loss(parameters, x)}, {parameters[0]})[0];
    EXPECT_EQ(DTensor(asked).placements(), (Placements{Replicate()})) << "who asks for a gradient gets it whole";
  });
}

TEST(JoinedSums, WhoListensForAGradientSeesItWhole) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor p = at::ones({3}, at::kDouble).requires_grad_();
    distribute_parameter(p, mesh);
    std::vector<std::string> seen;
    const auto accumulator = torch::autograd::impl::grad_accumulator(p);
    accumulator->add_post_hook(library_post_hook([&] { seen.push_back(to_string(DTensor(p.grad()).placements())); }));
    (place(at::ones({4, 3}, at::kDouble), mesh, {Shard(0)}) * p).sum().backward();
    EXPECT_EQ(seen, std::vector<std::string>{"R"});
    expect_equal(full(p.grad()), at::full({3}, 4.0, at::kDouble));
  });
}

}  // namespace
}  // namespace serried::testing
