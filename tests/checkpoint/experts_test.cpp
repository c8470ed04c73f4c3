// Experts over ranks, saved under one arrangement and loaded under each other.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "serried/checkpoint/checkpoint.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/expert_parallel/moe.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/models.h"
#include "tests/support/on_mesh.h"

namespace serried::testing::moe_saved {
namespace {

using checkpoint::state_of;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

constexpr int64_t kExperts = 4, kWidth = 5, kHidden = 7;

struct ExpertsImpl : torch::nn::Module {
  at::Tensor up = register_parameter("up", at::empty({kExperts, kWidth, kHidden}));
  at::Tensor down = register_parameter("down", at::empty({kExperts, kHidden, kWidth}));
};
TORCH_MODULE(Experts);

struct NetImpl : torch::nn::Module {
  torch::nn::Linear router = register_module("router", torch::nn::Linear(kWidth, kExperts));
  Experts experts = register_module("experts", Experts());
};
TORCH_MODULE(Net);

struct Arrangement {
  int64_t data_parallel;
  int64_t expert_parallel;
};

// Every rank has the same tokens, so that all compute what one process does.
class Training {
 public:
  Training(const Arrangement& arrangement, const Group& group)
      : mesh_(init_device_mesh("cpu", {arrangement.data_parallel, arrangement.expert_parallel}, {"dp", "ep"},
                               {.group = group})) {
    models::fill_parameters(*net_);
    net_->to(at::kDouble);
    if (arrangement.expert_parallel > 1) {
      distribute_parameter(net_->experts->up, mesh_["ep"], {Shard(0)});
      distribute_parameter(net_->experts->down, mesh_["ep"], {Shard(0)});
    }
    if (arrangement.data_parallel > 1) fully_shard(*net_->experts, {.mesh = mesh_["dp"]});
    router_ = std::make_unique<DistributedDataParallel<torch::nn::Linear>>(
        net_->router, DistributedDataParallelOptions{.process_group = group});
    optimizer_ = std::make_unique<AdamW>(net_->parameters(), AdamWOptions(0.01));
  }

  void train(int64_t first, int64_t count) {
    for (int64_t step = first; step < first + count; ++step) {
      optimizer_->zero_grad();
      const at::Tensor x = models::values({9, kWidth}, step).to(at::kDouble);
      const at::Tensor y = moe(x, (*router_)(x),
                               [&](const DispatchedTokens& sent) {
                                 const at::Tensor wide = expert_linear(sent.tokens, sent, net_->experts->up);
                                 return expert_linear(torch::gelu(wide), sent, net_->experts->down);
                               },
                               {.mesh = mesh_["ep"], .top_k = 2, .average_gradients = true});
      (y - x.flip(1)).square().mean().backward();
      optimizer_->step();
    }
  }

  checkpoint::Contents contents() { return {{"model", state_of(net_)}, {"optim", state_of(*optimizer_)}}; }

  std::map<std::string, at::Tensor> values() const {
    const at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> values;
    for (const auto& item : net_->named_parameters()) values[item.key()] = full(item.value().detach()).clone();
    return values;
  }

 private:
  DeviceMesh mesh_;
  Net net_;
  std::unique_ptr<DistributedDataParallel<torch::nn::Linear>> router_;
  std::unique_ptr<AdamW> optimizer_;
};

void on(const Arrangement& arrangement, const std::function<void(Training&)>& fn) {
  run_ranks(int(arrangement.data_parallel * arrangement.expert_parallel), [&](const Group& group) {
    Training training(arrangement, group);
    fn(training);
  });
}

TEST(CheckpointExperts, GoOnUnderOtherNumbersOfRanksAsIfTheyHadNotStopped) {
  const SmallLimits limits({.file_bytes = 2000, .block_bytes = 256, .short_run = 64});
  const std::vector<Arrangement> arrangements = {{1, 1}, {1, 2}, {1, 4}, {2, 2}, {3, 1}};
  std::map<std::string, at::Tensor> saved, expected;
  on({1, 1}, [&](Training& training) {
    training.train(0, 3);
    saved = training.values();
    training.train(3, 10);
    expected = training.values();
  });
  EXPECT_GT((saved.at("experts.up") - expected.at("experts.up")).abs().max().item<double>(), 1e-3);
  for (const Arrangement& from : arrangements) {
    const Folder folder;
    std::map<std::string, at::Tensor> expected_here;
    on(from, [&](Training& training) {
      training.train(0, 3);
      const checkpoint::Saving saving = checkpoint::async_save(folder / "c", training.contents());
      training.train(3, 10);  // what the copies do not see
      saving.wait();
      const auto values = training.values();
      static std::mutex mutex;
      const std::lock_guard<std::mutex> lock(mutex);
      expected_here = values;
    });
    for (const Arrangement& to : arrangements) {
      SCOPED_TRACE(c10::str(from.data_parallel, " x ", from.expert_parallel, " to ", to.data_parallel, " x ",
                            to.expert_parallel));
      on(to, [&](Training& training) {
        training.train(50, 1);
        checkpoint::load(folder / "c", training.contents());
        for (const auto& [name, value] : training.values()) {
          EXPECT_LE((value - saved.at(name)).abs().max().item<double>(), 1e-9) << name;
        }
        training.train(3, 10);
        for (const auto& [name, value] : training.values()) {
          EXPECT_LE((value - expected.at(name)).abs().max().item<double>(), 1e-9) << name;
          if (&to == &from) expect_equal(value, expected_here.at(name), name);
        }
      });
    }
  }
}

}  // namespace
}  // namespace serried::testing::moe_saved
