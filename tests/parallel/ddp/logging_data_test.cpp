// What DistributedDataParallel says about itself.
#include "serried/parallel/ddp/logging_data.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <sstream>

#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"

namespace serried {
namespace {

using ::testing::HasSubstr;

TEST(DdpLoggingData, StepsAreCountedForThoseWhoLookFromOutside) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net(4, 3);
    DistributedDataParallel ddp(net, {.process_group = group});
    for (int step = 0; step < 3; ++step) ddp(at::ones({2, 4})).sum().backward();
    {
      const auto local = ddp.no_sync();  // gradients that are only collected are no step
      ddp(at::ones({2, 4})).sum().backward();
    }
    EXPECT_EQ(detail::as_own(*group->getDefaultBackend())->page()->num_steps, 3u);
    ddp(at::ones({2, 4})).sum().backward();
    EXPECT_EQ(detail::as_own(*group->getDefaultBackend())->page()->num_steps, 4u);
  });
}

TEST(DdpLoggingData, StepsOfAGroupWithoutADefaultBackendAreCounted) {
  run_ranks(2, [](const Group& group) {
    const auto plain = c10::make_intrusive<c10d::ProcessGroup>(group->getRank(), group->getSize());
    plain->setBackend(at::kCPU, c10d::ProcessGroup::CUSTOM, group->getDefaultBackend());
    detail::count_step(plain);
    EXPECT_EQ(detail::as_own(*group->getDefaultBackend())->page()->num_steps, 1u);
  });
}

TEST(DdpLoggingData, HasPytorchsKeys) {
  run_ranks(2, [](const Group& group) {
    torch::nn::Linear net(4, 3);
    DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 2, .stats_every = 3});
    for (int step = 0; step < 13; ++step) ddp(at::ones({2, 4})).sum().backward();
    const auto data = ddp.logging_data().to_map();
    for (const char* key : {"module_name",
                            "world_size",
                            "rank",
                            "backend_name",
                            "device_ids",
                            "output_device",
                            "broadcast_buffers",
                            "bucket_cap_bytes",
                            "bucket_sizes",
                            "find_unused_parameters",
                            "gradient_as_bucket_view",
                            "has_sync_bn",
                            "is_multi_device_module",
                            "dtypes",
                            "num_parameter_tensors",
                            "total_parameter_size_bytes",
                            "master_addr",
                            "master_port",
                            "cuda_visible_devices",
                            "torch_distributed_debug",
                            "gloo_socket_ifname",
                            "gloo_device_transport",
                            "gloo_num_threads",
                            "static_graph",
                            "comm_hook",
                            "join_uneven_inputs",
                            "iteration",
                            "num_buckets_reduced",
                            "has_rebuilt_buckets",
                            "rebuilt_bucket_sizes",
                            "rebuilt_per_bucket_param_indices",
                            "unused_parameter_size",
                            "prev_iteration_grad_ready_order_indices",
                            "forward_compute_time",
                            "backward_compute_time",
                            "backward_comm_time",
                            "backward_compute_comm_overlap_time",
                            "avg_forward_compute_time",
                            "avg_backward_compute_time",
                            "avg_backward_comm_time",
                            "avg_backward_compute_comm_overlap_time",
                            "forward_compute_time_start",
                            "backward_compute_time_start",
                            "backward_compute_time_end",
                            "backward_comm_time_start",
                            "backward_comm_time_end",
                            "can_set_static_graph",
                            "has_error",
                            "error"}) {
      EXPECT_EQ(data.count(key), 1u) << key;
    }
    EXPECT_EQ(data.at("module_name").toStringRef(), "torch::nn::LinearImpl");
    EXPECT_EQ(data.at("world_size").toInt(), 2);
    EXPECT_EQ(data.at("rank").toInt(), group->getRank());
    EXPECT_EQ(data.at("backend_name").toStringRef(), "threads");
    EXPECT_EQ(data.at("bucket_cap_bytes").toInt(), 2 << 20);
    EXPECT_EQ(data.at("bucket_sizes").toStringRef(), "60");
    EXPECT_EQ(data.at("total_parameter_size_bytes").toInt(), 60);
    EXPECT_EQ(data.at("iteration").toInt(), 12) << "the last sampled one";
    EXPECT_TRUE(data.at("can_set_static_graph").toBool());
    EXPECT_GT(data.at("avg_backward_comm_time").toInt(), 0);
    EXPECT_GE(data.at("backward_comm_time_end").toInt(), data.at("backward_comm_time_start").toInt());
  });
}

TEST(DdpLoggingData, IsPrintedWhereDebuggingIsOn) {
  ::testing::internal::CaptureStderr();
  c10d::setDebugLevel(c10d::DebugLevel::Detail);
  run_ranks(1, [](const Group& group) {
    torch::nn::Linear net(4, 3);
    net->bias.set_requires_grad(false);
    DistributedDataParallel ddp(net, {.process_group = group, .find_unused_parameters = true});
    ddp(at::ones({2, 4})).sum().backward();
    at::ones({1}).requires_grad_(true).sum().backward();
    ddp(at::ones({2, 4}));
  });
  c10d::setDebugLevel(c10d::DebugLevel::Off);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, HasSubstr("DistributedDataParallel after iteration 0"));
  EXPECT_THAT(text, HasSubstr("DistributedDataParallel after iteration 1"));
  EXPECT_THAT(text, HasSubstr("num_parameter_tensors: 1"));
}

TEST(DdpLoggingData, TheEnvironmentCanBePrinted) {
  std::ostringstream out;
  dump_distributed_environment(out);
  EXPECT_THAT(out.str(), HasSubstr("env:WORLD_SIZE="));
  EXPECT_THAT(out.str(), HasSubstr("env:GLOO_NUM_THREADS=N/A\n"));
  EXPECT_THAT(out.str(), HasSubstr("env:SERRIED_TIMEOUT="));
}

}  // namespace
}  // namespace serried
