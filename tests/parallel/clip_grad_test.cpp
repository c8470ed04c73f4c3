// clip_grad_norm_ over plain parameters and DTensors of several meshes, beside LibTorch's own on whole tensors.
#include "serried/parallel/clip_grad.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <bit>
#include <cmath>
#include <limits>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// A gradient without a backward.
at::Tensor with_gradient(at::Tensor parameter, const at::Tensor& gradient) {
  parameter = parameter.detach().requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}

std::vector<at::Tensor> whole_gradients(at::ScalarType dtype = at::kDouble) {
  return seeded(9, [&] {
    return std::vector<at::Tensor>{torch::randn({5, 3}, dtype), torch::randn({7}, dtype), torch::randn({2, 3}, dtype),
                                   torch::randn({}, dtype), torch::randn({3, 4}, dtype) * 3};
  });
}

std::vector<at::Tensor> parameters_with(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> parameters;
  for (const at::Tensor& g : gradients) parameters.push_back(with_gradient(at::zeros_like(g), g.clone()));
  return parameters;
}

// Every rank has the bits of rank 0.
void expect_equal_on_ranks(double value, const Group& world) {
  at::Tensor of_first = at::full({1}, value, at::kDouble);
  broadcast_(of_first, world, {.src = 0});
  EXPECT_EQ(std::bit_cast<uint64_t>(of_first.item<double>()), std::bit_cast<uint64_t>(value));
}

// LibTorch has the norm of order 0 in f32.
double tolerance_of(double order) {
  return order == 0 ? 1e-6 : 1e-9;
}

// Plain, and cut in all ways of a mesh of two axes, of one of its axes, and of another mesh.
TEST(ClipGradNorm, AnyMixOfMeshesIsAsOnWholeTensors) {
  for (const double order : {2.0, 1.0, 3.0, 0.5, kInfinity, 0.0}) {
    for (const double max_norm : {0.7, 1e3}) {
      const std::vector<at::Tensor> gradients = whole_gradients();
      std::vector<at::Tensor> plain = parameters_with(gradients);
      const double want = torch::nn::utils::clip_grad_norm_(plain, max_norm, order);
      run_ranks(4, [&](const Group& world) {
        const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = world});
        const DeviceMesh line = init_device_mesh("cpu", {4}, {}, {.group = world});
        const std::vector<DTensor> cut = {
            place(gradients[0], mesh, {Shard(0), Shard(0)}), place(gradients[1], mesh["tp"], {Shard(0)}),
            place(gradients[2], line, {Shard(0)}), place(gradients[4], mesh, {Replicate(), Shard(1)})};
        std::vector<at::Tensor> parameters;
        for (const DTensor& g : cut) parameters.push_back(with_gradient(at::zeros_like(g), g));
        parameters.insert(parameters.begin() + 3, with_gradient(torch::zeros({}, at::kDouble), gradients[3].clone()));
        CommDebugMode comm;
        const GradNorm norm = clip_grad_norm_(parameters, max_norm, order);
        EXPECT_EQ(comm.count("all_reduce"), order == 0 ? 0 : 2) << "four ranks in two meshes, and two";
        EXPECT_NEAR(norm, want, 1e-9 * want);
        expect_equal_on_ranks(norm, world);
        for (size_t i = 0; i < parameters.size(); ++i) {
          EXPECT_TRUE(at::allclose(full(parameters[i].grad()), plain[i].grad(), tolerance_of(order), 1e-12))
              << i << " " << order;
        }
      });
    }
  }
}

TEST(ClipGradNorm, EveryPlacementPendingSumsAndEmptyParts) {
  const at::Tensor gradient = seeded(2, [] { return torch::randn({3, 2}, at::kDouble); });
  for (const double order : {2.0, kInfinity}) {
    std::vector<at::Tensor> plain = parameters_with({gradient});
    const double want = torch::nn::utils::clip_grad_norm_(plain, 0.5, order);
    for (const Sizes& shape : usual_meshes()) {
      on_mesh(shape, [&](const DeviceMesh& mesh) {
        for (const Placements& placements : all_placements(2, shape.size(), true)) {
          const DTensor cut = place(gradient, mesh, placements);
          const at::Tensor parameter = with_gradient(place(gradient, mesh, without_partial(placements)), cut);
          EXPECT_NEAR(clip_grad_norm_(parameter, 0.5, order), want, 1e-9) << to_string(placements);
          expect_close(full(parameter.grad()), plain[0].grad(), to_string(placements));
        }
      });
    }
  }
}

TEST(ClipGradNorm, WithoutRanksIsLibTorchs) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    std::vector<at::Tensor> ours = parameters_with(whole_gradients(dtype));
    std::vector<at::Tensor> theirs = parameters_with(whole_gradients(dtype));
    EXPECT_NEAR(clip_grad_norm_(ours, 0.3), torch::nn::utils::clip_grad_norm_(theirs, 0.3), 1e-5);
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::allclose(ours[i].grad(), theirs[i].grad(), 1e-5, 1e-7));
  }
  EXPECT_EQ(clip_grad_norm_(std::vector<at::Tensor>{}, 1.0), 0.0);
  EXPECT_EQ(clip_grad_norm_({torch::zeros({3}).requires_grad_()}, 1.0), 0.0) << "no gradient";
  at::Tensor half = with_gradient(torch::zeros({400}, at::kHalf), torch::full({400}, 100, at::kHalf));
  EXPECT_NEAR(clip_grad_norm_(half, 1.0), 2000, 1) << "the sum of squares is no number of this type";
}

TEST(ClipGradNorm, SparseGradientsOfEmbeddings) {
  const auto gradient = [](bool sparse) {
    torch::nn::Embedding table =
        seeded(3, [&] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 2).sparse(sparse)); });
    table(torch::tensor({1, 3, 1}, at::kLong)).pow(2).sum().backward();
    const double norm = clip_grad_norm_(table->parameters(), 0.1);
    return std::pair(norm, sparse ? table->weight.grad().to_dense() : table->weight.grad());
  };
  const auto [norm, grad] = gradient(true);
  const auto [want, want_grad] = gradient(false);
  EXPECT_NEAR(norm, want, 1e-5);
  expect_close(grad, want_grad);
}

TEST(ClipGradNorm, SaysWhatIsNotFinite) {
  for (const double bad : {kInfinity, std::nan("")}) {
    for (const double order : {2.0, kInfinity}) {
      on_mesh({3}, [&](const DeviceMesh& mesh) {
        at::Tensor gradient = torch::ones({5}, at::kDouble);
        gradient[4] = bad;
        const at::Tensor parameter =
            with_gradient(place(torch::zeros({5}, at::kDouble), mesh, {Shard(0)}), place(gradient, mesh, {Shard(0)}));
        EXPECT_EQ(error_text<c10::Error>([&] { clip_grad_norm_(parameter, 1.0, order, {.error_if_nonfinite = true}); }),
                  c10::str("[clip_grad_norm_] the norm of order ", order, " of the gradients is ", bad,
                           ", so it cannot be clipped\n"
                           "  fix: find what made it so, or leave error_if_nonfinite out to scale by it all the same\n"
                           "  at:  rank ",
                           mesh.get_rank(), "/3"));
        expect_equal(full(parameter.grad()).slice(0, 0, 4), gradient.slice(0, 0, 4), "left as they were");
        const double norm = clip_grad_norm_(parameter, 1.0, order);
        EXPECT_TRUE(std::isnan(bad) ? std::isnan(norm) : norm == bad);
      });
    }
  }
}

TEST(ClipGradNorm, RefusesNumbersThatMeanNothing) {
  EXPECT_EQ(error_text<c10::ValueError>([] { clip_grad_norm_(std::vector<at::Tensor>{}, -1.0); }),
            "[clip_grad_norm_] max_norm is -1\n  fix: pass 0 or more");
  EXPECT_EQ(error_text<c10::ValueError>([] { clip_grad_norm_(std::vector<at::Tensor>{}, 1.0, -kInfinity); }),
            "[clip_grad_norm_] norm_type is -inf\n  fix: pass a number or infinity");
}

// Stages hold other parameters; one has none with a gradient.
TEST(ClipGradNorm, StagesOfAPipelineShareTheNorm) {
  const std::vector<at::Tensor> gradients = whole_gradients();
  for (const double order : {2.0, kInfinity, 0.0}) {
    std::vector<at::Tensor> plain = parameters_with({gradients[0], gradients[1]});
    const double want = torch::nn::utils::clip_grad_norm_(plain, 0.5, order);
    run_ranks(3, [&](const Group& stages) {
      const size_t rank = size_t(stages->getRank());
      std::vector<at::Tensor> own;
      if (rank < 2) own = parameters_with({gradients[rank]});
      const double norm = clip_grad_norm_(own, 0.5, order, {.pipeline = stages});
      EXPECT_NEAR(norm, want, 1e-9 * want);
      expect_equal_on_ranks(norm, stages);
      if (rank < 2) EXPECT_TRUE(at::allclose(own[0].grad(), plain[rank].grad(), tolerance_of(order), 1e-12));
    });
  }
}

TEST(ClipGradNorm, ARankWithoutTheGradientTakesPart) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor parameter = at::Tensor(place(torch::zeros({4}), mesh, {Shard(0)})).detach().requires_grad_();
    if (mesh.get_rank() == 0) parameter.mutable_grad() = at::ones_like(parameter);
    EXPECT_NEAR(clip_grad_norm_(parameter, 10.0), std::sqrt(2.0), 1e-6) << "what rank 0 has of it";
  });
}

// A replay would let a NaN pass.
TEST(ClipGradNorm, ErrorIfNonfiniteIsRefusedInACapturedStep) {
  const at::Tensor p = torch::ones({3}).requires_grad_();
  auto step = capture([&](const at::Tensor& x) {
    p.mutable_grad().reset();
    (p * x).sum().backward();
    clip_grad_norm_(p, 1.0, 2.0, {.error_if_nonfinite = true});
    return p.grad().clone();
  });
  EXPECT_THAT(
      testing::error_text<c10::NotImplementedError>([&] {
        for (int i = 0; i < 4; ++i) step(torch::ones({3}));
      }),
      ::testing::HasSubstr("[clip_grad_norm_] error_if_nonfinite reads the norm on the host, which a replay does "
                           "not do\n  fix: return norm.tensor() from the captured function and look at it "
                           "outside"));
}

// A captured step that drops the norm never reads it.
TEST(ClipGradNorm, ACapturedStepClipsBitForBit) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto train = [&](bool is_captured) {
      torch::nn::Linear net = seeded(4, [] { return torch::nn::Linear(6, 5); });
      torch::nn::Linear other = seeded(5, [] { return torch::nn::Linear(5, 3); });
      distribute_parameter(net->weight, mesh, {Replicate(), Shard(0)});
      distribute_parameter(net->bias, mesh, {Replicate(), Shard(0)});
      distribute_parameter(other->weight, mesh, {Shard(0), Shard(1)});
      distribute_parameter(other->bias, mesh, {Replicate(), Replicate()});
      std::vector<at::Tensor> parameters = net->parameters();
      for (const at::Tensor& p : other->parameters()) parameters.push_back(p);
      torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
      const auto step = [&](const at::Tensor& x) {
        optimizer.zero_grad();
        at::Tensor loss = other(torch::tanh(net(x))).pow(2).sum() * 10;
        loss.backward();
        clip_grad_norm_(parameters, 0.5);
        optimizer.step();
        return loss;
      };
      auto captured = capture(step);
      for (int i = 0; i < 6; ++i) {
        const at::Tensor x = place(seeded(uint64_t(i),
                                          [] {
                                            return torch::randn({4, 6});
                                          }),
                                   mesh, {Shard(0), Replicate()});
        is_captured ? captured(x) : step(x);
      }
      if (is_captured) EXPECT_GE(captured.replays(), 3);
      std::vector<at::Tensor> end;
      for (const at::Tensor& p : parameters) end.push_back(DTensor(p).full_tensor().detach());
      return end;
    };
    const std::vector<at::Tensor> eager = train(false), captured = train(true);
    for (size_t i = 0; i < eager.size(); ++i) expect_equal(captured[i], eager[i], std::to_string(i));
  });
}

}  // namespace
}  // namespace serried::testing
