// Data parallel with tensor parallel, and fully sharded with context parallel: saved under one, loaded under the
// others.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <mutex>

#include "serried/checkpoint/checkpoint.h"
#include "serried/parallel/context_parallel/context_parallel.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/parallel/weighted_loss.h"
#include "tests/checkpoint/folder.h"
#include "tests/parallel/context_parallel/long_gpt.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing::mixed_saved {
namespace {

using checkpoint::state_of;
using long_gpt::LongGpt;
using long_gpt::Sequence;

constexpr int64_t kLength = 13;

at::Tensor mean_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

// A model under a strategy; every data parallel rank has the same batch, so that all compute what one process does.
struct Mixed {
  LongGpt net = long_gpt::make_net({.layers = 2, .width = 24, .heads = 4, .kv_heads = 4}, kLength);
  std::unique_ptr<torch::optim::AdamW> optimizer = {};
  std::function<void(Sequence)> backward = {};

  void train(int first, int count) {
    for (int step = first; step < first + count; ++step) {
      optimizer->zero_grad();
      backward(long_gpt::sequence_of(kLength, step));
      optimizer->step();
    }
  }
  checkpoint::Contents contents() { return {{"model", state_of(net)}, {"optim", state_of(*optimizer)}}; }
  std::map<std::string, at::Tensor> values() const {
    const at::NoGradGuard no_grad;
    std::map<std::string, at::Tensor> values;
    for (const auto& item : net->named_parameters()) values[item.key()] = full(item.value().detach()).clone();
    return values;
  }
};

struct Strategy {
  std::string name;
  int world_size;
  std::function<void(Mixed&, const Group&)> apply;
};

void use_data_and_tensor_parallel(Mixed& t, const Group& group) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
  const DeviceMesh tp = mesh["tp"];
  parallelize_module(*t.net, tp,
                     {{"blocks.*.[qkv]", ColwiseParallel()},
                      {"blocks.*.out", RowwiseParallel()},
                      {"blocks.*.up", ColwiseParallel()},
                      {"blocks.*.down", RowwiseParallel()}});
  const auto ddp = std::make_shared<DistributedDataParallel<LongGpt>>(
      t.net, DistributedDataParallelOptions{.process_group = mesh.get_group("dp")});
  t.backward = [ddp, tp](const Sequence& s) {
    const auto whole = [&](const at::Tensor& each) { return DTensor::from_local(each, tp, {Replicate()}); };
    mean_loss((*ddp)(whole(s.ids), whole(s.positions)), whole(s.targets)).backward();
  };
}

void use_sharded_and_context_parallel(Mixed& t, const Group& group) {
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "cp"}, {.group = group}), all = mesh.flatten("all");
  for (size_t i = 0; i < t.net->blocks->size(); ++i) fully_shard(*t.net->blocks->ptr(i), {.mesh = all});
  fully_shard(*t.net, {.mesh = all});
  t.backward = [net = t.net, all, cp = mesh["cp"]](Sequence s) mutable {
    const ContextParallel scope(cp, {.buffers = {s.ids, s.targets, s.positions}, .seq_dims = {1, 1, 0}});
    scale_loss(mean_loss(net(s.ids, s.positions), s.targets), s.targets.numel(), all.get_group()).backward();
  };
}

std::vector<Strategy> strategies() {
  const auto alone = [](Mixed& t, const Group&) {
    t.backward = [net = t.net](const Sequence& s) mutable { mean_loss(net(s.ids, s.positions), s.targets).backward(); };
  };
  return {{"one process", 1, alone},
          {"DDP x TP", 4, use_data_and_tensor_parallel},
          {"FSDP x CP", 4, use_sharded_and_context_parallel}};
}

void on(const Strategy& strategy, const std::function<void(Mixed&)>& fn) {
  run_ranks(strategy.world_size, [&](const Group& group) {
    Mixed training;
    strategy.apply(training, group);
    training.optimizer =
        std::make_unique<torch::optim::AdamW>(training.net->parameters(), torch::optim::AdamWOptions(0.01));
    fn(training);
  });
}

TEST(CheckpointMixedStrategies, GoOnUnderEachOtherAsIfTheyHadNotStopped) {
  const SmallLimits limits({.file_bytes = 20000, .block_bytes = 1024, .short_run = 128});
  for (const Strategy& from : strategies()) {
    const Folder folder;
    std::mutex mutex;
    std::map<std::string, at::Tensor> saved, expected;
    on(from, [&](Mixed& training) {
      training.train(0, 3);
      const checkpoint::Saving saving = checkpoint::async_save(folder / "c", training.contents());
      const auto then = training.values();
      training.train(3, 10);
      saving.wait();
      const auto later = training.values();
      const std::lock_guard<std::mutex> lock(mutex);
      saved = then, expected = later;
    });
    for (const Strategy& to : strategies()) {
      SCOPED_TRACE(from.name + " to " + to.name);
      on(to, [&](Mixed& training) {
        training.train(50, 1);
        checkpoint::load(folder / "c", training.contents());
        for (const auto& [name, value] : training.values()) expect_equal(value, saved.at(name), name);
        training.train(3, 10);
        for (const auto& [name, value] : training.values()) {
          EXPECT_LE((value - expected.at(name)).abs().max().item<double>(), 1e-9) << name;
          if (to.name == from.name) expect_equal(value, expected.at(name), name);
        }
      });
    }
  }
}

}  // namespace
}  // namespace serried::testing::mixed_saved
