// What DistributedDataParallel sends goes through the same door as everything else.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/tensor/debug/comm_debug.h"

namespace serried {
namespace {

TEST(DdpTraffic, IsSeenByCommDebugMode) {
  run_ranks(2, [](const Group& g) {
    torch::nn::Linear net(torch::nn::LinearOptions(3, 2));
    DistributedDataParallel ddp(net, {.process_group = g});
    const CommDebugMode comm;
    ddp.forward(torch::ones({4, 3})).sum().backward();
    EXPECT_EQ(comm.count("all_reduce"), 1) << comm.report();
    EXPECT_EQ(comm.bytes("all_reduce"), 8 * 4) << comm.report();
  });
}

}  // namespace
}  // namespace serried
