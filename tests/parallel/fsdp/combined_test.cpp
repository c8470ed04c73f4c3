// fully_shard with styles of tensor parallel, recompute, and all of them at once, against one process.
#include <gtest/gtest.h>

#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/clip_grad.h"
#include "serried/parallel/recompute.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/guards.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/parallel/tensor_parallel/gpt.h"

namespace serried::testing {
namespace {

struct Combined {
  gpt::GptOptions model = {};
  Sizes shape = {2, 2};  // dp, tp
  bool by_sequence = false;
  bool recomputes = false;
};

at::Tensor logits_of(gpt::Gpt& net, const at::Tensor& ids, bool recomputes) {
  if (!recomputes) return net(ids);
  at::Tensor x = net->tokens(ids) + net->places(at::arange(ids.size(1)));
  for (size_t i = 0; i < net->blocks->size(); ++i) {
    auto block = net->blocks->ptr<gpt::BlockImpl>(i);
    x = recompute([block](const at::Tensor& y) { return block->forward(y); }, x);
  }
  return net->head(net->norm(x));
}

FullyShardHandle shard_blocks(gpt::Gpt& net, const DeviceMesh& dp) {
  for (const auto& block : *net->blocks) fully_shard(*block.ptr(), {.mesh = dp});
  return fully_shard(*net, {.mesh = dp});
}

// Three steps of AdamW with clipping; every data parallel rank has a batch of its own.
void expect_trains_like_one_process(const Combined& combined) {
  run_ranks(int(combined.shape[0] * combined.shape[1]), [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", combined.shape, {"dp", "tp"}, {.group = group});
    gpt::Gpt plain = gpt::make_gpt(combined.model), net = gpt::make_gpt(combined.model);
    parallelize_module(*net, mesh["tp"],
                       combined.by_sequence ? gpt::sequence_plan(combined.model) : gpt::tensor_plan(combined.model));
    shard_blocks(net, mesh["dp"]);
    torch::optim::AdamW a(net->parameters(), 0.01), b(plain->parameters(), 0.01);
    const int64_t dp = combined.shape[0];
    for (int step = 0; step < 3; ++step) {
      const auto batch = [&](int64_t rank) { return gpt::batch_of(int(rank) + 10 * step); };
      a.zero_grad();
      b.zero_grad();
      const gpt::Batch mine = batch(mesh.get_local_rank("dp"));
      const ImplicitReplication targets_are_whole;
      gpt::loss_of(logits_of(net, mine.ids, combined.recomputes), mine.targets).backward();
      for (int64_t rank = 0; rank < dp; ++rank) {
        (gpt::loss_of(plain(batch(rank).ids), batch(rank).targets) / double(dp)).backward();
      }
      gpt::expect_gradients_of(*plain, *net);
      EXPECT_NEAR(clip_grad_norm_(net->parameters(), 0.1), torch::nn::utils::clip_grad_norm_(plain->parameters(), 0.1),
                  1e-9);
      a.step();
      b.step();
    }
    for (const auto& item : plain->named_parameters()) {
      gpt::expect_near(DTensor(net->named_parameters()[item.key()]).full_tensor(), item.value(), item.key());
    }
  });
}

TEST(FullyShardCombined, WithStyles) {
  expect_trains_like_one_process({});
  expect_trains_like_one_process({.shape = {3, 2}});
}

TEST(FullyShardCombined, WithStylesFusedAndTied) {
  expect_trains_like_one_process({.model = {.fused = true, .tied = true}});
}

TEST(FullyShardCombined, WithSequenceParallel) {
  expect_trains_like_one_process({.by_sequence = true});
}

// Four vectors of norms and two biases in each block, norm and places in the root; micro-batches under no_sync, too.
TEST(FullyShardCombined, SequenceParallelSumsUpTheRestOfABlockByOneAllReduce) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    gpt::Gpt plain = gpt::make_gpt(), net = gpt::make_gpt(), alone = gpt::make_gpt();
    parallelize_module(*net, mesh["tp"], gpt::sequence_plan());
    parallelize_module(*alone, mesh["tp"], gpt::sequence_plan());
    const FullyShardHandle handle = shard_blocks(net, mesh["dp"]);
    const auto sums_of_backward = [&](gpt::Gpt& each, int64_t salt) {
      const gpt::Batch mine = gpt::batch_of(int(mesh.get_local_rank("dp")) + int(salt));
      const ImplicitReplication targets_are_whole;
      const at::Tensor loss = gpt::loss_of(each(mine.ids), mine.targets);
      CommDebugMode comm;
      loss.backward();
      return comm.count("all_reduce");
    };
    const int64_t joined = sums_of_backward(alone, 0);
    EXPECT_EQ(sums_of_backward(net, 0), joined + int64_t(net->blocks->size()));
    {
      const auto guard = handle.no_sync();
      sums_of_backward(net, 10);
    }
    sums_of_backward(net, 20);
    for (const int salt : {0, 10, 20}) {
      for (int rank = 0; rank < 2; ++rank) {
        const gpt::Batch batch = gpt::batch_of(rank + salt);
        (gpt::loss_of(plain(batch.ids), batch.targets) / 2.).backward();
      }
    }
    gpt::expect_gradients_of(*plain, *net);
  });
}

TEST(FullyShardCombined, WithStylesAndRecompute) {
  expect_trains_like_one_process({.recomputes = true});
}

// Blocks of fully_shard alone: what is computed again is gathered once more, and the bits are the same.
TEST(FullyShardCombined, WithRecomputeIsBitwiseThatWithout) {
  for (const int world : {1, 2, 3}) {
    run_ranks(world, [](const Group& group) {
      gpt::Gpt kept = gpt::make_gpt(), again = gpt::make_gpt();
      const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"dp"}, {.group = group});
      shard_blocks(kept, mesh);
      const FullyShardHandle handle = shard_blocks(again, mesh);
      torch::optim::AdamW a(kept->parameters(), 0.01), b(again->parameters(), 0.01);
      for (int step = 0; step < 3; ++step) {
        const gpt::Batch mine = gpt::batch_of(group->getRank() + 10 * step);
        a.zero_grad();
        b.zero_grad();
        gpt::loss_of(logits_of(kept, mine.ids, false), mine.targets).backward();
        gpt::loss_of(logits_of(again, mine.ids, true), mine.targets).backward();
        a.step();
        b.step();
      }
      const auto expected = kept->named_parameters();
      for (const auto& item : again->named_parameters()) {
        EXPECT_TRUE(DTensor(item.value()).full_tensor().equal(DTensor(expected[item.key()]).full_tensor()))
            << item.key();
      }
      EXPECT_EQ(handle.usage().gradient_bytes, 0);
    });
  }
}

TEST(FullyShardCombined, WithRecomputeCapturedIsBitwiseEager) {
  run_ranks(2, [](const Group& group) {
    gpt::Gpt eager = gpt::make_gpt(), net = gpt::make_gpt();
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    shard_blocks(eager, mesh);
    shard_blocks(net, mesh);
    serried::AdamW a(eager->parameters(), torch::optim::AdamWOptions(0.01)),
        b(net->parameters(), torch::optim::AdamWOptions(0.01));
    const auto train = [](gpt::Gpt& each, torch::optim::Optimizer& optimizer, const at::Tensor& ids,
                          const at::Tensor& targets) {
      optimizer.zero_grad();
      const at::Tensor loss = gpt::loss_of(logits_of(each, ids, true), targets);
      loss.backward();
      optimizer.step();
      return loss;
    };
    auto step = capture([&](const at::Tensor& ids, const at::Tensor& targets) { return train(net, b, ids, targets); });
    for (int i = 0; i < 6; ++i) {
      const gpt::Batch mine = gpt::batch_of(group->getRank() + 10 * i);
      EXPECT_TRUE(step(mine.ids, mine.targets).equal(train(eager, a, mine.ids, mine.targets))) << "step " << i;
    }
    EXPECT_GE(step.replays(), 2) << step.last_recapture_reason();
  });
}

}  // namespace
}  // namespace serried::testing
