// Context parallel with data, fully sharded and tensor parallel training, eager and captured, against one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/context_parallel/context_parallel.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/parallel/weighted_loss.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/context_parallel/long_gpt.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using gpt::GptOptions;
using long_gpt::LongGpt;
using long_gpt::Sequence;

constexpr int64_t kLength = 13;
constexpr double kMostNorm = 0.05;  // below the norms of all steps
constexpr int64_t kBatch = 2;       // per data parallel rank
const GptOptions kModel = {.layers = 2, .width = 24, .heads = 4, .kv_heads = 4};

const ParallelPlan kTensorPlan = {{"blocks.*.[qkv]", ColwiseParallel()},
                                  {"blocks.*.out", RowwiseParallel()},
                                  {"blocks.*.up", ColwiseParallel()},
                                  {"blocks.*.down", RowwiseParallel()}};

// The batches of all data parallel ranks, one below the other.
Sequence whole_batch(int step, int64_t data_ranks) {
  return long_gpt::sequence_of(kLength, step, kBatch * data_ranks);
}

Sequence own_batch(int step, int64_t data_rank, int64_t data_ranks) {
  const Sequence all = whole_batch(step, data_ranks);
  const auto rows = [&](const at::Tensor& t) { return t.narrow(0, data_rank * kBatch, kBatch).clone(); };
  return {rows(all.ids), rows(all.targets), all.positions};
}

struct Training {
  bool is_captured = false;
  AttentionWay way = AttentionWay::automatic;
  bool clips = false;

  int num_steps() const { return clips ? 20 : 6; }
  std::unique_ptr<torch::optim::Optimizer> optimizer_of(const torch::nn::Module& net) const {
    if (clips) return std::make_unique<AdamW>(net.parameters(), torch::optim::AdamWOptions(0.01));
    return std::make_unique<SGD>(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }
};

// Losses, norms where they are clipped, then parameters.
std::vector<at::Tensor> trained_whole(int64_t data_ranks, const Training& run = {}) {
  LongGpt net = long_gpt::make_net(kModel, kLength);
  const auto optimizer = run.optimizer_of(*net);
  std::vector<at::Tensor> losses, norms;
  for (int step = 0; step < run.num_steps(); ++step) {
    const Sequence s = whole_batch(step, data_ranks);
    optimizer->zero_grad();
    const at::Tensor loss = long_gpt::share_of_loss(net(s.ids, s.positions), s.targets, s.ids.numel());
    loss.backward();
    if (run.clips) {
      norms.push_back(at::scalar_tensor(torch::nn::utils::clip_grad_norm_(net->parameters(), kMostNorm), at::kDouble));
      EXPECT_GT(norms.back().item<double>(), kMostNorm);
    }
    optimizer->step();
    losses.push_back(loss.detach());
  }
  losses.insert(losses.end(), norms.begin(), norms.end());
  for (const at::Tensor& p : net->parameters()) losses.push_back(p.detach());
  return losses;
}

// One step on parts; what it gives is this rank's share of the loss.
using StepFunction =
    std::function<at::Tensor(const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions)>;

void expect_one_norm(const at::Tensor& norm, const Group& world) {
  const at::Tensor all = all_gather(norm.view({1}), world);
  for (const at::Tensor& each : all.unbind()) expect_equal(each, norm, "norms of all ranks");
}

// As trained_whole; losses are averaged over `group`.
std::vector<at::Tensor> train(LongGpt& net, const DeviceMesh& cp, const Training& run, const StepFunction& forward,
                              const std::function<Sequence(int)>& batch, const Group& group) {
  const auto optimizer = run.optimizer_of(*net);
  const auto eager = [&](const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions) {
    optimizer->zero_grad();
    const at::Tensor loss = forward(ids, targets, positions);
    loss.backward();
    std::vector<at::Tensor> results = {loss.detach()};
    if (run.clips) results.push_back(clip_grad_norm_(net->parameters(), kMostNorm).tensor());
    optimizer->step();
    return results;
  };
  auto captured = capture(eager);
  std::vector<at::Tensor> values, norms;
  for (int step = 0; step < run.num_steps(); ++step) {
    const Sequence s = batch(step);
    const ContextParallel scope(cp,
                                {.buffers = {s.ids, s.targets, s.positions}, .seq_dims = {1, 1, 0}, .rotate = run.way});
    const std::vector<at::Tensor> results =
        run.is_captured ? captured(s.ids, s.targets, s.positions) : eager(s.ids, s.targets, s.positions);
    values.push_back(all_reduce(full(results[0]), group, c10d::ReduceOp::AVG));
    if (!run.clips) continue;
    norms.push_back(results[1].clone());
    expect_one_norm(norms.back(), cp.root_group());
  }
  if (run.is_captured) EXPECT_GE(captured.replays(), run.num_steps() - 3) << captured.last_recapture_reason();
  values.insert(values.end(), norms.begin(), norms.end());
  for (const at::Tensor& p : net->parameters()) values.push_back(full(p.detach()).clone());
  return values;
}

struct Expected {
  std::vector<at::Tensor> plain, clipped;
};

Expected expected_of(int64_t data_ranks) {
  return {trained_whole(data_ranks), trained_whole(data_ranks, {.clips = true})};
}

// `trained(run)` is near what one process has for every way, and captured the same bit for bit.
void expect_trained(const std::function<std::vector<at::Tensor>(const Training&)>& trained, const Expected& expected) {
  for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
    const std::vector<at::Tensor> eager = trained({.way = way});
    long_gpt::expect_near(eager, expected.plain, std::string(to_string(way)));
    const std::vector<at::Tensor> captured = trained({.is_captured = true, .way = way});
    for (size_t i = 0; i < eager.size(); ++i) expect_equal(captured[i], eager[i], c10::str(to_string(way), " ", i));
    const std::vector<at::Tensor> clipped = trained({.way = way, .clips = true});
    long_gpt::expect_near(clipped, expected.clipped, c10::str(to_string(way), ", clipped"));
  }
}

at::Tensor mean_loss(const at::Tensor& logits, const at::Tensor& targets) {
  return torch::nn::functional::cross_entropy(logits.flatten(0, 1), targets.flatten());
}

TEST(ContextParallelTogether, WithDistributedDataParallel) {
  const Expected expected = expected_of(2);
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
  const Expected expected = expected_of(2);
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
  const Expected expected = expected_of(1);
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"cp", "tp"}, {.group = group});
    const DeviceMesh cp = mesh["cp"], tp = mesh["tp"];
    expect_trained(
        [&](const Training& run) {
          LongGpt net = long_gpt::make_net(kModel, kLength);
          parallelize_module(*net, tp, kTensorPlan);
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

using Counts = std::map<std::string, int64_t>;

// Of the second step by the ring, forward and then all of it, and how many bytes of keys and values it sends on.
void expect_counts(const DeviceMesh& cp, const StepFunction& forward, const Counts& in_forward, const Counts& in_all,
                   int64_t bytes_of_a_position) {
  for (int step = 0; step < 2; ++step) {
    const Sequence s = own_batch(step, 0, 1);
    const ContextParallel scope(
        cp, {.buffers = {s.ids, s.targets, s.positions}, .seq_dims = {1, 1, 0}, .rotate = AttentionWay::ring});
    const CommDebugMode comm;
    const at::Tensor loss = forward(s.ids, s.targets, s.positions);
    if (step == 1) {
      EXPECT_EQ(comm.counts(), in_forward) << comm.report();
      EXPECT_EQ(comm.bytes("send"), s.positions.numel() * bytes_of_a_position) << comm.report();
    }
    loss.backward();
    if (step == 1) EXPECT_EQ(comm.counts(), in_all) << comm.report();
  }
}

TEST(ContextParallelTogether, CommunicatesWhatFullyShardAndTheRingNeed) {
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "cp"}, {.group = group});
    LongGpt net = long_gpt::make_net(kModel, kLength);
    const DeviceMesh all = mesh.flatten("all");
    for (size_t i = 0; i < net->blocks->size(); ++i) fully_shard(*net->blocks->ptr(i), {.mesh = all});
    fully_shard(*net, {.mesh = all});
    // Two blocks and the root are gathered and reduced; the last block and the root stay whole until backward. Of both
    // blocks keys and values go one step, in backward again, and their gradients two.
    expect_counts(
        mesh["cp"],
        [&](const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions) {
          return mean_loss(net(ids, positions), targets);
        },
        {{"all_gather", 3}, {"send", 2}, {"recv", 2}},
        {{"all_gather", 4}, {"reduce_scatter", 3}, {"send", 8}, {"recv", 8}},
        2 * 2 * kBatch * kModel.width * int64_t(sizeof(double)));
  });
}

TEST(ContextParallelTogether, CommunicatesWhatTensorParallelAndTheRingNeed) {
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"cp", "tp"}, {.group = group});
    const DeviceMesh tp = mesh["tp"];
    LongGpt net = long_gpt::make_net(kModel, kLength);
    parallelize_module(*net, tp, kTensorPlan);
    // Of each block the results of `out` and `down` are added up, and in backward the gradients of what comes into the
    // layers before them; tensor parallel ranks send the keys and values of their heads.
    expect_counts(
        mesh["cp"],
        [&](const at::Tensor& ids, const at::Tensor& targets, const at::Tensor& positions) {
          const auto whole = [&](const at::Tensor& t) { return DTensor::from_local(t, tp, {Replicate()}); };
          return mean_loss(net(whole(ids), whole(positions)), whole(targets));
        },
        {{"all_reduce", 4}, {"send", 2}, {"recv", 2}}, {{"all_reduce", 8}, {"send", 8}, {"recv", 8}},
        2 * 2 * kBatch * kModel.width / 2 * int64_t(sizeof(double)));
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
