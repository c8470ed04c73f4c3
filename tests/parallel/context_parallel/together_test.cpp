// Context parallel with data, fully sharded and tensor parallel training, eager and captured, against one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/context_parallel/context_parallel.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/parallel/weighted_loss.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/context_parallel/long_gpt.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using gpt::GptOptions;
using long_gpt::LongGpt;
using long_gpt::Sequence;

constexpr int kSteps = 6;
constexpr int64_t kLength = 13;
constexpr int64_t kBatch = 2;  // per data parallel rank
const GptOptions kModel = {.layers = 2, .width = 24, .heads = 4, .kv_heads = 4};

// The batches of all data parallel ranks, one below the other.
Sequence whole_batch(int step, int64_t data_ranks) {
  return long_gpt::sequence_of(kLength, step, kBatch * data_ranks);
}

Sequence own_batch(int step, int64_t data_rank, int64_t data_ranks) {
  const Sequence all = whole_batch(step, data_ranks);
  const auto rows = [&](const at::Tensor& t) { return t.narrow(0, data_rank * kBatch, kBatch).clone(); };
  return {rows(all.ids), rows(all.targets), all.positions};
}

std::vector<at::Tensor> trained_whole(int64_t data_ranks) {
  LongGpt net = long_gpt::make_net(kModel, kLength);
  SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::vector<at::Tensor> values;
  for (int step = 0; step < kSteps; ++step) {
    const Sequence s = whole_batch(step, data_ranks);
    optimizer.zero_grad();
    const at::Tensor loss = long_gpt::share_of_loss(net(s.ids, s.positions), s.targets, s.ids.numel());
    loss.backward();
    optimizer.step();
    values.push_back(loss.detach());
  }
  for (const at::Tensor& p : net->parameters()) values.push_back(p.detach());
  return values;
}

struct Training {
  bool is_captured = false;
  AttentionWay way = AttentionWay::automatic;
};

// One step on parts; what it gives is this rank's share of the loss.
using StepFunction =
    std::function<at::Tensor(const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions)>;

// Losses averaged over `group`, then whole parameters.
std::vector<at::Tensor> train(LongGpt& net, const DeviceMesh& cp, const Training& run, const StepFunction& forward,
                              const std::function<Sequence(int)>& batch, const Group& group) {
  SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const auto eager = [&](const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions) {
    optimizer.zero_grad();
    const at::Tensor loss = forward(ids, targets, positions);
    loss.backward();
    optimizer.step();
    return loss.detach();
  };
  auto captured = capture(eager);
  std::vector<at::Tensor> values;
  for (int step = 0; step < kSteps; ++step) {
    const Sequence s = batch(step);
    const ContextParallel scope(cp,
                                {.buffers = {s.ids, s.targets, s.positions}, .seq_dims = {1, 1, 0}, .rotate = run.way});
    const at::Tensor loss =
        run.is_captured ? captured(s.ids, s.targets, s.positions) : eager(s.ids, s.targets, s.positions);
    values.push_back(all_reduce(full(loss), group, c10d::ReduceOp::AVG));
  }
  if (run.is_captured) EXPECT_GE(captured.replays(), kSteps - 3) << captured.last_recapture_reason();
  for (const at::Tensor& p : net->parameters()) values.push_back(full(p.detach()).clone());
  return values;
}

// `trained(run)` is near `expected` for every way, and captured the same bit for bit.
void expect_trained(const std::function<std::vector<at::Tensor>(const Training&)>& trained,
                    const std::vector<at::Tensor>& expected) {
  for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
    const std::vector<at::Tensor> eager = trained({.way = way});
    long_gpt::expect_near(eager, expected, std::string(to_string(way)));
    const std::vector<at::Tensor> captured = trained({.is_captured = true, .way = way});
    for (size_t i = 0; i < eager.size(); ++i) expect_equal(captured[i], eager[i], c10::str(to_string(way), " ", i));
  }
}

at::Tensor mean_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

TEST(ContextParallelTogether, WithDistributedDataParallel) {
  const std::vector<at::Tensor> expected = trained_whole(2);
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "cp"}, {.group = group});
    const Group all = mesh.flatten("all").get_group();
    expect_trained(
        [&](const Training& run) {
          LongGpt net = long_gpt::make_net(kModel, kLength);
          DistributedDataParallel ddp(net, {.process_group = all});
          return train(
              net, mesh["cp"], run,
              [&](const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions) {
                // Parts differ in length, and so does what their means stand for.
                return scale_loss(mean_loss(ddp(ids, positions), targets), targets.numel(), all);
              },
              [&](int step) { return own_batch(step, mesh.get_local_rank("dp"), 2); }, all);
        },
        expected);
  });
}

TEST(ContextParallelTogether, WithFullyShard) {
  const std::vector<at::Tensor> expected = trained_whole(2);
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "cp"}, {.group = group});
    const DeviceMesh all = mesh.flatten("all");
    expect_trained(
        [&](const Training& run) {
          LongGpt net = long_gpt::make_net(kModel, kLength);
          for (size_t i = 0; i < net->blocks->size(); ++i) fully_shard(*net->blocks->ptr(i), {.mesh = all});
          fully_shard(*net, {.mesh = all});
          return train(
              net, mesh["cp"], run,
              [&](const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions) {
                return scale_loss(mean_loss(net(ids, positions), targets), targets.numel(), all.get_group());
              },
              [&](int step) { return own_batch(step, mesh.get_local_rank("dp"), 2); }, all.get_group());
        },
        expected);
  });
}

TEST(ContextParallelTogether, WithTensorParallel) {
  const std::vector<at::Tensor> expected = trained_whole(1);
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"cp", "tp"}, {.group = group});
    const DeviceMesh cp = mesh["cp"], tp = mesh["tp"];
    expect_trained(
        [&](const Training& run) {
          LongGpt net = long_gpt::make_net(kModel, kLength);
          parallelize_module(*net, tp,
                             {{"blocks.*.[qkv]", ColwiseParallel()},
                              {"blocks.*.out", RowwiseParallel()},
                              {"blocks.*.up", ColwiseParallel()},
                              {"blocks.*.down", RowwiseParallel()}});
          DistributedDataParallel ddp(net, {.process_group = cp.get_group()});
          return train(
              net, cp, run,
              [&](const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions) {
                const auto whole = [&](const at::Tensor& t) { return DTensor::from_local(t, tp, {Replicate()}); };
                return scale_loss(mean_loss(ddp(whole(ids), whole(positions)), whole(targets)), targets.numel(),
                                  cp.get_group());
              },
              [&](int step) { return own_batch(step, 0, 1); }, cp.get_group());
        },
        expected);
  });
}

// The same without a scope: DTensors on a mesh of both axes.
TEST(ContextParallelTogether, DTensorsOfTwoAxesNeedNoScope) {
  const std::vector<at::Tensor> expected = long_gpt::whole_gradients(kModel, kLength, 1);
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"cp", "tp"}, {.group = group});
    LongGpt net = long_gpt::make_net(kModel, kLength);
    distribute_module(*net, mesh, [](const std::string&, torch::nn::Module&, const DeviceMesh&) {});
    const Sequence s = long_gpt::sequence_of(kLength, 0, 1);
    const auto cut = [&](const at::Tensor& t, int64_t dim) {
      return distribute_tensor(t, mesh, {BalancedShard(dim), Replicate()});
    };
    const at::Tensor logits = net(cut(s.ids, 1), cut(s.positions, 0));
    EXPECT_EQ(DTensor(logits).placements(), (Placements{BalancedShard(1), Replicate()}));
    const at::Tensor loss =
        torch::nn::functional::cross_entropy(logits.transpose(1, 2), cut(s.targets, 1),
                                             torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kMean));
    loss.backward();
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& p : net->parameters()) gradients.push_back(full(p.grad()));
    long_gpt::expect_near(gradients, expected, "without a scope");
  });
}

}  // namespace
}  // namespace serried::testing
