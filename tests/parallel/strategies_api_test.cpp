// What the docs promise of strategies, checkpoints, Elastic and capture, each statement as a user would write it.
#include <gtest/gtest.h>

#include "serried/serried.h"

namespace serried::strategies_api {

using torch::nn::AnyModule;
using Loss = std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(at::Tensor x) { return fc2(fc1(x)); }
  torch::nn::Linear fc1{8, 8}, fc2{8, 8};
};
TORCH_MODULE(Net);

struct MyStyle {
  void apply(torch::nn::Module&, const DeviceMesh&) const {}
};

// Compiled, not run: what each of them does has tests of its own.
[[maybe_unused]] void styles(Net net, Net block, DeviceMesh mesh, at::Tensor logits, at::Tensor target, at::Tensor x) {
  const DeviceMesh tp = mesh["tp"];
  parallelize_module(*net, mesh["tp"],
                     {{"fc1", ColwiseParallel()},
                      {"fc2", RowwiseParallel()},
                      {"norm", SequenceParallel()},
                      {"head", PrepareModuleOutput({.desired = {Replicate()}})}});
  parallelize_module(*net, tp, {{"fc1", MyStyle()}});
  parallelize_module(
      *net, tp,
      {{"blocks.*.qkv", ColwiseParallel({.fused = 3})}, {"blocks.[01].out", RowwiseParallel({.output = {Shard(1)}})}});
  {
    LossParallel guard;
    torch::nn::functional::cross_entropy(logits, target).backward();
  }
  fully_shard(*block, {.mesh = mesh["dp"],
                       .reshard_after_forward = true,
                       .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
  auto handle = fully_shard(*net);
  { auto guard = handle.no_sync(true); }
  handle.unshard();
  handle.reshard();
  at::Tensor y = recompute([](at::Tensor a) { return a; }, x);
  y = constrain(x, {Shard(1)});
  (void)ColwiseOptions{.input = {}, .output = {}, .fused = 1};
  (void)RowwiseOptions{.input = {}, .output = {}};
  (void)SequenceOptions{.dim = 1};
  (void)PrepareOptions{.desired = {}};
  (void)MixedPrecision{.param_dtype = at::kHalf,
                       .reduce_dtype = at::kHalf,
                       .buffer_dtype = at::kHalf,
                       .output_dtype = at::kHalf,
                       .cast_forward_inputs = true};
}

[[maybe_unused]] void pipelines(Group pp, Group dp, Net stage, Net s0, Net s2, Loss loss_fn, at::Tensor input,
                                at::Tensor target) {
  double norm = clip_grad_norm_(stage->parameters(), 1.0);
  norm = clip_grad_norm_(stage->parameters(), 1.0, 2.0, {.pipeline = pp});
  Pipeline pipe(stage, {.group = pp, .schedule = Schedule::OneFOneB, .microbatches = 8, .loss = loss_fn});
  auto losses = pipe.step(input, target);
  Pipeline several(std::vector<AnyModule>{AnyModule(s0), AnyModule(s2)}, {.group = pp});
  std::shared_ptr<DistributedDataParallel<Net>> ddp(new DistributedDataParallel(stage, {.process_group = dp}));
  Pipeline averaged(ddp, {.group = pp});
  PipelineTable own = PipelineTable::from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  Pipeline planned(stage, {.group = pp, .table = own});
  (void)TableOptions{.ranks = 1, .stages_per_rank = 1, .microbatches = 1};
  (void)ClipOptions{.pipeline = pp};
}

[[maybe_unused]] void long_and_wide(DeviceMesh mesh, at::Tensor x, at::Tensor pos, at::Tensor logits,
                                    std::vector<AnyModule> experts) {
  { ContextParallel guard(mesh["cp"], {.buffers = {x, pos}, .seq_dims = {1, 0}}); }
  at::Tensor whole = context_parallel_unshard(mesh["cp"], x, {.seq_dim = 1});
  DTensor q = distribute_tensor(whole, mesh["cp"], {BalancedShard(2)});
  auto out = moe(x, logits, experts, {.mesh = mesh["ep"], .top_k = 2, .capacity = 1.25});
}

[[maybe_unused]] void checkpoints(Net net, at::Tensor t) {
  serried::AdamW opt(net->parameters(), torch::optim::AdamWOptions(1e-3));
  place_like_parameters(opt);
  checkpoint::save("ckpt/step100", {{"model", checkpoint::state_of(*net)}, {"optim", checkpoint::state_of(opt)}});
  checkpoint::save("ckpt/step100", {{"lr", 0.1}, {"note", "text"}, {"table", t}});
  checkpoint::load("ckpt/step100", {{"model", checkpoint::state_of(*net)}}, {.strict = false});
  checkpoint::Saving saving =
      checkpoint::async_save("ckpt/step200", {{"model", checkpoint::state_of(*net)}, {"step", 200}});
  saving.done();
  saving.wait();
  (void)checkpoint::read_value("ckpt/step200", "step").toInt();
  save_safetensors("net.safetensors", *net);
  load_safetensors("net.safetensors", *net);
}

[[maybe_unused]] void elastic_steps(Net net, Loss loss_fn, at::Tensor x, at::Tensor y) {
  serried::AdamW opt(net->parameters(), torch::optim::AdamWOptions(1e-3));
  DistributedDataParallel ddp(net);
  Elastic elastic({.min_ranks = 2});
  elastic.keep("model", *net);
  elastic.keep("optimizer", opt);
  elastic.on_change([&](const Group& world) { ddp.set_process_group(world); });
  while (elastic.step() < 100) {
    elastic.run([&] {
      opt.zero_grad();
      loss_fn(ddp(x), y).backward();
      if (elastic.commit()) opt.step();
    });
  }
  auto captured = capture([&](const at::Tensor& a) { return a; },
                          {.passes = {passes::bucket_collectives(25), passes::overlap()}, .dynamic = false});
}

TEST(StrategiesApi, TablesAreAsDocumented) {
  PipelineTable t = pipeline_table(Schedule::ZBV, {.ranks = 4, .stages_per_rank = 2, .microbatches = 8});
  EXPECT_NEAR(simulate(t).bubble, 0.059, 0.0005);
  EXPECT_EQ(simulate(t).peak_in_flight[0], 8);
  EXPECT_GT(simulate(t).makespan, 0);
  EXPECT_EQ(PipelineTable::from_csv(t.to_csv()).to_csv(), t.to_csv());
}

}  // namespace serried::strategies_api
