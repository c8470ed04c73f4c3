// Every hook of the library under a real DistributedDataParallel.
#include "serried/parallel/ddp/hooks/hooks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using hooks::CommHookType;
using testing::expect_close;
using testing::expect_equal;

struct HookedNetImpl : torch::nn::Module {
  HookedNetImpl() {
    register_module("fc1", fc1);
    register_module("fc2", fc2);
  }
  at::Tensor forward(const at::Tensor& x) { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1{6, 20}, fc2{20, 4};
};
TORCH_MODULE(HookedNet);

class HooksInDdp : public testing::OnRanks {};
INSTANTIATE_TEST_SUITE_P(Backends, HooksInDdp, ::testing::ValuesIn(testing::settings({1, 2, 3})), testing::name_of);

/// How far a gradient may lie from the exact mean, relative to the largest one.
double tolerance_of(CommHookType type) {
  switch (type) {
    case CommHookType::FP16_COMPRESS: return 2e-3;
    case CommHookType::BF16_COMPRESS: return 2e-2;
    case CommHookType::QUANTIZE_PER_TENSOR:
    case CommHookType::QUANTIZE_PER_CHANNEL: return 1e-2;
    default: return 1e-6;  // PowerSGD begins with plain means
  }
}

TEST_P(HooksInDdp, GiveTheMeanOrNearlySo) {
  on_ranks([&](const Group& group) {
    for (const CommHookType type : {CommHookType::ALLREDUCE, CommHookType::FP16_COMPRESS, CommHookType::BF16_COMPRESS,
                                    CommHookType::QUANTIZE_PER_TENSOR, CommHookType::QUANTIZE_PER_CHANNEL,
                                    CommHookType::POWER_SGD, CommHookType::BATCHED_POWER_SGD_RANK2}) {
      HookedNet net = seeded(1, [] { return HookedNet(); }), plain = seeded(1, [] { return HookedNet(); });
      DistributedDataParallel ddp(net, {.process_group = group, .bucket_cap_mb = 400.0 / 1024 / 1024});
      ddp.register_comm_hook(hooks::make(type));
      for (int step = 0; step < 3; ++step) {
        const at::Tensor batch = seeded(step, [&] { return at::randn({2 * world_size(), 6}); });
        ddp.zero_grad();
        plain->zero_grad();
        ddp(batch.narrow(0, 2 * group->getRank(), 2)).pow(2).mean().backward();
        plain(batch).pow(2).mean().backward();
        double largest = 0;
        for (const at::Tensor& p : plain->parameters())
          largest = std::max(largest, p.grad().abs().max().item<double>());
        for (size_t i = 0; i < plain->parameters().size(); ++i) {
          const at::Tensor wanted = plain->parameters()[i].grad(), got = net->parameters()[i].grad();
          EXPECT_LE((got - wanted).abs().max().item<double>(), tolerance_of(type) * largest)
              << "hook " << int(type) << " step " << step << " parameter " << i;
          at::Tensor first = got.clone();
          broadcast_(first, group);
          expect_equal(got, first, "the same on every rank");
        }
      }
    }
  });
}

TEST_P(HooksInDdp, PowerSgdWithErrorFeedbackTrains) {
  on_ranks([&](const Group& group) {
    HookedNet net = seeded(1, [] { return HookedNet(); });
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp.register_comm_hook(hooks::power_sgd({.rank = 2, .start_iter = 2}));
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    const at::Tensor x = seeded(group->getRank(), [] { return at::randn({8, 6}); });
    double first = 0, last = 0;
    for (int step = 0; step < 40; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = (ddp(x) - x.narrow(1, 0, 4)).pow(2).mean();
      loss.backward();
      optimizer.step();
      (step == 0 ? first : last) = loss.item<double>();
    }
    EXPECT_LT(last, 0.7 * first);
    at::Tensor weight = net->fc1->weight.detach().clone();
    broadcast_(weight, group);
    expect_equal(net->fc1->weight.detach(), weight);
  });
}

TEST_P(HooksInDdp, NoopLeavesEachRankItsOwn) {
  on_ranks([&](const Group& group) {
    torch::nn::Linear net(3, 2);
    DistributedDataParallel ddp(net, {.process_group = group});
    ddp.register_comm_hook(hooks::noop());
    ddp(at::ones({1, 3}) * (group->getRank() + 1)).sum().backward();
    expect_close(net->weight.grad(), at::full({2, 3}, group->getRank() + 1.0f));
    EXPECT_EQ(ddp.logging_data().to_map().at("comm_hook").toStringRef(), "noop");
  });
}

TEST_P(HooksInDdp, AFailureThatNamesNoRankIsPutIntoWords) {
  on_ranks([&](const Group& group) {
    torch::nn::Linear net(3, 2);
    DistributedDataParallel ddp(net, {.process_group = group});
    // As gloo leaves a connection that broke.
    ddp.register_comm_hook([](c10d::GradBucket&) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->setError(std::make_exception_ptr(std::runtime_error("connection closed by peer")));
      return future;
    });
    EXPECT_EQ(testing::error_text<c10::DistBackendError>([&] {
                ddp(at::ones({1, 3})).sum().backward();
              }),
              c10::str("[backward] the communication hook \"user\" failed: connection closed by peer\n"
                       "  fix: look for the first error of any rank; go on with set_process_group() and a new group, "
                       "or start again\n  at:  rank ",
                       group->getRank(), "/", group->getSize()));
  });
}

}  // namespace
}  // namespace serried
