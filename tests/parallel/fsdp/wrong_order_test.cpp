// Strategies that are applied in the wrong order, or left out: what users are told, and what they do then.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/making/modules.h"
#include "tests/parallel/fsdp/sharded_models.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using namespace sharded;
using ::testing::HasSubstr;
using torch::nn::Linear;

torch::nn::Sequential two_layers() {
  return seeded(3, [] { return torch::nn::Sequential(Linear(3, 4), Linear(4, 2)); });
}

TEST(WrongOrder, FullyShardBesideTensorParallelAsksForItsMesh) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    torch::nn::Sequential net = two_layers();
    parallelize_module(*net, mesh["tp"], {{"0", ColwiseParallel()}, {"1", RowwiseParallel()}});
    EXPECT_THAT(error_text<c10::ValueError>([&] { fully_shard(*net); }),
                HasSubstr("[fully_shard] 0.weight is f32[4,3] S0 on mesh tp=2, and without .mesh it would be cut over "
                          "all ranks of the current group, those of mesh tp=2 among them\n"
                          "  fix: pass the axis whose ranks have batches of their own, of the mesh that mesh tp=2 was "
                          "taken from: fully_shard(module, {.mesh = mesh[\"dp\"]})"));
    fully_shard(*net, {.mesh = mesh["dp"]});
    net->forward(torch::ones({2, 3})).sum().backward();

    Linear by_hand(3, 4);
    distribute_parameter(by_hand->weight, mesh["tp"], {Shard(0)});
    EXPECT_THAT(error_text<c10::ValueError>([&] { fully_shard(*by_hand); }), HasSubstr("was taken from"));
  });
}

TEST(WrongOrder, AMeshOfAllRanksIsToBeMadeWithASecondAxis) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    torch::nn::Sequential net = two_layers();
    parallelize_module(*net, mesh, {{"0", ColwiseParallel()}, {"1", RowwiseParallel()}});
    EXPECT_THAT(
        error_text<c10::ValueError>([&] { fully_shard(*net); }),
        HasSubstr("  fix: pass the mesh it was born on; for tensor parallel make one mesh with an axis for each, "
                  "init_device_mesh(\"cpu\", {1, 2}, {\"dp\", \"tp\"}), and give mesh[\"tp\"] to "
                  "parallelize_module and mesh[\"dp\"] to fully_shard"));
  });
}

TEST(WrongOrder, StylesComeBeforeFullyShard) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group});
    torch::nn::Sequential net = two_layers();
    fully_shard(*net->ptr(1), {.mesh = mesh["dp"]});
    const ParallelPlan plan = {{"0", ColwiseParallel()}, {"1", RowwiseParallel()}};
    const std::string told =
        "is fully sharded already: f32[2,4] S0 on mesh dp=2\n"
        "  fix: swap the order: parallelize_module first, over mesh[\"tp\"], then fully_shard with {.mesh = "
        "mesh[\"dp\"]} of the same mesh";
    EXPECT_THAT(error_text<c10::ValueError>([&] { parallelize_module(*net, mesh["tp"], plan); }),
                HasSubstr("[parallelize_module] weight of \"1\" (torch::nn::LinearImpl) " + told));
    // Nothing has been changed.
    EXPECT_FALSE(is_dtensor(net->ptr<torch::nn::LinearImpl>(0)->weight));
    EXPECT_THAT(error_text<c10::ValueError>([&] { RowwiseParallel().apply(*net->ptr(1), mesh["tp"]); }),
                HasSubstr("[parallelize_module] weight of the module (torch::nn::LinearImpl) " + told));
  });
}

TEST(WrongOrder, LayersComeBeforeTheModuleAroundThem) {
  run_ranks(2, [](const Group&) {
    torch::nn::Sequential net = two_layers();
    fully_shard(*net);
    EXPECT_THAT(error_text<c10::ValueError>([&] { fully_shard(*net->ptr(1)); }),
                HasSubstr("[fully_shard] the module torch::nn::LinearImpl is inside of block 0 "
                          "(torch::nn::SequentialImpl: 0.weight, 0.bias, 1.weight, 1.bias), which has its parameters "
                          "already and gathers them all at once\n"
                          "  fix: shard layers before the module around them"));
  });
}

TEST(WrongOrder, WithoutAGroupTheErrorNamesTheCall) {
  torch::nn::Linear net(2, 2);
  EXPECT_THAT(error_text<c10::ValueError>([&] { fully_shard(*net); }),
              HasSubstr("[fully_shard] this thread has no current group\n  fix: keep a ProcessGroupGuard guard(group) "
                        "alive around the call, or pass the group"));
}

void step_once(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer) {
  net->forward(torch::ones({2, 3})).sum().backward();
  optimizer.step();
  optimizer.zero_grad();
}

// One step by hand before, one after; state has to go on.
void expect_goes_on(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer) {
  torch::nn::Sequential plain = two_layers();
  torch::optim::AdamW expected(plain->parameters(), 0.1);
  for (int step = 0; step < 2; ++step) {
    plain->zero_grad();
    plain->forward(torch::ones({2, 3})).sum().backward();
    expected.step();
  }
  optimizer.step();
  const std::vector<at::Tensor> values = values_of(*net), wanted = values_of(*plain);
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(values[i], wanted[i], 1e-5, 1e-6)) << i;
}

TEST(WrongOrder, StateFromBeforeTensorParallelIsPlacedByOneCall) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    torch::nn::Sequential net = two_layers();
    torch::optim::AdamW optimizer(net->parameters(), 0.1);
    step_once(net, optimizer);
    parallelize_module(*net, mesh, {{"0", ColwiseParallel()}, {"1", RowwiseParallel()}});
    net->forward(torch::ones({2, 3})).sum().backward();
    EXPECT_THAT(
        error_text<c10::TypeError>([&] { optimizer.step(); }),
        HasSubstr("[aten::add_.Tensor] argument 0 \"self\" is a plain tensor of sizes [4,3] beside a DTensor "
                  "f32[4,3] S0 on mesh tp=2\n"
                  "  fix: call place_like_parameters(optimizer) where it is state that an optimizer made before "
                  "its parameters were distributed; else wrap it: distribute_tensor(self, mesh, "));
  });
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"}, {.group = group});
    torch::nn::Sequential net = two_layers();
    torch::optim::AdamW optimizer(net->parameters(), 0.1);
    step_once(net, optimizer);
    parallelize_module(*net, mesh, {{"0", ColwiseParallel()}, {"1", RowwiseParallel()}});
    place_like_parameters(optimizer);
    net->forward(torch::ones({2, 3})).sum().backward();
    expect_goes_on(net, optimizer);
  });
}

TEST(WrongOrder, StateFromBeforeFullyShardWorksButIsWarnedOf) {
  ::testing::internal::CaptureStderr();
  for (const bool is_placed : {false, true}) {
    run_ranks(2, [&](const Group&) {
      torch::nn::Sequential net = two_layers();
      torch::optim::AdamW optimizer(net->parameters(), 0.1);
      step_once(net, optimizer);
      fully_shard(*net);
      if (is_placed) place_like_parameters(optimizer);
      net->forward(torch::ones({2, 3})).sum().backward();
      CommDebugMode comm;
      expect_goes_on(net, optimizer);
      const int for_the_test = int(net->parameters().size());
      EXPECT_EQ(comm.count() > for_the_test, !is_placed);
    });
  }
  const std::string told = ::testing::internal::GetCapturedStderr();
  static bool is_first = true;  // the process remembers its warnings
  if (!std::exchange(is_first, false)) return;
  EXPECT_THAT(told, HasSubstr("warning] [fully_shard] gradients are gathered because ops write them into plain tensors "
                              "of their sizes, as they do where an optimizer has stepped before its parameters were "
                              "sharded\n"
                              "  fix: call place_like_parameters(optimizer) once after fully_shard"));
}

// Behind the test above, which expects the first warning of the process.
struct Scaled : torch::nn::Module {
  at::Tensor scale = register_parameter("scale", at::full({}, 2.0)),
             shift = register_parameter("shift", at::zeros({1}));
};

TEST(WrongOrder, StateOfSingleNumbersFromBeforeFullyShardWorks) {
  run_ranks(2, [](const Group&) {
    const auto plain = std::make_shared<Scaled>(), net = std::make_shared<Scaled>();
    torch::optim::AdamW expected(plain->parameters(), 0.1), optimizer(net->parameters(), 0.1);
    const auto step = [](Scaled& each, torch::optim::Optimizer& by) {
      by.zero_grad();
      (each.scale * at::ones({3}) + each.shift).square().sum().backward();
      by.step();
    };
    for (int i = 0; i < 3; ++i) {
      step(*plain, expected);
      step(*net, optimizer);
      if (i == 0) {
        optimizer.zero_grad();
        fully_shard(*net);
      }
    }
    const std::vector<at::Tensor> values = values_of(*net), wanted = values_of(*plain);
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_TRUE(at::allclose(values[i], wanted[i])) << i;
  });
}

}  // namespace
}  // namespace serried::testing
