// LossParallel: what it forbids, how it nests, and a captured step of a model whose head is cut by classes.
#include "serried/parallel/loss_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "serried/graph/capture.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/making/modules.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

TEST(LossParallel, NestsAndRestoresAlsoAfterAnException) {
  EXPECT_FALSE(LossParallel::is_enabled());
  {
    const LossParallel outer;
    {
      const LossParallel inner;
      EXPECT_TRUE(LossParallel::is_enabled());
    }
    EXPECT_TRUE(LossParallel::is_enabled());
    {
      const LossParallel off(false);
      EXPECT_FALSE(LossParallel::is_enabled());
    }
    EXPECT_TRUE(LossParallel::is_enabled());
  }
  EXPECT_FALSE(LossParallel::is_enabled());
  try {
    const LossParallel guard;
    throw std::runtime_error("out of the scope");
  } catch (const std::runtime_error&) {
  }
  EXPECT_FALSE(LossParallel::is_enabled());
}

TEST(LossParallel, AGatherOfClassesIsNamedWithItsBytes) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor logits = place(torch::rand({3, 8}), mesh, {Shard(1)});
    const std::string at_rank = "\n  at:  rank " + std::to_string(mesh.get_rank()) + "/2";
    const LossParallel guard;
    EXPECT_EQ(
        error_text<c10::ValueError>([&] { at::argmax(logits, 1); }),
        "[aten::argmax] argument \"self\" f32[3,8] S1 on mesh 2 would be gathered along its classes, dim 1, inside "
        "a LossParallel scope: each rank sends 48 B\n"
        "  fix: use an op that takes cut classes (softmax, log_softmax, nll_loss, cross_entropy), or call "
        "redistribute(parse_placements(\"R\")) where the whole is wanted" +
            at_rank);
    const at::Tensor target = place(torch::tensor({1, 7, 4}, at::kLong), mesh, {Replicate()});
    for (const auto& gathers : std::vector<std::function<void()>>{
             [&] { logits.topk(2, 1); }, [&] { logits.sort(1); }, [&] { logits.cumsum(-1); }, [&] { logits.argmax(); },
             [&] { at::multi_margin_loss(logits, target); }, [&] { at::_safe_softmax(logits, 1); }}) {
      EXPECT_THAT(error_text<c10::ValueError>(gathers), HasSubstr("inside a LossParallel scope"));
    }
    CommDebugMode comm;
    EXPECT_NO_THROW(logits.sort(0)) << "nothing is gathered";
    EXPECT_NO_THROW(logits.sum(1));
    EXPECT_NO_THROW(logits.softmax(1));
    EXPECT_NO_THROW(DTensor(logits).redistribute({Replicate()}).argmax(1)) << "asked for";
    EXPECT_NO_THROW(logits.select(1, 0)) << "gathers, and only moves elements: limits.md";
    EXPECT_EQ(comm.count("all_gather"), 2);
    const LossParallel off(false);
    EXPECT_NO_THROW(at::argmax(logits, 1));
  });
}

TEST(LossParallel, BackwardRunsInsideAndAfterTheScope) {
  const at::Tensor x = torch::rand({5, 9}, at::kDouble);
  const at::Tensor y = torch::randint(9, {5}, at::kLong);
  const at::Tensor plain = x.clone().requires_grad_();
  torch::nn::functional::cross_entropy(plain, y).backward();
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const DTensor target = place(y, mesh, {Replicate()});
    const at::Tensor inside = at::Tensor(place(x, mesh, {Shard(1)})).detach().requires_grad_();
    const at::Tensor after = at::Tensor(place(x, mesh, {Shard(1)})).detach().requires_grad_();
    at::Tensor loss;
    {
      const LossParallel guard;
      torch::nn::functional::cross_entropy(inside, target).backward();
      loss = torch::nn::functional::cross_entropy(after, target);
    }
    loss.backward();
    expect_close(full(inside.grad()), plain.grad());
    expect_close(full(after.grad()), plain.grad());
  });
}

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    register_module("hidden", hidden);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::relu(hidden(x))); }
  torch::nn::Linear hidden{6, 8}, head{8, 11};
};
TORCH_MODULE(Classifier);

Classifier cut_classifier(const DeviceMesh& mesh) {
  Classifier net = seeded(5, [] { return Classifier(); });
  net->to(at::kDouble);
  const int64_t tp = mesh.ndim() - 1;
  const auto cut = [&](const Placement& placement) {
    Placements placements(size_t(mesh.ndim()));
    placements[size_t(tp)] = placement;
    return placements;
  };
  distribute_parameter(net->head->weight, mesh, cut(Shard(0)));
  distribute_parameter(net->head->bias, mesh, cut(Shard(0)));
  distribute_module(*net, mesh);
  return net;
}

// Losses of steps of a head cut by classes, the batch by the first of two axes.
std::vector<at::Tensor> train_classifier(const DeviceMesh& mesh, bool is_captured) {
  Classifier net = cut_classifier(mesh);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
  const auto eager = [&](const at::Tensor& x, const at::Tensor& y) {
    optimizer.zero_grad();
    const LossParallel guard;
    at::Tensor loss = torch::nn::functional::cross_entropy(
        net(x), y, torch::nn::functional::CrossEntropyFuncOptions().ignore_index(3));
    loss.backward();
    optimizer.step();
    return DTensor(loss).full_tensor();
  };
  auto captured = capture(eager);
  Placements of_batch(size_t(mesh.ndim()));
  if (mesh.ndim() == 2) of_batch[0] = Shard(0);
  std::vector<at::Tensor> losses;
  for (int step = 0; step < 6; ++step) {
    const at::Tensor x = seeded(uint64_t(step), [] { return torch::randn({5, 6}, at::kDouble); });
    const at::Tensor y = seeded(uint64_t(step), [] { return torch::randint(11, {5}, at::kLong); });
    const at::Tensor dx = place(x, mesh, of_batch), dy = place(y, mesh, of_batch);
    losses.push_back((is_captured ? captured(dx, dy) : eager(dx, dy)).detach().clone());
  }
  if (is_captured) EXPECT_GE(captured.replays(), 3);
  for (const at::Tensor& p : net->parameters()) losses.push_back(DTensor(p).full_tensor().detach());
  return losses;
}

std::vector<at::Tensor> train_whole_classifier() {
  Classifier net = seeded(5, [] { return Classifier(); });
  net->to(at::kDouble);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
  std::vector<at::Tensor> losses;
  for (int step = 0; step < 6; ++step) {
    const at::Tensor x = seeded(uint64_t(step), [] { return torch::randn({5, 6}, at::kDouble); });
    const at::Tensor y = seeded(uint64_t(step), [] { return torch::randint(11, {5}, at::kLong); });
    optimizer.zero_grad();
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        net(x), y, torch::nn::functional::CrossEntropyFuncOptions().ignore_index(3));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.detach());
  }
  for (const at::Tensor& p : net->parameters()) losses.push_back(p.detach());
  return losses;
}

TEST(LossParallel, TrainsAsOneProcessDoesAndCapturedBitForBit) {
  const std::vector<at::Tensor> want = train_whole_classifier();
  for (const Sizes& shape : std::vector<Sizes>{{2}, {3}, {2, 2}}) {
    on_mesh(shape, [&](const DeviceMesh& mesh) {
      const std::vector<at::Tensor> eager = train_classifier(mesh, false);
      const std::vector<at::Tensor> captured = train_classifier(mesh, true);
      ASSERT_EQ(eager.size(), want.size());
      for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_TRUE(at::allclose(eager[i], want[i], 1e-9, 1e-9)) << i;
        expect_equal(captured[i], eager[i], std::to_string(i));
      }
    });
  }
}

}  // namespace
}  // namespace serried::testing
