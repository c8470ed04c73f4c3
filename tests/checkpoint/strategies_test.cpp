// Saved under each strategy, loaded under each other: the same values, and the same training.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/pipeline/pipeline.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/parallel/zero.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "tests/checkpoint/folder.h"
#include "tests/parallel/tensor_parallel/gpt.h"
#include "tests/support/close.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;
using torch::optim::AdamWOptions;

// The stage of a pipeline of two, under the names of the whole.
struct HalfImpl : torch::nn::Module {
  HalfImpl(const gpt::Gpt& net, int half) : net_(net), half_(half) {
    if (half == 0) register_module("tokens", net->tokens), register_module("places", net->places);
    const auto blocks = register_module("blocks", std::make_shared<torch::nn::Module>());
    blocks->register_module(std::to_string(half), net->blocks->ptr(size_t(half)));
    if (half == 1) register_module("norm", net->norm), register_module("head", net->head);
  }
  at::Tensor forward(const at::Tensor& x) {
    gpt::BlockImpl& block = net_->blocks->at<gpt::BlockImpl>(size_t(half_));
    if (half_ == 0) return block.forward(net_->tokens(x) + net_->places(at::arange(x.size(1))));
    return net_->head(net_->norm(block.forward(x)));
  }

 private:
  gpt::Gpt net_;
  const int half_;
};
TORCH_MODULE(Half);

// A model under a strategy; every rank has the same batch, so that all compute what one process does.
struct Training {
  gpt::Gpt net{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::shared_ptr<DistributedDataParallel<gpt::Gpt>> ddp = {};
  Half half{nullptr};  // what this rank has of it, where it has no more
  std::unique_ptr<Pipeline> pipe = {};

  void train(int first, int count) {
    const ImplicitReplication targets_are_whole;
    for (int step = first; step < first + count; ++step) {
      const gpt::Batch batch = gpt::batch_of(step);
      optimizer->zero_grad();
      if (pipe)
        pipe->step(batch.ids, batch.targets);
      else
        gpt::loss_of(ddp ? (*ddp)(batch.ids) : net(batch.ids), batch.targets).backward();
      optimizer->step();
    }
  }

  checkpoint::State model() { return ddp ? state_of(*ddp) : pipe ? state_of(half) : state_of(net); }
  checkpoint::Contents contents() { return {{"model", model()}, {"optim", state_of(*optimizer)}}; }

  std::map<std::string, at::Tensor> values() const {
    const at::NoGradGuard no_grad;
    const torch::nn::Module& module = pipe ? static_cast<const torch::nn::Module&>(*half) : *net;
    std::map<std::string, at::Tensor> values;
    for (const auto& item : module.named_parameters()) values[item.key()] = full(item.value().detach()).clone();
    return values;
  }
};

struct Strategy {
  std::string name;
  int world_size;
  std::function<void(Training&, const Group&)> apply;
};

constexpr double kRate = 0.01;

void use_adamw(Training& training) {
  training.optimizer = std::make_unique<torch::optim::AdamW>(training.net->parameters(), AdamWOptions(kRate));
}

void shard_blocks(gpt::Gpt& net, const DeviceMesh& mesh) {
  for (const auto& block : *net->blocks) fully_shard(*block.ptr(), {.mesh = mesh});
  fully_shard(*net, {.mesh = mesh});
}

enum class Halves { plain, in_ddp, sharded };

void use_pipeline(Training& t, const Group& group, Halves how) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, group->getSize() / 2}, {"pp", "dp"}, {.group = group});
  t.half = Half(t.net, int(mesh.get_local_rank("pp")));
  PipelineStage stage = t.half;
  if (how == Halves::in_ddp) {
    stage = std::make_shared<DistributedDataParallel<Half>>(
        t.half, DistributedDataParallelOptions{.process_group = mesh.get_group("dp")});
  }
  if (how == Halves::sharded) fully_shard(*t.half, {.mesh = mesh["dp"]});
  t.pipe = std::make_unique<Pipeline>(
      stage, PipelineOptions{.group = mesh.get_group("pp"), .microbatches = 2, .loss = gpt::loss_of});
  t.optimizer = std::make_unique<torch::optim::AdamW>(t.half->parameters(), AdamWOptions(kRate));
}

std::vector<Strategy> strategies() {
  const auto ddp = [](Training& t, const Group& group) {
    t.ddp = std::make_shared<DistributedDataParallel<gpt::Gpt>>(t.net,
                                                                DistributedDataParallelOptions{.process_group = group});
  };
  return {{"plain", 1, [](Training& t, const Group&) { use_adamw(t); }},
          {"DDP", 3, [ddp](Training& t, const Group& group) { ddp(t, group), use_adamw(t); }},
          {"ZeRO", 2,
           [ddp](Training& t, const Group& group) {
             ddp(t, group);
             t.optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::AdamW>>(
                 t.net->parameters(), AdamWOptions(kRate), ZeroOptions{.process_group = group});
           }},
          {"TP", 2,
           [](Training& t, const Group& group) {
             const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
             parallelize_module(*t.net, mesh, gpt::tensor_plan());
             use_adamw(t);
           }},
          {"FSDP", 3,
           [](Training& t, const Group& group) {
             shard_blocks(t.net, init_device_mesh("cpu", {3}, {"dp"}, {.group = group}));
             t.optimizer = std::make_unique<serried::AdamW>(t.net->parameters(), AdamWOptions(kRate));
           }},
          {"HSDP", 4,
           [](Training& t, const Group& group) {
             shard_blocks(t.net, init_device_mesh("cpu", {2, 2}, {"replicate", "shard"}, {.group = group}));
             use_adamw(t);
           }},
          {"FSDP x TP", 4,
           [](Training& t, const Group& group) {
             const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
             parallelize_module(*t.net, mesh["tp"], gpt::tensor_plan());
             shard_blocks(t.net, mesh["dp"]);
             use_adamw(t);
           }},
          {"PP", 2, [](Training& t, const Group& group) { use_pipeline(t, group, Halves::plain); }},
          {"PP x DDP", 4, [](Training& t, const Group& group) { use_pipeline(t, group, Halves::in_ddp); }},
          {"PP x FSDP", 4, [](Training& t, const Group& group) { use_pipeline(t, group, Halves::sharded); }}};
}

void on(const Strategy& strategy, const std::function<void(Training&)>& fn) {
  run_ranks(strategy.world_size, [&](const Group& group) {
    Training training{gpt::make_gpt(), nullptr};
    strategy.apply(training, group);
    fn(training);
  });
}

// Of all ranks together.
class Values {
 public:
  void add(const std::map<std::string, at::Tensor>& values) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_.insert(values.begin(), values.end());
  }
  const at::Tensor& at(const std::string& name) const { return values_.at(name); }
  size_t size() const { return values_.size(); }

 private:
  std::mutex mutex_;
  std::map<std::string, at::Tensor> values_;
};

// All but the index, which says when it was written.
void expect_same_files(const std::string& actual, const std::string& expected) {
  int compared = 0;
  for (const auto& item : std::filesystem::directory_iterator(expected)) {
    const std::string name = item.path().filename();
    if (name == "index.json") continue;
    EXPECT_EQ(content_of(actual + "/" + name), content_of(item.path())) << name;
    ++compared;
  }
  EXPECT_GT(compared, 4);
}

class CheckpointStrategies : public ::testing::TestWithParam<Strategy> {};

TEST_P(CheckpointStrategies, GoOnUnderEachOtherAsIfTheyHadNotStopped) {
  const SmallLimits limits({.file_bytes = 20000, .block_bytes = 1024, .short_run = 128});
  const Folder folder;
  Values saved, expected;
  on(GetParam(), [&](Training& training) {
    training.train(0, 3);
    checkpoint::save(folder / "c", training.contents());
    saved.add(training.values());
    const checkpoint::Saving saving = checkpoint::async_save(folder / "later", training.contents());
    training.train(3, 10);  // what the copies do not see
    saving.wait();
    expected.add(training.values());
  });
  expect_same_files(folder / "later", folder / "c");
  ASSERT_EQ(strategies().size(), 10u);
  for (const Strategy& other : strategies()) {
    on(other, [&](Training& training) {
      training.train(50, 1);  // has other values and states, and whole ones in use
      checkpoint::load(folder / "c", training.contents());
      for (const auto& [name, value] : training.values()) expect_equal(value, saved.at(name), other.name + name);
      training.train(3, 10);
      for (const auto& [name, value] : training.values()) {
        if (other.name == GetParam().name) expect_equal(value, expected.at(name), other.name + name);
        EXPECT_LE((value - expected.at(name)).abs().max().item<double>(), 1e-9) << other.name << ", " << name;
      }
    });
  }
  EXPECT_EQ(saved.size(), gpt::make_gpt()->parameters().size());
}

// The bytes on the disk do not tell how the ranks were arranged.
TEST_P(CheckpointStrategies, WriteTheBytesThatOneProcessWrites) {
  const SmallLimits limits({.file_bytes = 20000, .block_bytes = 1024, .short_run = 128});
  const Folder folder;
  on(strategies()[0], [&](Training& training) {
    checkpoint::save(folder / "plain", {{"model", state_of(training.net)}});
  });
  on(GetParam(), [&](Training& training) { checkpoint::save(folder / "c", {{"model", training.model()}}); });
  expect_same_files(folder / "c", folder / "plain");
}

INSTANTIATE_TEST_SUITE_P(, CheckpointStrategies, ::testing::ValuesIn(strategies()), [](const auto& info) {
  std::string name = info.param.name;
  std::erase(name, ' ');
  return name;
});

TEST(CheckpointOfShards, NothingIsGatheredAndLongRunsAreNotMoved) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    gpt::Gpt net = gpt::make_gpt();
    shard_blocks(net, init_device_mesh("cpu", {2}, {"dp"}, {.group = group}));
    int64_t num_bytes = 0;
    for (const at::Tensor& p : net->parameters()) num_bytes += p.numel() * 8;
    const CommDebugMode comm;
    checkpoint::save(folder / "c", {{"model", state_of(net)}});
    EXPECT_EQ(comm.count("all_to_all"), 0);
    // Names and hashes only.
    EXPECT_LT(comm.bytes(), num_bytes / 10) << comm.report();
    EXPECT_GT(comm.count(), 0);
  });
}

}  // namespace
}  // namespace serried::testing
