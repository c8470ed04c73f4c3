// A small GPT on 4 ranks, fully sharded: alone, times tensor parallel, and with recompute, beside data parallel alone.
// Start it with: serried run -n 4 build/bin/11_fully_sharded_gpt
// All end with the same loss; cut, a rank keeps a quarter of the parameters, gradients and optimizer state.
#include "small_gpt.h"

#include <cstdio>

namespace {

using namespace small_gpt;

/// How the ranks share the work. Blocks are cut over `tp` by kPlan, if there is one.
struct Strategy {
  const char* name;
  DeviceMesh dp;  // every rank of it has a batch of its own
  std::optional<DeviceMesh> tp = {};
  bool is_sharded = true;  // over `dp`; else every rank of `dp` has a copy
  bool recomputes = false;
};

struct Result {
  double loss;  // of the last batch, of all ranks
  double megabytes;
  double whole_megabytes;  // of parameters that are gathered, at most
};

at::Tensor logits_of(Gpt& net, const at::Tensor& ids, bool recomputes) {
  if (!recomputes) return net(ids);
  at::Tensor x = net->letters(ids) + net->places(at::arange(ids.size(1)));
  for (size_t i = 0; i < net->blocks->size(); ++i) x = recompute(Block(net->blocks->ptr<BlockImpl>(i)), x);
  return net->head(net->norm(x));
}

FullyShardHandle shard(Gpt& net, const DeviceMesh& mesh) {
  for (const auto& block : *net->blocks) fully_shard(*block.ptr(), {.mesh = mesh});
  return fully_shard(*net, {.mesh = mesh});
}

Result train(const at::Tensor& ids, int steps, const Strategy& strategy) {
  const Group dp = strategy.dp.get_group();
  Gpt net = seeded(1, [] { return Gpt(); });
  if (strategy.tp) parallelize_module(*net, *strategy.tp, kPlan);
  std::optional<FullyShardHandle> sharded;
  std::optional<DistributedDataParallel<Gpt>> ddp;
  strategy.is_sharded ? void(sharded = shard(net, strategy.dp))
                      : void(ddp.emplace(net, DDPOptions{.process_group = dp}));
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);
  at::Tensor loss;
  for (int i = 0; i < steps; ++i) {
    const at::Tensor batch = batch_of(ids, i, dp->getRank(), dp->getSize());
    at::Tensor input = batch.slice(1, 0, kContext), targets = batch.slice(1, 1).flatten();
    if (strategy.tp) targets = DTensor::from_local(targets, *strategy.tp, {Replicate()});
    optimizer.zero_grad();
    const at::Tensor logits = ddp ? (*ddp)(input) : logits_of(net, input, strategy.recomputes);
    loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets);
    loss.backward();
    clip_grad_norm_(net->parameters(), 1.0);
    optimizer.step();
  }
  loss = strategy.tp ? DTensor(loss).full_tensor() : loss;
  const double whole = sharded ? 1e-6 * double(sharded->usage().peak_gathered_bytes) : 0;
  return {all_reduce(loss.detach(), dp, c10d::ReduceOp::AVG).item<double>(), megabytes(*net), whole};
}

int run(int steps) {
  at::set_num_threads(1);  // the ranks share the cores
  const Group world = new_group();
  TORCH_CHECK_VALUE(world->getSize() == 4, "start it on 4 ranks: serried run -n 4 build/bin/11_fully_sharded_gpt");
  const DeviceMesh all = init_device_mesh("cpu", {4}, {"dp"}, {.group = world});
  const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = world});
  const Strategy strategies[] = {
      {.name = "data parallel, 4", .dp = all, .is_sharded = false},
      {.name = "fully sharded, 4", .dp = all},
      {.name = "fully sharded 2 x tensor 2", .dp = mesh["dp"], .tp = mesh["tp"]},
      {.name = "the same with recompute", .dp = mesh["dp"], .tp = mesh["tp"], .recomputes = true},
  };
  const at::Tensor ids = read_ids(GPT_TEXT);
  if (world->getRank() == 0) {
    std::printf("after %4d steps             loss      MB per rank  MB gathered, at most\n", steps);
  }
  double expected = 0;
  bool is_same = true;
  for (const Strategy& strategy : strategies) {
    const Result result = train(ids, steps, strategy);
    if (expected == 0) expected = result.loss;
    is_same = is_same && std::abs(result.loss - expected) < 1e-3 * expected;
    if (world->getRank() != 0) continue;
    std::printf("%-27s  %.6f  %11.2f  %20.2f\n", strategy.name, result.loss, result.megabytes, result.whole_megabytes);
  }
  if (world->getRank() == 0)
    std::printf("MB of parameters, gradients and AdamW. The same loss: %s\n", is_same ? "yes" : "no");
  return is_same ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc > 1 ? std::max(1, std::atoi(argv[1])) : 100);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s\n", error.what_without_backtrace());
    return EXIT_FAILURE;
  }
}
