// Experts with capture, recompute, DistributedDataParallel, fully_shard and clipping.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/expert_parallel/moe.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/recompute.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/expert_parallel/routed.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::testing::moe_together {
namespace {

using ::testing::HasSubstr;
using namespace routed;

constexpr int64_t kExperts = 4, kTokens = 6, kSteps = 20;
constexpr double kMaxNorm = 0.1;  // below the norms of all steps

/// What ranks share: layers before and after, and the router.
struct SharedImpl : torch::nn::Module {
  SharedImpl() {
    register_module("in", in);
    register_module("router", router);
    register_module("out", out);
  }
  /// `experts` is called with tokens and logits.
  at::Tensor forward(const at::Tensor& x,
                     const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& experts) {
    const at::Tensor tokens = torch::tanh(in(x));
    return out(tokens + experts(tokens, router(tokens)));
  }
  torch::nn::Linear in{kWidth, kWidth}, router{kWidth, kExperts}, out{kWidth, 3};
};
TORCH_MODULE(Shared);

/// Weights [experts, in, out].
struct ExpertsImpl : torch::nn::Module {
  ExpertsImpl() {
    up = register_parameter("up", at::empty({kExperts, kWidth, kHidden}));
    bias = register_parameter("bias", at::empty({kExperts, kHidden}));
    down = register_parameter("down", at::empty({kExperts, kHidden, kWidth}));
  }
  at::Tensor forward(const DispatchedTokens& sent) {
    return expert_linear(torch::gelu(expert_linear(sent.tokens, sent, up, bias)), sent, down);
  }
  at::Tensor up, bias, down;
};
TORCH_MODULE(Experts);

struct Nets {
  Shared shared;
  Experts experts;
  explicit Nets(at::ScalarType dtype) {
    models::fill_parameters(*shared);
    models::fill_parameters(*experts);
    shared->to(dtype);
    experts->to(dtype);
  }
  std::vector<at::Tensor> parameters() const {
    std::vector<at::Tensor> all = shared->parameters();
    for (const at::Tensor& p : experts->parameters()) all.push_back(p);
    return all;
  }
};

at::Tensor batch_of(int64_t rank, int64_t step, at::ScalarType dtype) {
  return models::values({kTokens, kWidth}, 50 * step + rank).to(dtype);
}

struct Trained {
  std::vector<at::Tensor> losses, norms, parameters;
};

// One process on the batches of all ranks; each rank's choices have a capacity of their own.
Trained train_alone(int64_t ranks, std::optional<double> capacity) {
  Nets nets(at::kDouble);
  AdamW optimizer(nets.parameters(), torch::optim::AdamWOptions(0.01));
  Trained trained;
  run_ranks(1, [&](const Group&) {
    for (int64_t step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const at::Tensor y =
            nets.shared->forward(batch_of(rank, step, at::kDouble), [&](const at::Tensor& x, const at::Tensor& logits) {
              return moe(x, logits, [&](const DispatchedTokens& sent) { return nets.experts(sent); },
                         {.top_k = 2, .capacity = capacity});
            });
        sum = sum + y.square().mean();
      }
      (sum / double(ranks)).backward();
      trained.losses.push_back((sum / double(ranks)).detach());
      trained.norms.push_back(clip_grad_norm_(nets.parameters(), kMaxNorm).tensor());
      EXPECT_GT(trained.norms.back().item<double>(), kMaxNorm);
      optimizer.step();
    }
  });
  for (const at::Tensor& p : nets.parameters()) trained.parameters.push_back(p.detach());
  return trained;
}

enum class How { ddp, sharded };

struct Setting {
  How how = How::sharded;
  std::optional<double> capacity = {};
  bool captured = false;
  bool recomputed = false;
  at::ScalarType dtype = at::kDouble;
};

/// 2 x 2 ranks: experts are cut over ep, and over dp each has its copy or its shard; the rest is over all four.
class Trainer {
 public:
  Trainer(const Setting& setting, const Group& group)
      : setting_(setting),
        mesh_(init_device_mesh("cpu", {2, 2}, {"dp", "ep"}, {.group = group})),
        nets_(setting.dtype) {
    for (at::Tensor* p : {&nets_.experts->up, &nets_.experts->bias, &nets_.experts->down}) {
      distribute_parameter(*p, mesh_["ep"], {Shard(0)});
    }
    if (setting.how == How::sharded) {
      fully_shard(*nets_.experts, {.mesh = mesh_["dp"]});
      fully_shard(*nets_.shared, {.mesh = mesh_.flatten("all")});
    } else {
      shared_ = std::make_unique<DistributedDataParallel<Shared>>(nets_.shared, DDPOptions{.process_group = group});
      experts_ = std::make_unique<DistributedDataParallel<Experts>>(nets_.experts, DDPOptions{.mesh = mesh_["dp"]});
    }
    optimizer_ = std::make_unique<AdamW>(nets_.parameters(), torch::optim::AdamWOptions(0.01));
  }

  at::Tensor run_experts(const at::Tensor& x, const at::Tensor& logits) {
    const auto layer = [this](const at::Tensor& in, const at::Tensor& scores) {
      return moe(in, scores,
                 [this](const DispatchedTokens& sent) { return experts_ ? (*experts_)(sent) : nets_.experts(sent); },
                 {.mesh = mesh_["ep"], .top_k = 2, .capacity = setting_.capacity, .average_gradients = true});
    };
    return setting_.recomputed ? recompute(layer, x, logits) : layer(x, logits);
  }

  std::vector<at::Tensor> step(const at::Tensor& x) {
    optimizer_->zero_grad();
    const auto experts = [this](const at::Tensor& in, const at::Tensor& logits) { return run_experts(in, logits); };
    const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> fn = experts;
    const at::Tensor loss = (shared_ ? (*shared_)(x, fn) : nets_.shared(x, fn)).square().mean();
    loss.backward();
    const at::Tensor norm = clip_grad_norm_(nets_.parameters(), kMaxNorm).tensor();
    optimizer_->step();
    return {loss.detach(), norm};
  }

  Trained train() {
    auto captured = capture([this](const at::Tensor& x) { return step(x); });
    Trained trained;
    for (int64_t i = 0; i < kSteps; ++i) {
      const at::Tensor x = batch_of(mesh_.get_rank(), i, setting_.dtype);
      const std::vector<at::Tensor> results = setting_.captured ? captured(x) : step(x);
      trained.losses.push_back(all_reduce(results[0].clone(), mesh_.root_group(), c10d::ReduceOp::AVG));
      trained.norms.push_back(results[1].clone());
      const at::Tensor norms = all_gather(results[1].view({1}), mesh_.root_group());
      for (const at::Tensor& each : norms.unbind()) expect_equal(each, trained.norms.back(), "norms of all ranks");
    }
    EXPECT_EQ(captured.replays(), setting_.captured ? kSteps - 3 : 0) << captured.last_recapture_reason();
    for (const at::Tensor& p : nets_.parameters()) trained.parameters.push_back(full(p.detach()));
    return trained;
  }

 private:
  const Setting setting_;
  const DeviceMesh mesh_;
  Nets nets_;
  std::unique_ptr<DistributedDataParallel<Shared>> shared_;
  std::unique_ptr<DistributedDataParallel<Experts>> experts_;
  std::unique_ptr<AdamW> optimizer_;
};

void expect_same(const Trained& actual, const Trained& expected, double tolerance) {
  for (const auto& [a, b] : {std::pair(actual.losses, expected.losses), std::pair(actual.norms, expected.norms),
                             std::pair(actual.parameters, expected.parameters)}) {
    ASSERT_EQ(a.size(), b.size());
    ASSERT_GT(a.size(), 0u);
    for (size_t i = 0; i < a.size(); ++i) {
      if (tolerance == 0) {
        expect_equal(a[i], b[i], std::to_string(i));
      } else {
        expect_near(a[i], b[i], tolerance, std::to_string(i));
      }
    }
  }
}

void expect_trained_like_alone(How how) {
  for (const std::optional<double> capacity : {std::optional<double>(), std::optional<double>(1.0)}) {
    const Trained alone = train_alone(4, capacity);
    run_ranks(4, [&](const Group& group) {
      expect_same(Trainer({.how = how, .capacity = capacity}, group).train(), alone, 1e-9);
    });
  }
}

TEST(MoeTogether, ExpertsTimesFullyShardTrainLikeOneProcess) {
  expect_trained_like_alone(How::sharded);
}

TEST(MoeTogether, ExpertsTimesDataParallelTrainLikeOneProcess) {
  expect_trained_like_alone(How::ddp);
}

TEST(MoeTogether, ExpertsTimesFullyShardCommunicateWhatTheyNeed) {
  run_ranks(4, [&](const Group& group) {
    for (const std::optional<double> capacity : {std::optional<double>(), std::optional<double>(1.0)}) {
      Trainer trainer({.capacity = capacity}, group);
      for (int step = 0; step < 3; ++step) {
        const CommDebugMode comm;
        trainer.step(batch_of(group->getRank(), step, at::kDouble));
        // Gathers and reductions of two blocks, which are kept whole until backward; tokens there and results back, and
        // the same of gradients; and the norm.
        EXPECT_EQ(comm.counts(), (std::map<std::string, int64_t>{
                                     {"all_gather", 2}, {"reduce_scatter", 2}, {"all_to_all", 4}, {"all_reduce", 1}}))
            << comm.report();
      }
    }
  });
}

TEST(MoeTogether, CapturedStepsAreEagerOnesBitForBit) {
  for (const How how : {How::sharded, How::ddp}) {
    run_ranks(4, [&](const Group& group) {
      const Setting setting{.how = how, .capacity = 1.0, .dtype = at::kFloat};
      Setting captured = setting;
      captured.captured = true;
      expect_same(Trainer(captured, group).train(), Trainer(setting, group).train(), 0);
    });
  }
}

TEST(MoeTogether, RecomputedExpertsAreThePlainOnesBitForBit) {
  for (const std::optional<double> capacity : {std::optional<double>(), std::optional<double>(1.0)}) {
    run_ranks(4, [&](const Group& group) {
      const Setting setting{.capacity = capacity, .dtype = at::kFloat};
      Setting recomputed = setting;
      recomputed.recomputed = true;
      expect_same(Trainer(recomputed, group).train(), Trainer(setting, group).train(), 0);
    });
  }
}

TEST(MoeTogether, ModulesAreCapturedWithACapacity) {
  const Case c{.tokens = {5, 5}, .num_experts = 4, .top_k = 2, .dtype = at::kFloat};
  run_ranks(2, [&](const Group& group) {
    const auto run = [&](bool is_captured) {
      const auto experts = experts_of(c, group->getRank());
      std::vector<at::Tensor> parameters;
      for (const auto& expert : experts) {
        for (const at::Tensor& p : expert.ptr()->parameters()) parameters.push_back(p);
      }
      SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
      const auto eager = [&](const at::Tensor& x, const at::Tensor& logits) {
        optimizer.zero_grad();
        MoeLoad load;
        const at::Tensor loss = moe(x, logits, experts, {.top_k = 2, .capacity = 0.75, .load = &load}).square().mean();
        loss.backward();
        optimizer.step();
        return std::vector<at::Tensor>{loss.detach(), load.dropped, load.tokens_per_expert};
      };
      auto captured = capture(eager);
      std::vector<at::Tensor> all;
      for (int64_t step = 0; step < 7; ++step) {
        const at::Tensor x = tokens_of(c, step % 2), logits = values(c, {5, 4}, 31 * step + group->getRank());
        for (const at::Tensor& t : is_captured ? captured(x, logits) : eager(x, logits)) all.push_back(t.clone());
      }
      EXPECT_EQ(captured.replays(), is_captured ? 4 : 0);
      for (const at::Tensor& p : parameters) all.push_back(p.detach());
      return all;
    };
    const auto eager = run(false), captured = run(true);
    ASSERT_EQ(eager.size(), captured.size());
    for (size_t i = 0; i < eager.size(); ++i) expect_equal(captured[i], eager[i], std::to_string(i));
  });
}

TEST(MoeTogether, WithoutACapacityItIsNotCaptured) {
  run_ranks(2, [](const Group& group) {
    const Case c{.tokens = {5, 5}, .num_experts = 4};
    const auto experts = experts_of(c, group->getRank());
    auto captured = capture([&](const at::Tensor& x) { return moe(x, logits_of(c, group->getRank()), experts); });
    const at::Tensor x = tokens_of(c, group->getRank());
    captured(x);
    EXPECT_THAT(error_text<c10::NotImplementedError>([&] { captured(x); }),
                HasSubstr("[moe] without a capacity the number of rows depends on the tokens, and a captured function "
                          "has fixed shapes\n"
                          "  fix: pass a capacity, such as {.capacity = 1.25}, or call it outside of the captured "
                          "function"));
  });
}

TEST(MoeTogether, CapturedChoicesOfNoExpertAreFound) {
  run_ranks(1, [](const Group&) {
    auto captured = capture([](const at::Tensor& x, const at::Tensor& experts) {
      const DispatchedTokens sent = dispatch_tokens(x, experts, 2, {.capacity = 4.0});
      return combine_tokens(sent.tokens * 2, sent, at::ones({3, 1}));
    });
    const at::Tensor x = models::values({3, 2}, 1).to(at::kFloat), experts = torch::tensor({{0}, {1}, {1}});
    for (int i = 0; i < 5; ++i) expect_equal(captured(x, experts), x * 2);
    EXPECT_EQ(captured.replays(), 2);
    EXPECT_THAT(error_text<c10::Error>([&] { captured(x, experts + 1); }),
                HasSubstr("a choice is none of the experts"));
  });
}

}  // namespace
}  // namespace serried::testing::moe_together
