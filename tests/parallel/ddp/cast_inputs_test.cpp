// Inputs of data parallel modules in mixed precision: cast to the parameters' dtype, or left to the caller.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/support/close.h"

namespace serried::testing {
namespace {

TEST(DataParallelCastInputs, AreCastUnlessTheCallerDoes) {
  run_ranks(2, [](const Group& group) {
    const auto build = [] { return torch::nn::Linear(3, 5); };
    const at::Tensor x = torch::ones({2, 3});
    torch::nn::Linear first = seeded(1, build), second = seeded(1, build);
    DistributedDataParallel casts(first, {.process_group = group, .mixed_precision = {.param_dtype = at::kBFloat16}});
    DistributedDataParallel leaves(
        second,
        {.process_group = group, .mixed_precision = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false}});
    const at::Tensor y = casts(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    EXPECT_THROW(leaves(x), c10::Error);
    expect_equal(leaves(x.to(at::kBFloat16)), y);
  });
}

}  // namespace
}  // namespace serried::testing
