// Steps of styles inside capture, alone and under data parallel training: bit for bit as eager, and as one process.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/loss_parallel.h"
#include "tests/parallel/tensor_parallel/gpt.h"

namespace serried::testing {
namespace {

using gpt::Batch;
using gpt::Gpt;
using gpt::GptOptions;

constexpr int kSteps = 8;

std::vector<at::Tensor> train_whole(const GptOptions& options) {
  Gpt net = gpt::make_gpt(options);
  AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  std::vector<at::Tensor> values;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = gpt::batch_of(step);
    optimizer.zero_grad();
    const at::Tensor loss = gpt::loss_of(net(batch.ids), batch.targets);
    loss.backward();
    optimizer.step();
    values.push_back(loss.detach().clone());
  }
  for (const at::Tensor& p : net->parameters()) values.push_back(p.detach());
  return values;
}

struct Run {
  bool is_captured;
  bool loss_parallel = false;
};

// Losses of all steps, then all parameters. `forward` is the net, or what wraps it.
template <class Forward>
std::vector<at::Tensor> train(Gpt& net, Forward& forward, const DeviceMesh& tp, const Run& run, int64_t part = 0,
                              int64_t parts = 1) {
  AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  const auto eager = [&](const at::Tensor& ids, const at::Tensor& targets) {
    optimizer.zero_grad();
    const LossParallel guard(run.loss_parallel);
    const at::Tensor loss = gpt::loss_of(forward(ids), DTensor::from_local(targets, tp, {Replicate()}));
    loss.backward();
    optimizer.step();
    return DTensor(loss).full_tensor();
  };
  auto captured = capture(eager);
  std::vector<at::Tensor> values;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = gpt::batch_of(step);
    const at::Tensor ids = batch.ids.chunk(parts)[size_t(part)].contiguous();
    const at::Tensor targets = batch.targets.chunk(parts)[size_t(part)].contiguous();
    values.push_back((run.is_captured ? captured(ids, targets) : eager(ids, targets)).detach().clone());
  }
  if (run.is_captured) {
    EXPECT_GE(captured.replays(), 3) << captured.last_recapture_reason();
  }
  for (const at::Tensor& p : net->parameters()) values.push_back(DTensor(p).full_tensor().detach());
  return values;
}

TEST(CapturedStyles, ReplaysAreEagerStepsBitForBit) {
  for (const GptOptions& options : {GptOptions{}, GptOptions{.fused = true}, GptOptions{.tied = true}}) {
    const std::vector<at::Tensor> expected = train_whole(options);
    on_mesh({2}, [&](const DeviceMesh& mesh) {
      for (const ParallelPlan& plan : {gpt::tensor_plan(options), gpt::sequence_plan(options)}) {
        std::vector<std::vector<at::Tensor>> values;
        for (bool is_captured : {false, true}) {
          Gpt net = gpt::make_gpt(options);
          parallelize_module(*net, mesh, plan);
          values.push_back(train(net, net, mesh, {.is_captured = is_captured}));
        }
        ASSERT_EQ(values[0].size(), expected.size());
        for (size_t i = 0; i < expected.size(); ++i) {
          expect_equal(values[1][i], values[0][i], std::to_string(i));
          gpt::expect_near(values[0][i], expected[i], std::to_string(i));
        }
      }
    });
  }
}

TEST(CapturedStyles, DataParallelTimesTensorParallelTrainsAsOneProcessDoes) {
  const GptOptions options;
  const std::vector<at::Tensor> expected = train_whole(options);
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    for (bool sequence : {false, true}) {
      std::vector<std::vector<at::Tensor>> values;
      for (bool is_captured : {false, true}) {
        Gpt net = gpt::make_gpt(options);
        parallelize_module(*net, mesh["tp"], sequence ? gpt::sequence_plan() : gpt::tensor_plan());
        DistributedDataParallel ddp(net, {.process_group = mesh.get_group("dp")});
        values.push_back(train(net, ddp, mesh["tp"], {.is_captured = is_captured, .loss_parallel = sequence},
                               mesh.get_local_rank("dp"), 2));
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        expect_equal(values[1][i], values[0][i], std::to_string(i));
        if (i >= size_t(kSteps)) gpt::expect_near(values[0][i], expected[i], std::to_string(i));
      }
    }
  });
}

}  // namespace
}  // namespace serried::testing
