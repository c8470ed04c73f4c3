// Cross entropy of logits that are cut along their classes, through LibTorch's own functions, against one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>

#include "serried/comm/groups/ranks.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

namespace F = torch::nn::functional;

struct Batch {
  at::Tensor logits, target, weight;
};

Batch batch_of(const Sizes& sizes, int64_t seed = 3) {
  torch::manual_seed(uint64_t(seed));
  Sizes of_target = sizes;
  of_target.erase(of_target.begin() + (sizes.size() == 1 ? 0 : 1));
  const int64_t classes = sizes[sizes.size() == 1 ? 0 : 1];
  return {torch::randn(sizes, at::kDouble) * 2, torch::randint(classes, of_target, at::kLong),
          torch::rand({classes}, at::kDouble) + 0.1};
}

using ClassLoss = std::function<at::Tensor(const Batch&)>;

std::pair<at::Tensor, at::Tensor> loss_and_gradient(Batch batch, const ClassLoss& loss) {
  batch.logits = batch.logits.detach().requires_grad_();
  const at::Tensor value = loss(batch);
  (value * value).sum().backward();
  return {value.detach(), batch.logits.grad()};
}

// Targets lie like the logits without their classes: a cut of the classes leaves them whole.
Placements beside_classes(const Placements& logits, int64_t class_dim) {
  Placements result(logits.size());
  for (size_t axis = 0; axis < logits.size(); ++axis) {
    if (!logits[axis].is_shard() || logits[axis].is_shard(class_dim)) continue;
    result[axis] = Shard(logits[axis].dim() > class_dim ? logits[axis].dim() - 1 : logits[axis].dim());
  }
  return result;
}

void expect_one_process(const Batch& whole, const ClassLoss& loss, const std::vector<Sizes>& meshes = usual_meshes()) {
  const auto [want, want_grad] = loss_and_gradient(whole, loss);
  const int64_t class_dim = whole.logits.dim() == 1 ? 0 : 1;
  for (const Sizes& shape : meshes) {
    on_mesh(shape, [&, want = want, want_grad = want_grad](const DeviceMesh& mesh) {
      for (const Placements& placements : all_placements(whole.logits.dim(), shape.size(), false)) {
        const bool same_shape = whole.target.sizes() == whole.logits.sizes();
        const Placements of_target = same_shape ? placements : beside_classes(placements, class_dim);
        const Batch cut = {place(whole.logits, mesh, placements), place(whole.target, mesh, of_target),
                           place(whole.weight, mesh, Placements(shape.size()))};
        const auto [got, grad] = loss_and_gradient(cut, loss);
        EXPECT_TRUE(at::allclose(full(got), want, 1e-9, 1e-9, /*equal_nan=*/true))
            << to_string(placements) << full(got) << want;
        EXPECT_TRUE(at::allclose(full(grad), want_grad, 1e-9, 1e-9, /*equal_nan=*/true)) << to_string(placements);
      }
    });
  }
}

const std::vector<F::CrossEntropyFuncOptions::reduction_t>& reductions() {
  static const std::vector<F::CrossEntropyFuncOptions::reduction_t> all = {torch::kMean, torch::kSum, torch::kNone};
  return all;
}

TEST(CutClasses, EveryReductionWithWeightsAndIgnoredTargets) {
  Batch batch = batch_of({6, 5});
  for (const auto& reduction : reductions()) {
    for (const int64_t ignored : {int64_t(-100), int64_t(3), int64_t(-1), int64_t(77)}) {
      batch.target[1] = ignored;
      expect_one_process(batch, [&](const Batch& b) {
        return F::cross_entropy(
            b.logits, b.target,
            F::CrossEntropyFuncOptions().weight(b.weight).reduction(reduction).ignore_index(ignored));
      });
      expect_one_process(batch, [&](const Batch& b) {
        return F::cross_entropy(b.logits, b.target,
                                F::CrossEntropyFuncOptions().reduction(reduction).ignore_index(ignored));
      });
    }
  }
}

TEST(CutClasses, FewerThanRanks) {
  for (const auto& reduction : reductions()) {
    expect_one_process(batch_of({5, 2}), [&](const Batch& b) {
      return F::cross_entropy(b.logits, b.target, F::CrossEntropyFuncOptions().weight(b.weight).reduction(reduction));
    });
  }
}

TEST(CutClasses, SmoothedLabels) {
  Batch batch = batch_of({5, 7});
  batch.target[2] = 1;
  for (const auto& reduction : reductions()) {
    expect_one_process(batch, [&](const Batch& b) {
      return F::cross_entropy(
          b.logits, b.target,
          F::CrossEntropyFuncOptions().weight(b.weight).reduction(reduction).ignore_index(1).label_smoothing(0.2));
    });
    expect_one_process(batch, [&](const Batch& b) {
      return F::cross_entropy(b.logits, b.target,
                              F::CrossEntropyFuncOptions().reduction(reduction).label_smoothing(0.2));
    });
  }
}

TEST(CutClasses, ProbabilitiesAsTargets) {
  Batch batch = batch_of({4, 5});
  batch.target = at::softmax(torch::randn({4, 5}, at::kDouble), 1);
  for (const auto& reduction : reductions()) {
    expect_one_process(batch, [&](const Batch& b) {
      return F::cross_entropy(b.logits, b.target,
                              F::CrossEntropyFuncOptions().weight(b.weight).reduction(reduction).label_smoothing(0.1));
    });
  }
}

TEST(CutClasses, OneSampleSequencesImagesAndVolumes) {
  for (const Sizes& sizes : std::vector<Sizes>{{5}, {2, 5, 3}, {2, 5, 2, 3}, {2, 3, 2, 1, 2}}) {
    for (const auto& reduction : reductions()) {
      expect_one_process(batch_of(sizes),
                         [&](const Batch& b) {
                           return F::cross_entropy(b.logits, b.target,
                                                   F::CrossEntropyFuncOptions().weight(b.weight).reduction(reduction));
                         },
                         {{3}, {2, 2}});
    }
  }
}

TEST(CutClasses, TheModuleAndLogProbabilities) {
  expect_one_process(batch_of({6, 5}), [](const Batch& b) {
    torch::nn::CrossEntropyLoss module;
    torch::nn::NLLLoss of_logs;
    return module(b.logits, b.target) + of_logs(at::log_softmax(b.logits, 1), b.target);
  });
}

TEST(CutClasses, NothingLeftIsNotANumber) {
  Batch batch = batch_of({4, 5});
  batch.target.fill_(2);
  expect_one_process(batch, [](const Batch& b) {
    return F::cross_entropy(b.logits, b.target, F::CrossEntropyFuncOptions().ignore_index(2));
  });
}

TEST(CutClasses, LogitsOfMinusInfinity) {
  Batch batch = batch_of({4, 6});
  batch.logits.index_put_({0, torch::indexing::Slice(0, 5)}, -std::numeric_limits<double>::infinity());
  batch.target[0] = 5;
  batch.logits.index_put_({2, 1}, -std::numeric_limits<double>::infinity());
  batch.target[2] = 0;
  expect_one_process(batch, [](const Batch& b) { return F::cross_entropy(b.logits, b.target); });
}

TEST(CutClasses, WeightsMayBeCutToo) {
  const Batch whole = batch_of({5, 7});
  const auto loss = [](const Batch& b) {
    return F::cross_entropy(b.logits, b.target, F::CrossEntropyFuncOptions().weight(b.weight));
  };
  const auto [want, want_grad] = loss_and_gradient(whole, loss);
  on_mesh({3}, [&, want = want, want_grad = want_grad](const DeviceMesh& mesh) {
    const auto [got, grad] =
        loss_and_gradient({place(whole.logits, mesh, {Shard(1)}), place(whole.target, mesh, {Replicate()}),
                           place(whole.weight, mesh, {Shard(0)})},
                          loss);
    expect_close(full(got), want);
    expect_close(full(grad), want_grad);
  });
}

TEST(CutClasses, TargetsCutAlongTheSameAxisAndShortIntegers) {
  const Batch whole = batch_of({8, 9});
  const at::Tensor want = F::cross_entropy(whole.logits, whole.target);
  on_mesh({4}, [&](const DeviceMesh& mesh) {
    const DTensor logits = place(whole.logits, mesh, {Shard(1)});
    expect_close(full(F::cross_entropy(logits, place(whole.target, mesh, {Shard(0)}))), want);
    expect_close(full(at::nll_loss(at::log_softmax(logits, 1), place(whole.target.to(at::kByte), mesh, {Replicate()}))),
                 want);
  });
}

// Whatever the sizes, and whichever of the two would cost less to move.
TEST(CutClasses, TargetsMoveWhereTheyAreCutAlongTheSameAxis) {
  for (const Sizes& sizes : std::vector<Sizes>{{2, 2}, {100, 3}, {8, 100}}) {
    const Batch whole = batch_of(sizes);
    const auto sum = F::CrossEntropyFuncOptions().reduction(torch::kSum);
    const at::Tensor want = F::cross_entropy(whole.logits, whole.target),
                     want_sum = F::cross_entropy(whole.logits, whole.target, sum);
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      at::Tensor logits = place(whole.logits, mesh, {Shard(1)}).requires_grad_();
      const at::Tensor target = place(whole.target, mesh, {Shard(0)});
      CommDebugMode comm;
      const at::Tensor mean = F::cross_entropy(logits, target), total = F::cross_entropy(logits, target, sum);
      (mean + total).backward();
      EXPECT_EQ(comm.count("all_to_all"), 0);
      EXPECT_EQ(comm.count("all_gather"), 4);  // of the targets, by each of the two forward and backward
      expect_close(full(mean), want);
      expect_close(full(total), want_sum);
    });
  }
}

TEST(CutClasses, HalfNumbers) {
  Batch whole = batch_of({8, 300});
  whole.logits = whole.logits.to(at::kBFloat16);
  const auto loss = [](const Batch& b) { return F::cross_entropy(b.logits, b.target); };
  const auto [want, want_grad] = loss_and_gradient(whole, loss);
  on_mesh({4}, [&, want = want, want_grad = want_grad](const DeviceMesh& mesh) {
    const auto [got, grad] =
        loss_and_gradient({place(whole.logits, mesh, {Shard(1)}), place(whole.target, mesh, {Replicate()}), {}}, loss);
    EXPECT_EQ(got.scalar_type(), at::kBFloat16);
    EXPECT_NEAR(full(got).item<float>(), want.item<float>(), 0.05 * want.item<float>());
    EXPECT_TRUE(at::allclose(full(grad), want_grad, 5e-2, 1e-2));
  });
}

struct Counted {
  const char* name;
  ClassLoss loss;
};

std::vector<Counted> counted_losses() {
  const auto with = [](auto options) {
    return [options](const Batch& b) {
      auto own = options;
      if (own.weight().defined()) own.weight(b.weight);
      return F::cross_entropy(b.logits, b.target, own);
    };
  };
  using Options = F::CrossEntropyFuncOptions;
  const at::Tensor some = torch::ones({1});
  return {{"mean", with(Options())},
          {"sum", with(Options().reduction(torch::kSum))},
          {"none", with(Options().reduction(torch::kNone))},
          {"weights", with(Options().weight(some))},
          {"weights, sum", with(Options().weight(some).reduction(torch::kSum))},
          {"ignored", with(Options().ignore_index(1))},
          {"smoothed", with(Options().label_smoothing(0.1))},
          {"smoothed with weights", with(Options().label_smoothing(0.1).weight(some))}};
}

// Also where so few numbers are cheap to gather: what happens does not depend on the sizes.
TEST(CutClasses, SendTwoNumbersPerRowAndOneInBackward) {
  for (const Sizes& sizes : std::vector<Sizes>{{6, 40}, {2, 3}}) {
    const Batch whole = batch_of(sizes);
    for (const Counted& counted : counted_losses()) {
      for (const Sizes& shape : std::vector<Sizes>{{2}, {4}, {2, 2}}) {
        on_mesh(shape, [&](const DeviceMesh& mesh) {
          const Placements whole_everywhere(shape.size());
          const Batch cut = {
              at::Tensor(place(whole.logits, mesh, Placements(shape.size(), Shard(1)))).detach().requires_grad_(),
              place(whole.target, mesh, whole_everywhere), place(whole.weight, mesh, whole_everywhere)};
          CommDebugMode comm;
          const at::Tensor loss = counted.loss(cut);
          EXPECT_EQ(comm.count("all_reduce"), 2) << counted.name;
          loss.backward(at::ones_like(loss));
          EXPECT_EQ(comm.count("all_reduce"), 3) << counted.name;
          EXPECT_EQ(comm.bytes(), 3 * sizes[0] * int64_t(sizeof(double))) << counted.name;
          EXPECT_EQ(comm.count("all_gather") + comm.count("reduce_scatter") + comm.count("all_to_all"), 0)
              << counted.name << comm.report();
          EXPECT_EQ(DTensor(cut.logits.grad()).placements(), Placements(shape.size(), Shard(1)));
        });
      }
    }
  }
}

TEST(CutClasses, ACutBatchAddsOneNumber) {
  const Batch whole = batch_of({6, 8});
  on_mesh({2, 2}, [&](const DeviceMesh& mesh) {
    const at::Tensor logits = at::Tensor(place(whole.logits, mesh, {Shard(0), Shard(1)})).detach().requires_grad_();
    const DTensor target = place(whole.target, mesh, {Shard(0), Replicate()});
    CommDebugMode comm;
    const at::Tensor loss = F::cross_entropy(logits, target);
    EXPECT_EQ(comm.count("all_reduce"), 3) << "how many samples all ranks have";
    loss.backward();
    EXPECT_EQ(comm.count("all_reduce"), 4);
    EXPECT_EQ(comm.count("all_gather") + comm.count("reduce_scatter") + comm.count("all_to_all"), 0);
  });
}

// As language models write it: tokens flattened, or classes moved to dim 1.
TEST(CutClasses, LogitsOfTokens) {
  const int64_t words = 11;
  const at::Tensor logits = seeded(4, [&] { return torch::randn({4, 3, words}, at::kDouble); });
  const at::Tensor target = seeded(5, [&] { return torch::randint(words, {4, 3}, at::kLong); });
  for (const bool flattened : {true, false}) {
    const ClassLoss loss = [&](const Batch& b) {
      return flattened ? F::cross_entropy(b.logits.view({-1, words}), b.target.view({-1}))
                       : F::cross_entropy(b.logits.transpose(1, 2), b.target);
    };
    const auto [want, want_grad] = loss_and_gradient({logits, target, {}}, loss);
    on_mesh({2, 2}, [&, want = want, want_grad = want_grad](const DeviceMesh& mesh) {
      for (const Placement& of_batch : {Placement(Replicate()), Placement(Shard(0))}) {
        CommDebugMode comm;
        const auto [got, grad] = loss_and_gradient(
            {place(logits, mesh, {of_batch, Shard(2)}), place(target, mesh, {of_batch, Replicate()}), {}}, loss);
        EXPECT_EQ(comm.count("all_gather") + comm.count("reduce_scatter") + comm.count("all_to_all"), 0)
            << comm.report();
        EXPECT_EQ(DTensor(grad).placements(), Placements({of_batch, Shard(2)}));
        expect_close(full(got), want);
        expect_close(full(grad), want_grad);
      }
    });
  }
}

TEST(CutClasses, ATargetThatIsNoClassIsNamed) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor logits = place(torch::zeros({3, 5}), mesh, {Shard(1)});
    for (const int64_t wrong : {int64_t(5), int64_t(-2)}) {
      const DTensor target = place(torch::tensor({int64_t(0), wrong, int64_t(-100)}), mesh, {Replicate()});
      EXPECT_EQ(error_text<c10::IndexError>([&] { F::cross_entropy(logits, target); }),
                "[aten::nll_loss_forward] target " + std::to_string(wrong) +
                    " is none of the 5 classes\n"
                    "  fix: pass targets from 0 to 4, or -100 for one to ignore\n"
                    "  at:  rank " +
                    std::to_string(mesh.get_rank()) + "/2");
    }
  });
}

TEST(CutClasses, PlainTargetsInAnImplicitReplication) {
  const Batch whole = batch_of({6, 5});
  on_mesh({3}, [&](const DeviceMesh& mesh) {
    const ImplicitReplication guard;
    const DTensor logits = place(whole.logits, mesh, {Shard(1)});
    expect_close(full(F::cross_entropy(logits, whole.target)), F::cross_entropy(whole.logits, whole.target));
  });
}

}  // namespace
}  // namespace serried::testing
