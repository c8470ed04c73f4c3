// scale_loss: uneven shares give the gradients of one process with the whole batch.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/weighted_loss.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;

struct SevenRows {
  at::Tensor x = at::arange(7 * 5, at::kFloat).view({7, 5}).sin();
  at::Tensor classes = at::arange(7) % 3;
};

/// Rows of a batch of 7 for each rank; the last may have none.
const std::vector<std::vector<int64_t>> kUnevenShares = {{7}, {6, 1}, {1, 4, 2}, {3, 3, 1, 0}};

torch::nn::Linear net_for_shares() {
  return seeded(3, [] { return torch::nn::Linear(5, 3); });
}

void expect_whole_batch_gradients(const std::vector<int64_t>& shares, const std::string& backend) {
  const SevenRows batch;
  torch::nn::Linear alone = net_for_shares();
  const at::Tensor expected = torch::cross_entropy_loss(alone(batch.x), batch.classes);
  expected.backward();
  const auto train = [&](const Group& group) {
    const size_t rank = size_t(group->getRank());
    DistributedDataParallel ddp(net_for_shares(), {.process_group = group});
    const at::Tensor x = batch.x.split_with_sizes(shares)[rank];
    const at::Tensor classes = batch.classes.split_with_sizes(shares)[rank];
    const at::Tensor loss = scale_loss(torch::cross_entropy_loss(ddp(x), classes), x.size(0), group);
    loss.backward();
    expect_close(ddp.module()->weight.grad(), alone->weight.grad());
    expect_close(ddp.module()->bias.grad(), alone->bias.grad());
    expect_close(all_reduce(loss.detach(), group, c10d::ReduceOp::AVG), expected.detach());
  };
  run_ranks(int(shares.size()), train, {.backend = backend});
}

TEST(ScaleLoss, UnevenSharesGiveTheGradientsOfTheWholeBatch) {
  for (const auto& shares : kUnevenShares) expect_whole_batch_gradients(shares, "threads");
}

TEST(ScaleLoss, WorksOnGlooToo) {
  for (const auto& shares : kUnevenShares) expect_whole_batch_gradients(shares, "gloo");
}

TEST(ScaleLoss, EqualSharesLeaveTheLossAsItIs) {
  run_ranks(3, [](const Group& group) {
    const at::Tensor loss = at::full({}, 0.1 + group->getRank());
    expect_close(scale_loss(loss, 5, group), loss);
  });
}

TEST(ScaleLoss, ARankWithoutSamplesAddsZeroThoughItsMeanIsNaN) {
  run_ranks(2, [](const Group& group) {
    const bool has_data = group->getRank() == 0;
    const at::Tensor x = at::ones({has_data ? 4 : 0}).requires_grad_();
    const at::Tensor loss = scale_loss(x.mean(), x.size(0), group);
    EXPECT_EQ(loss.item<float>(), has_data ? 2 : 0);
    loss.backward();
    expect_close(x.grad(), at::full({x.size(0)}, 0.5));
  });
}

TEST(ScaleLoss, ANegativeCountIsRefused) {
  run_ranks(1, [](const Group& group) {
    EXPECT_EQ(error_text<c10::ValueError>([&] { scale_loss(at::ones({}), -1, group); }),
              "[scale_loss] local_count is -1\n"
              "  fix: pass how many samples the loss is a mean of, 0 if there are none\n"
              "  at:  rank 0/1");
  });
}

TEST(ScaleLoss, NoSamplesAnywhereIsRefusedOnEveryRank) {
  run_ranks(2, [](const Group& group) {
    EXPECT_THAT(error_text<c10::ValueError>([&] { scale_loss(at::ones({}), 0, group); }),
                ::testing::StartsWith("[scale_loss] no rank has any samples\n"
                                      "  fix: end the loop when no rank has data left\n"));
  });
}

}  // namespace
}  // namespace serried
