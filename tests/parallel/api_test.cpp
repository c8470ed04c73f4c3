// A program that uses data parallel training as the docs promise it, through the one public header.
#include <gtest/gtest.h>

#include "serried/serried.h"

namespace {

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

void step(serried::DistributedDataParallel<Net>& ddp, const at::Tensor& x) {
  ddp.zero_grad();
  ddp(x).sum().backward();
}

TEST(DataParallelApi, HoldsAsDocumented) {
  serried::run_ranks(2, [](const serried::Group& world) {
    Net net;
    const at::Tensor x = at::rand({4, 4});
    serried::convert_sync_batchnorm(*net, world);
    serried::DistributedDataParallel ddp(net, {.process_group = world,
                                               .bucket_cap_mb = 25,
                                               .find_unused_parameters = false,
                                               .gradient_as_bucket_view = true,
                                               .static_graph = false});
    auto y = ddp(x);
    y.sum().backward();
    ddp.forward(x).sum().backward();
    {
      auto guard = ddp.no_sync();
      ddp(x).sum().backward();
    }
    EXPECT_EQ(ddp.module().ptr(), net.ptr());
    EXPECT_EQ(ddp.parameters().size(), 4u);
    EXPECT_EQ(ddp.logging_data().to_map().at("world_size").toInt(), 2);
    ddp.register_comm_hook(serried::hooks::fp16_compress());
    step(ddp, x);
    serried::ZeroRedundancyOptimizer<torch::optim::AdamW> opt(ddp.parameters(), torch::optim::AdamWOptions(1e-3),
                                                              {.process_group = world});
    opt.step();
  });
}

TEST(DataParallelApi, HooksComeByNameAndAsLambdas) {
  namespace hooks = serried::hooks;
  for (const serried::CommHook& hook :
       {hooks::bf16_compress(), hooks::allreduce(), hooks::noop(), hooks::power_sgd({.rank = 2}),
        hooks::quantize_per_tensor(), hooks::quantize_per_channel({.bucket_size = 512}),
        hooks::fp16_compress(hooks::allreduce())}) {
    EXPECT_NE(hook.name(), "");
  }
  serried::run_ranks(2, [](const serried::Group& world) {
    torch::nn::Linear net(4, 3);
    serried::DistributedDataParallel ddp(net, {.process_group = world});
    ddp.register_comm_hook([](c10d::GradBucket& b) -> c10::intrusive_ptr<c10::ivalue::Future> {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->markCompleted(b.getBuffer());
      return future;
    });
    ddp(at::rand({2, 4})).sum().backward();
  });
}

TEST(DataParallelApi, UnevenInputsAndOptimizersInBackward) {
  serried::run_ranks(2, [](const serried::Group& world) {
    torch::nn::Linear net(4, 3);
    serried::DistributedDataParallel ddp(net, {.process_group = world});
    const std::vector<at::Tensor> mine(size_t(world->getRank() + 1), at::rand({2, 4}));
    const auto train = [&] {
      for (auto& batch : mine) ddp(batch).sum().backward();
    };
    serried::join({&ddp}, train);
    serried::join({&ddp}, train, {.divide_by_initial_world_size = false});
    serried::optimizer_in_backward(ddp, [](auto params) { return std::make_unique<torch::optim::SGD>(params, 0.1); });
    ddp(at::rand({2, 4})).sum().backward();
  });
}

}  // namespace
