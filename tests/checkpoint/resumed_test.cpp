// Trainings that are saved, loaded and gone on with in ways of their own: bit for bit those that did not stop.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/optimizer_in_backward.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/making/modules.h"
#include "tests/checkpoint/dropping.h"
#include "tests/checkpoint/folder.h"
#include "tests/parallel/tensor_parallel/gpt.h"
#include "tests/support/close.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;
using torch::optim::AdamWOptions;

std::vector<at::Tensor> whole_parameters(const torch::nn::Module& net) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (const at::Tensor& p : net.parameters()) values.push_back(full(p.detach()).clone());
  return values;
}

void expect_bits(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) expect_equal(actual[i], expected[i], c10::str("parameter ", i));
}

TEST(CheckpointResumed, DropoutGoesOnWithTheNumbersThatCameNext) {
  const Folder folder;
  const auto make = [](uint64_t seed) { return seeded(seed, [] { return Dropping(); }); };
  const auto train = [](Dropping& net, torch::optim::Optimizer& optimizer, int count) {
    for (int i = 0; i < count; ++i) {
      optimizer.zero_grad();
      net(torch::randn({5, 6})).square().mean().backward();
      optimizer.step();
    }
  };
  torch::manual_seed(4);
  Dropping net = make(1), resumed = make(2);
  torch::optim::AdamW optimizer(net->parameters(), AdamWOptions(0.05));
  train(net, optimizer, 3);
  checkpoint::save(folder / "c",
                   {{"model", state_of(*net)}, {"optim", state_of(optimizer)}, {"random", checkpoint::random_state()}});
  train(net, optimizer, 10);
  torch::manual_seed(9);
  torch::optim::AdamW resumed_optimizer(resumed->parameters(), AdamWOptions(0.05));
  checkpoint::load(
      folder / "c",
      {{"model", state_of(*resumed)}, {"optim", state_of(resumed_optimizer)}, {"random", checkpoint::random_state()}});
  train(resumed, resumed_optimizer, 10);
  expect_bits(whole_parameters(*resumed), whole_parameters(*net));
}

// One rank's part of a fully sharded training.
class Sharded {
 public:
  explicit Sharded(const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"dp"}, {.group = group});
    for (const auto& block : *net_->blocks) fully_shard(*block.ptr(), {.mesh = mesh});
    fully_shard(*net_, {.mesh = mesh});
    optimizer_ = std::make_unique<serried::AdamW>(net_->parameters(), AdamWOptions(0.01));
  }
  at::Tensor step(const at::Tensor& ids, const at::Tensor& targets) {
    optimizer_->zero_grad();
    const at::Tensor loss = gpt::loss_of(net_(ids), targets);
    loss.backward();
    optimizer_->step();
    return loss.detach();
  }
  checkpoint::Contents contents() { return {{"model", state_of(*net_)}, {"optim", state_of(*optimizer_)}}; }
  std::vector<at::Tensor> values() const { return whole_parameters(*net_); }

 private:
  gpt::Gpt net_ = gpt::make_gpt();
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

TEST(CheckpointResumed, AShardedStepThatIsCapturedGoesOnWithWhatWasLoaded) {
  constexpr int kSteps = 10;
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const auto batch = [&](int step) { return gpt::batch_of(10 * step + group->getRank()); };
    Sharded eager(group), resumed(group);
    for (int i = 0; i < 3; ++i) eager.step(batch(i).ids, batch(i).targets);
    checkpoint::save(folder / "c", eager.contents());
    auto step = capture([&](const at::Tensor& ids, const at::Tensor& targets) { return resumed.step(ids, targets); });
    for (int i = 0; i < 6; ++i) step(batch(50 + i).ids, batch(50 + i).targets);
    const int64_t replays = step.replays();
    EXPECT_GE(replays, 2) << step.last_recapture_reason();
    checkpoint::load(folder / "c", resumed.contents());
    for (int i = 0; i < kSteps; ++i) {
      const gpt::Batch next = batch(3 + i);
      expect_equal(step(next.ids, next.targets), eager.step(next.ids, next.targets), c10::str("loss of step ", i));
    }
    EXPECT_GT(step.replays(), replays) << step.last_recapture_reason();  // recorded again for another count of steps
    expect_bits(resumed.values(), eager.values());
  });
}

// Each has one parameter: an entry for each of them, which also tells their files apart.
checkpoint::Contents contents_in_backward(const torch::nn::Module& net, const OptimizersInBackward& optimizers) {
  checkpoint::Contents contents = {{"model", state_of(net)}};
  for (size_t i = 0; i < optimizers.size(); ++i) {
    contents.push_back({"optim" + std::to_string(i), state_of(optimizers[i])});
  }
  return contents;
}

TEST(CheckpointResumed, OptimizersInBackwardGoOnEntryByEntry) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const auto make = [&] {
      return seeded(1, [] { return torch::nn::Sequential(torch::nn::Linear(5, 7), torch::nn::Linear(7, 3)); });
    };
    const auto adam = [](std::vector<at::Tensor> parameters) {
      return std::make_unique<torch::optim::Adam>(std::move(parameters), torch::optim::AdamOptions(0.01));
    };
    const auto train = [&](DistributedDataParallel<torch::nn::Sequential>& ddp, int first, int count) {
      for (int i = first; i < first + count; ++i) {
        const at::Tensor x = at::arange(10.).view({2, 5}).mul(0.1 + i).sin().to(at::kFloat) + group->getRank();
        ddp(x).square().mean().backward();
      }
    };
    torch::nn::Sequential net = make(), resumed = make();
    DistributedDataParallel ddp(net, {.process_group = group}), resumed_ddp(resumed, {.process_group = group});
    const auto optimizers = optimizer_in_backward(ddp, adam),
               resumed_optimizers = optimizer_in_backward(resumed_ddp, adam);
    train(ddp, 0, 3);
    checkpoint::save(folder / "c", contents_in_backward(*net, optimizers));
    train(ddp, 3, 10);
    train(resumed_ddp, 50, 1);
    checkpoint::load(folder / "c", contents_in_backward(*resumed, resumed_optimizers));
    train(resumed_ddp, 3, 10);
    expect_bits(whole_parameters(*resumed), whole_parameters(*net));
  });
}

}  // namespace
}  // namespace serried::testing
