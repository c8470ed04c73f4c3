// A program that uses data parallel training as the docs promise it, through the one public header.
#include <gtest/gtest.h>

#include "serried/serried.h"
#include "tests/support/close.h"

namespace {

using serried::Group;
using serried::testing::expect_close;

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("fc", fc);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return norm(fc(x)); }
  torch::nn::Linear fc{4, 3};
  torch::nn::BatchNorm1d norm{3};
};
TORCH_MODULE(Net);

torch::nn::Linear linear() {
  return serried::seeded(1, [] { return torch::nn::Linear(4, 3); });
}

at::Tensor rows(int64_t begin, int64_t end) {
  return at::arange(24, at::kFloat).view({6, 4}).slice(0, begin, end) / 10;
}

// Every field that is promised, in the order in which they may be named.
[[maybe_unused]] void options(const Group& world) {
  (void)serried::DDPOptions{.process_group = world,
                            .bucket_cap_mb = 25,
                            .find_unused_parameters = false,
                            .gradient_as_bucket_view = true,
                            .static_graph = false,
                            .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}};
  (void)serried::JoinOptions{.divide_by_initial_world_size = false, .throw_on_early_termination = true};
  (void)serried::ZeroOptions{.process_group = world};
  (void)serried::FullyShardOptions{.mesh = serried::DeviceMesh::from_group(world),
                                   .reshard_after_forward = true,
                                   .mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
                                   .ignored_params = {},
                                   .shard_placement_fn = {}};
  (void)serried::PipelineOptions{.group = world,
                                 .schedule = serried::Schedule::OneFOneB,
                                 .microbatches = 8,
                                 .loss = [](const at::Tensor& y, const at::Tensor& t) { return (y - t).sum(); },
                                 .table = serried::PipelineTable::from_csv("0F0,0B0\n"),
                                 .tied = {{{0, "tokens.weight"}, {3, "head.weight"}}}};
}

TEST(DataParallelApi, HoldsAsDocumented) {
  serried::run_ranks(2, [](const Group& world) {
    Net net = serried::seeded(2, [] { return Net(); });
    Net plain = serried::seeded(2, [] { return Net(); });
    net->to(at::kDouble);
    plain->to(at::kDouble);
    const at::Tensor x = rows(3 * world->getRank(), 3 * world->getRank() + 3).to(at::kDouble);
    serried::convert_sync_batchnorm(*net, world);
    serried::DistributedDataParallel ddp(net, {.process_group = world,
                                               .bucket_cap_mb = 25,
                                               .find_unused_parameters = false,
                                               .gradient_as_bucket_view = true,
                                               .static_graph = false});
    auto y = ddp(x.square());
    y.pow(3).sum().backward();
    plain(rows(0, 6).to(at::kDouble).square()).pow(3).sum().backward();
    // The whole batch on one rank; the average over ranks is half of its sum.
    for (size_t i = 0; i < 4; ++i) expect_close(net->parameters()[i].grad() * 2, plain->parameters()[i].grad());
    ddp.zero_grad();
    {
      auto guard = ddp.no_sync();
      ddp(x).sum().backward();
    }
    ddp.forward(x).sum().backward();
    EXPECT_EQ(ddp.module().ptr(), net.ptr());
    EXPECT_EQ(ddp.parameters().size(), 4u);
    EXPECT_EQ(ddp.logging_data().to_map().at("world_size").toInt(), 2);
  });
}

TEST(DataParallelApi, ZeroStepsAsTheOptimizerItDistributes) {
  serried::run_ranks(2, [](const Group& world) {
    torch::nn::Linear net = linear(), plain = linear();
    serried::DistributedDataParallel ddp(net, {.process_group = world});
    serried::ZeroRedundancyOptimizer<torch::optim::AdamW> opt(ddp.parameters(), torch::optim::AdamWOptions(1e-3),
                                                              {.process_group = world});
    torch::optim::AdamW expected(plain->parameters(), torch::optim::AdamWOptions(1e-3));
    ddp(rows(0, 2)).sum().backward();
    plain(rows(0, 2)).sum().backward();
    opt.step();
    expected.step();
    expect_close(net->weight, plain->weight);
    expect_close(net->bias, plain->bias);
  });
}

// What a backward with this hook leaves in .grad of the weight, on rank 0.
at::Tensor gradient_with(const std::function<void(serried::DistributedDataParallel<torch::nn::Linear>&)>& add_hook) {
  at::Tensor result;
  serried::run_ranks(2, [&](const Group& world) {
    torch::nn::Linear net = linear();
    serried::DistributedDataParallel ddp(net, {.process_group = world});
    add_hook(ddp);
    ddp(rows(3 * world->getRank(), 3 * world->getRank() + 3)).sum().backward();
    if (world->getRank() == 0) result = net->weight.grad().clone();
  });
  return result;
}

TEST(DataParallelApi, HooksComeByNameAndAsLambdas) {
  namespace hooks = serried::hooks;
  // Of a sum over rows the gradient is the sum of the rows, for each output.
  const at::Tensor own = rows(0, 3).sum(0).expand({3, 4}), average = rows(0, 6).sum(0).expand({3, 4}) / 2;
  const std::vector<std::pair<serried::CommHook, double>> by_name = {
      {hooks::fp16_compress(), 1e-2},
      {hooks::bf16_compress(), 1e-1},
      {hooks::allreduce(), 1e-5},
      {hooks::power_sgd({.rank = 2}), 1e-5},  // exact in its first iterations
      {hooks::quantize_per_tensor(), 1e-1},
      {hooks::quantize_per_channel({.bucket_size = 512}), 1e-1},
      {hooks::fp16_compress(hooks::allreduce()), 1e-2}};
  for (const auto& [hook, tolerance] : by_name) {
    const at::Tensor actual = gradient_with([&hook = hook](auto& ddp) { ddp.register_comm_hook(hook); });
    EXPECT_TRUE(at::allclose(actual, average, tolerance, tolerance)) << hook.name() << "\n"
                                                                     << actual << "\n"
                                                                     << average;
  }
  expect_close(gradient_with([](auto& ddp) { ddp.register_comm_hook(serried::hooks::noop()); }), own);
  // Gradients reach hooks undivided, and what a hook gives is what .grad gets.
  expect_close(gradient_with([](auto& ddp) {
                 ddp.register_comm_hook([](c10d::GradBucket& b) -> c10::intrusive_ptr<c10::ivalue::Future> {
                   auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
                   future->markCompleted(b.getBuffer() * 2);
                   return future;
                 });
               }),
               own * 2);
}

TEST(DataParallelApi, UnevenInputsAreJoined) {
  serried::run_ranks(2, [](const Group& world) {
    torch::nn::Linear net = linear();
    serried::DistributedDataParallel ddp(net, {.process_group = world});
    // One batch on rank 0, two on rank 1.
    const std::vector<at::Tensor> mine(size_t(world->getRank() + 1), rows(0, 2));
    const auto step = [&](const at::Tensor& batch) {
      ddp.zero_grad();
      ddp(batch).sum().backward();
    };
    const at::Tensor one = rows(0, 2).sum(0).expand({3, 4});
    serried::join({&ddp}, [&] {
      for (auto& batch : mine) step(batch);
    });
    // The last step is rank 1's alone.
    if (world->getRank() == 1) expect_close(net->weight.grad(), one / 2);
    serried::join({&ddp},
                  [&] {
                    for (auto& batch : mine) step(batch);
                  },
                  {.divide_by_initial_world_size = false});
    if (world->getRank() == 1) expect_close(net->weight.grad(), one);
  });
}

TEST(DataParallelApi, OptimizersStepInBackward) {
  serried::run_ranks(2, [](const Group& world) {
    torch::nn::Linear net = linear(), plain = linear();
    serried::DistributedDataParallel ddp(net, {.process_group = world});
    serried::optimizer_in_backward(ddp, [](auto params) { return std::make_unique<torch::optim::SGD>(params, 0.1); });
    ddp(rows(3 * world->getRank(), 3 * world->getRank() + 3)).sum().backward();
    expect_close(net->weight, plain->weight - 0.1 * rows(0, 6).sum(0).expand({3, 4}) / 2);
    expect_close(net->bias, plain->bias - 0.1 * 3);
  });
}

}  // namespace
