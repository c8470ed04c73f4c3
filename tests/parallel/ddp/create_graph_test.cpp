// Backward with create_graph: first gradients are right, and a warning says what second ones are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried::create_graph_test {
namespace {

using ::testing::HasSubstr;

TEST(CreateGraph, AveragesFirstGradientsAndWarnsOnce) {
  ::testing::internal::CaptureStderr();
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear plain = seeded(0, [] { return torch::nn::Linear(3, 2); });
    torch::nn::Linear net = seeded(0, [] { return torch::nn::Linear(3, 2); });
    DistributedDataParallel ddp(net, {.process_group = group});
    const at::Tensor batch = at::arange(12, at::kFloat).reshape({4, 3});
    for (int step = 0; step < 3; ++step) {
      plain(batch).square().mean().backward();
      const at::Tensor loss = ddp(batch.narrow(0, 2 * group->getRank(), 2)).square().mean();
      loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true);
      testing::expect_close(net->weight.grad(), plain->weight.grad());
    }
  });
  const std::string warnings = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(warnings, HasSubstr("[DistributedDataParallel] backward runs with create_graph: first gradients are "
                                  "averaged, but gradients of gradients do not flow through that"));
  const std::string begin = "backward runs with create_graph";
  EXPECT_EQ(warnings.find(begin), warnings.rfind(begin));
}

}  // namespace
}  // namespace serried::create_graph_test
