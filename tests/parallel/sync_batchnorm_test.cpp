// SyncBatchNorm and converted modules against one process that has the whole batch.
#include "serried/parallel/sync_batchnorm.h"

#include <torch/torch.h>

#include <sstream>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::sync_batchnorm_test {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using torch::nn::BatchNorm1d;
using torch::nn::BatchNorm2d;
using torch::nn::BatchNorm3d;
using torch::nn::BatchNormOptions;

using Sizes = std::vector<int64_t>;

const Sizes kRows = {4, 2, 0, 3};  // of each rank

int64_t rows_before(int rank) {
  int64_t rows = 0;
  for (int r = 0; r < rank; ++r) rows += kRows[r];
  return rows;
}

/// This rank's rows of a tensor that has those of all ranks.
at::Tensor part(const at::Tensor& whole, const Group& group) {
  return whole.narrow(0, rows_before(group->getRank()), kRows[group->getRank()]);
}

/// The same on every rank and at every call; a mean that is far from zero.
at::Tensor values(Sizes sizes, const Group& group, uint64_t seed, at::ScalarType dtype) {
  sizes.insert(sizes.begin(), rows_before(group->getSize()));
  auto generator = at::detail::createCPUGenerator(seed);
  return (at::randn(sizes, generator, at::kDouble) * 2 + 3).to(dtype);
}

struct Case {
  BatchNormOptions options = BatchNormOptions(3);
  Sizes sample = {2, 3};  // what follows batch and channel
  at::ScalarType input = at::kFloat;
  at::ScalarType module = at::kFloat;
};

/// Weights that are not the initial ones.
template <class Norm>
void prepare(Norm& norm, const Case& c) {
  norm->to(c.module);
  const torch::NoGradGuard no_grad;
  if (!c.options.affine()) return;
  norm->weight.copy_(at::tensor({0.5, -1.5, 2.0}));
  norm->bias.copy_(at::tensor({0.1, 0.2, -0.3}));
}

/// Two training steps and an evaluation on every rank equal those of `whole` with the batches of all ranks.
template <class Whole, class Norm>
void expect_as_one_process(Whole whole, Norm norm, const Case& c, const Group& group) {
  prepare(whole, c);
  prepare(norm, c);
  Sizes sizes = {3};
  sizes.insert(sizes.end(), c.sample.begin(), c.sample.end());
  for (uint64_t step = 0; step < 2; ++step) {
    const at::Tensor x = values(sizes, group, step, c.input).set_requires_grad(true);
    const at::Tensor mine = part(x.detach(), group).clone().set_requires_grad(true);
    const at::Tensor factors = values(sizes, group, 100 + step, c.input) - 2;
    const at::Tensor expected = whole->forward(x);
    const at::Tensor actual = norm->forward(mine);
    expect_close(actual, part(expected, group), "output");
    (expected * factors).sum().backward();
    (actual * part(factors, group)).sum().backward();
    expect_close(mine.grad(), part(x.grad(), group), "input gradient");
  }
  if (c.options.affine()) {
    expect_close(all_reduce(norm->weight.grad(), group), whole->weight.grad(), "weight gradient");
    expect_close(all_reduce(norm->bias.grad(), group), whole->bias.grad(), "bias gradient");
  }
  ASSERT_EQ(norm->buffers().size(), whole->buffers().size());
  for (const auto& buffer : whole->named_buffers()) {
    expect_close(norm->named_buffers()[buffer.key()], buffer.value(), buffer.key());
  }
  if (!c.options.track_running_stats()) return;
  whole->eval();
  norm->eval();
  const at::Tensor x = values(sizes, group, 7, c.input);
  if (part(x, group).numel() > 0) expect_close(norm->forward(part(x, group)), part(whole->forward(x), group), "eval");
}

/// The same for a converted `Norm` and for a SyncBatchNorm, on 1 to 4 ranks.
template <class Norm>
void expect_as_one_process(const Case& c, const std::string& backend = "threads") {
  for (int world_size = 1; world_size <= 4; ++world_size) {
    SCOPED_TRACE(c10::str(world_size, " ranks, ", backend));
    run_ranks(world_size,
              [&](const Group& group) {
                Norm converted(c.options);
                convert_sync_batchnorm(*converted, group);
                expect_as_one_process(Norm(c.options), converted, c, group);
                expect_as_one_process(Norm(c.options), SyncBatchNorm(c.options, group), c, group);
              },
              {.backend = backend});
  }
}

TEST(SyncBatchNorm, EqualsOneProcessWithTheWholeBatch) {
  expect_as_one_process<BatchNorm2d>({});
}

TEST(SyncBatchNorm, EqualsOneProcessOverOtherBackends) {
  expect_as_one_process<BatchNorm2d>({}, "gloo");
  expect_as_one_process<BatchNorm2d>({}, "shm");
}

TEST(SyncBatchNorm, TakesInputsOfTwoToFiveDims) {
  expect_as_one_process<BatchNorm1d>({.sample = {}});
  expect_as_one_process<BatchNorm1d>({.sample = {5}});
  expect_as_one_process<BatchNorm3d>({.sample = {2, 1, 3}});
}

TEST(SyncBatchNorm, WorksWithoutWeightAndBias) {
  expect_as_one_process<BatchNorm2d>({.options = BatchNormOptions(3).affine(false)});
}

TEST(SyncBatchNorm, WorksWithoutRunningStatistics) {
  expect_as_one_process<BatchNorm2d>({.options = BatchNormOptions(3).track_running_stats(false)});
}

TEST(SyncBatchNorm, WorksWithNeither) {
  expect_as_one_process<BatchNorm2d>({.options = BatchNormOptions(3).affine(false).track_running_stats(false)});
}

TEST(SyncBatchNorm, AveragesAllBatchesWithoutMomentum) {
  expect_as_one_process<BatchNorm2d>({.options = BatchNormOptions(3).momentum(std::nullopt)});
}

TEST(SyncBatchNorm, TakesMomentumAndEpsilonOfTheOptions) {
  expect_as_one_process<BatchNorm2d>({.options = BatchNormOptions(3).momentum(0.7).eps(0.5)});
}

TEST(SyncBatchNorm, WorksInDouble) {
  expect_as_one_process<BatchNorm2d>({.input = at::kDouble, .module = at::kDouble});
}

TEST(SyncBatchNorm, TakesLowPrecisionInputsWithFloatParameters) {
  expect_as_one_process<BatchNorm2d>({.input = at::kBFloat16});
  expect_as_one_process<BatchNorm2d>({.input = at::kHalf});
}

// LibTorch keeps bfloat16 statistics in such a module and so is no reference.
TEST(SyncBatchNorm, WorksWithLowPrecisionParameters) {
  run_ranks(2, [](const Group& group) {
    BatchNorm2d whole(3);
    SyncBatchNorm norm(3, group);
    norm->to(at::kBFloat16);
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kBFloat16);
    const at::Tensor expected = whole(x), actual = norm(part(x, group));
    expect_close(actual, part(expected, group));
    expected.sum().backward();
    actual.sum().backward();
    expect_equal(norm->bias.grad(), at::full(3, part(x, group)[0][0].numel() * part(x, group).size(0), at::kBFloat16));
    expect_close(norm->running_var, whole->running_var.to(at::kBFloat16));
  });
}

TEST(SyncBatchNorm, IsExactWhereTheMeanIsLarge) {
  run_ranks(3, [](const Group& group) {
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kDouble) + 1e6;
    SyncBatchNorm norm(BatchNormOptions(3).momentum(1.0), group);
    norm->to(at::kDouble);
    norm->forward(part(x, group));
    const at::Tensor expected = x.transpose(0, 1).flatten(1).var(1);
    EXPECT_TRUE(at::allclose(norm->running_var, expected, 1e-9)) << norm->running_var << expected;
  });
}

TEST(SyncBatchNorm, GivesEveryRankTheSameBits) {
  run_ranks(4, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    norm->forward(part(values({3, 2}, group, 0, at::kFloat), group));
    const at::Tensor all = all_gather(norm->running_var.unsqueeze(0), group);
    for (int rank = 0; rank < 4; ++rank) expect_equal(all[rank], norm->running_var);
  });
}

TEST(SyncBatchNorm, TakesOneRowPerRank) {
  run_ranks(3, [](const Group& group) {
    SyncBatchNorm norm(2, group);
    const at::Tensor rows = at::tensor({1., 0., 2., 5., 6., 1.}).view({3, 2}).to(at::kFloat);
    expect_close(norm->forward(rows.narrow(0, group->getRank(), 1)),
                 BatchNorm1d(2)->forward(rows).narrow(0, group->getRank(), 1));
  });
}

TEST(SyncBatchNorm, TakesChannelsLastAndExpandedInputs) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kFloat);
    const at::Tensor mine = part(x, group);
    const at::Tensor expected = part(BatchNorm2d(3)->forward(x), group);
    SyncBatchNorm norm(3, group);
    const at::Tensor y = norm->forward(mine.contiguous(at::MemoryFormat::ChannelsLast));
    EXPECT_TRUE(y.is_contiguous(at::MemoryFormat::ChannelsLast));
    expect_close(y, expected);
    const at::Tensor one_row = x.narrow(0, 0, 1).expand({5, 3, 2, 3});
    expect_close(norm->forward(one_row), BatchNorm2d(3)->forward(one_row));
  });
}

// Gradients of a batch norm over another do not vanish, and two backwards meet in the order of their forwards.
struct NetImpl : torch::nn::Module {
  BatchNorm2d first{3};
  torch::nn::Conv2d conv{torch::nn::Conv2dOptions(3, 3, 1)};
  torch::nn::Sequential last{BatchNorm2d(3), torch::nn::ReLU()};
  NetImpl() {
    register_module("first", first);
    register_module("conv", conv);
    register_module("last", last);
  }
  at::Tensor forward(const at::Tensor& x) { return last->forward(conv(first(x))); }
};
TORCH_MODULE(Net);

Net make_net() {
  return seeded(3, [] { return Net(); });
}

Net make_converted_net(const Group& group) {
  Net net = make_net();
  convert_sync_batchnorm(*net, group);
  return net;
}

TEST(ConvertSyncBatchNorm, ReachesMembersAndNestedModules) {
  run_ranks(3, [](const Group& group) {
    Net whole = make_net(), net = make_converted_net(group);
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kFloat);
    const at::Tensor expected = whole(x), actual = net(part(x, group));
    expect_close(actual, part(expected, group));
    expected.square().sum().backward();
    actual.square().sum().backward();
    for (const auto& p : whole->named_parameters()) {
      const at::Tensor sum = all_reduce(net->named_parameters()[p.key()].grad(), group);
      EXPECT_TRUE(at::allclose(sum, p.value().grad(), 1e-4, 1e-4)) << p.key() << sum << p.value().grad();
    }
  });
}

TEST(ConvertSyncBatchNorm, AllowsTwoForwardsBeforeBackward) {
  run_ranks(2, [](const Group& group) {
    Net whole = make_net(), net = make_converted_net(group);
    at::Tensor expected = at::zeros({}), actual = at::zeros({});
    for (uint64_t seed : {1, 2}) {
      const at::Tensor x = values({3, 2, 3}, group, seed, at::kFloat);
      expected = expected + whole(x).square().sum();
      actual = actual + net(part(x, group)).square().sum();
    }
    expected.backward();
    actual.backward();
    expect_close(all_reduce(net->first->bias.grad(), group), whole->first->bias.grad());
    expect_close(net->first->running_var, whole->first->running_var);
  });
}

TEST(ConvertSyncBatchNorm, SynchronisesWithoutGradientsToo) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kFloat);
    const at::Tensor expected = part(make_net()(x), group).detach();
    Net net = make_converted_net(group);
    {
      const torch::NoGradGuard no_grad;
      const at::Tensor y = net(part(x, group));
      EXPECT_FALSE(y.requires_grad());
      expect_close(y, expected);
    }
    const c10::InferenceMode inference;
    expect_close(net(part(x, group)), expected);
    EXPECT_EQ(net->first->num_batches_tracked.item<int64_t>(), 2);
  });
}

TEST(ConvertSyncBatchNorm, FindsGradientsOfParametersOnlyWhereTheInputNeedsNone) {
  run_ranks(2, [](const Group& group) {
    BatchNorm2d whole(3), norm(3);
    convert_sync_batchnorm(*norm, group);
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kFloat);
    whole(x).square().sum().backward();
    norm(part(x, group)).square().sum().backward();
    expect_close(all_reduce(norm->weight.grad(), group), whole->weight.grad());
  });
}

TEST(ConvertSyncBatchNorm, AcceptsThatAllBatchesAreEmpty) {
  run_ranks(2, [](const Group& group) {
    BatchNorm2d norm(3);
    convert_sync_batchnorm(*norm, group);
    const at::Tensor x = at::empty({0, 3, 2, 2}).set_requires_grad(true);
    const at::Tensor y = norm(x);
    y.sum().backward();
    EXPECT_EQ(y.sizes(), x.sizes());
    EXPECT_EQ(x.grad().sizes(), x.sizes());
    expect_equal(norm->weight.grad(), at::zeros(3));
    expect_equal(norm->running_mean, at::zeros(3));
    expect_equal(norm->running_var, at::ones(3));
  });
}

TEST(ConvertSyncBatchNorm, CommunicatesNothingInEvaluation) {
  run_ranks(2, [](const Group& group) {
    if (group->getRank() == 1) return;  // a collective would wait for it
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kFloat);
    for (const bool track : {true, false}) {
      const auto options = BatchNormOptions(3).track_running_stats(track);
      BatchNorm2d plain(options), norm(options);
      SyncBatchNorm module(options, group);
      convert_sync_batchnorm(*norm, group);
      plain->eval();
      norm->eval();
      module->eval();
      expect_equal(norm(x), plain(x));
      expect_equal(module(x), plain(x));
    }
  });
}

TEST(ConvertSyncBatchNorm, LeavesOtherModulesAndTheirTensorsAlone) {
  run_ranks(2, [](const Group& group) {
    BatchNorm2d plain(3);
    Net net = make_converted_net(group);
    EXPECT_TRUE(has_sync_batchnorm(*net));
    EXPECT_FALSE(has_sync_batchnorm(*plain));
    EXPECT_FALSE(has_sync_batchnorm(*make_net()));
    EXPECT_TRUE(has_sync_batchnorm(*SyncBatchNorm(3, group)));
    if (group->getRank() == 1) return;
    const at::Tensor y = plain(values({3, 2, 3}, group, 0, at::kFloat));
    EXPECT_TRUE(at::allclose(y.mean({0, 2, 3}), at::zeros(3), 0, 1e-5));
  });
}

TEST(ConvertSyncBatchNorm, KeepsParametersAndBuffers) {
  run_ranks(1, [](const Group& group) {
    Net net = make_net();
    const auto parameters = net->named_parameters(), buffers = net->named_buffers();
    convert_sync_batchnorm(*net, group);
    for (const auto& p : parameters) EXPECT_TRUE(p.value().is_same(net->named_parameters()[p.key()]));
    for (const auto& b : buffers) EXPECT_TRUE(b.value().is_same(net->named_buffers()[b.key()]));
    EXPECT_TRUE(net->first->running_mean.is_same(buffers["first.running_mean"]));
    EXPECT_FALSE(net->first->running_mean.requires_grad());
  });
}

/// One training step of `net` equals that of `whole`.
void expect_synchronised(Net net, Net whole, const Group& group, at::ScalarType dtype = at::kFloat) {
  const at::Tensor x = values({3, 2, 3}, group, 5, dtype);
  expect_close(net(part(x, group)), part(whole(x), group));
}

TEST(ConvertSyncBatchNorm, OutlivesLoadingAndConversionOfDtype) {
  run_ranks(3, [](const Group& group) {
    Net whole = make_net();
    whole(values({3, 2, 3}, group, 1, at::kFloat));
    std::stringstream file;
    torch::save(whole, file);
    Net net = make_converted_net(group);
    torch::load(net, file);
    expect_close(net->first->running_mean, whole->first->running_mean);
    expect_synchronised(net, whole, group);
    net->to(at::kDouble);
    whole->to(at::kDouble);
    EXPECT_EQ(net->first->running_mean.scalar_type(), at::kDouble);
    expect_synchronised(net, whole, group, at::kDouble);
  });
}

TEST(ConvertSyncBatchNorm, CanBeSavedAndLoadedIntoAPlainModule) {
  run_ranks(2, [](const Group& group) {
    Net net = make_converted_net(group), plain = make_net();
    net(part(values({3, 2, 3}, group, 1, at::kFloat), group));
    std::stringstream file;
    torch::save(net, file);
    torch::load(plain, file);
    expect_equal(plain->first->running_mean, net->first->running_mean);
    EXPECT_FALSE(has_sync_batchnorm(*plain));
  });
}

TEST(ConvertSyncBatchNorm, LeavesAClonePlain) {
  run_ranks(1, [](const Group& group) {
    for (const bool track : {true, false}) {
      BatchNorm2d norm(BatchNormOptions(3).track_running_stats(track));
      convert_sync_batchnorm(*norm, group);
      EXPECT_FALSE(has_sync_batchnorm(*norm->clone()));
    }
    const auto clone = std::dynamic_pointer_cast<SyncBatchNormImpl>(SyncBatchNorm(3, group)->clone());
    EXPECT_TRUE(has_sync_batchnorm(*clone));
  });
}

TEST(ConvertSyncBatchNorm, TakesAModuleThatIsNotShared) {
  run_ranks(2, [](const Group& group) {
    torch::nn::BatchNorm2dImpl norm(BatchNormOptions(3).track_running_stats(false));
    convert_sync_batchnorm(norm, group);
    const at::Tensor x = values({3, 2, 3}, group, 0, at::kFloat);
    expect_close(norm.forward(part(x, group)), part(BatchNorm2d(3)->forward(x), group));
  });
}

TEST(ConvertSyncBatchNorm, CanChangeTheGroup) {
  run_ranks(4, [](const Group& world) {
    Net net = make_converted_net(world);
    const Group half = split_group(world, {{0, 1}, {2, 3}});
    convert_sync_batchnorm(*net, half);
    expect_synchronised(net, make_net(), half);
  });
}

TEST(SyncBatchNorm, PrintsItsOptions) {
  run_ranks(1, [](const Group& group) {
    EXPECT_EQ(c10::str(SyncBatchNorm(3, group)),
              "serried::SyncBatchNorm(3, eps=1e-05, momentum=0.1, affine=true, track_running_stats=true, ranks=1)");
    const auto options = BatchNormOptions(3).momentum(std::nullopt).affine(false);
    EXPECT_EQ(c10::str(SyncBatchNorm(options, group)),
              "serried::SyncBatchNorm(3, eps=1e-05, momentum=None, affine=false, track_running_stats=true, ranks=1)");
  });
}

TEST(SyncBatchNormErrors, TheGroupIsNull) {
  BatchNorm2d norm(3);
  EXPECT_EQ(error_text<c10::ValueError>([&] { convert_sync_batchnorm(*norm, {}); }),
            "[convert_sync_batchnorm] the group is null\n"
            "  fix: pass the group whose batches belong together");
  EXPECT_EQ(error_text<c10::ValueError>([] { SyncBatchNorm(3, Group()); }),
            "[SyncBatchNorm] the group is null\n"
            "  fix: pass the group whose batches belong together");
}

TEST(SyncBatchNormErrors, TheInputHasTooFewOrTooManyDims) {
  run_ranks(1, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    EXPECT_EQ(error_text<c10::ValueError>([&] { norm(at::ones(3)); }),
              "[SyncBatchNorm] the input has 1 dims: sizes [3]\n"
              "  fix: pass [batch, channel] and up to three more dims\n"
              "  at:  rank 0/1");
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                norm(at::ones({2, 3, 1, 1, 1, 1}));
              }),
              "[SyncBatchNorm] the input has 6 dims: sizes [2, 3, 1, 1, 1, 1]\n"
              "  fix: pass [batch, channel] and up to three more dims\n"
              "  at:  rank 0/1");
    BatchNorm2d converted(3);
    convert_sync_batchnorm(*converted, group);
    EXPECT_EQ(error_text<c10::ValueError>(
                  [&] { at::batch_norm(at::ones(3), {}, {}, converted->running_mean, {}, true, 0.1, 1e-5, false); }),
              "[SyncBatchNorm] the input has sizes [3], without a channel dim\n"
              "  fix: pass [batch, channel, ...]\n"
              "  at:  rank 0/1");
  });
}

TEST(SyncBatchNormErrors, TheInputHasAnotherNumberOfChannels) {
  const std::string expected =
      "[SyncBatchNorm] the input has sizes [2, 4, 5, 5], that is 4 channels, but the module has 3\n"
      "  fix: make dim 1 of the input the channels, or construct the module for as many\n"
      "  at:  rank 0/1";
  run_ranks(1, [&](const Group& group) {
    BatchNorm2d converted(3);
    convert_sync_batchnorm(*converted, group);
    SyncBatchNorm norm(BatchNormOptions(3).affine(false), group);
    EXPECT_EQ(error_text<c10::ValueError>([&] { converted(at::ones({2, 4, 5, 5})); }), expected);
    EXPECT_EQ(error_text<c10::ValueError>([&] { norm(at::ones({2, 4, 5, 5})); }), expected);
  });
}

TEST(SyncBatchNormErrors, AllRanksTogetherHaveOneValuePerChannel) {
  run_ranks(2, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    const int64_t rows = group->getRank();
    EXPECT_EQ(error_text<c10::ValueError>([&] {
                norm(at::ones({rows, 3}));
              }),
              c10::str("[SyncBatchNorm] Expected more than 1 value per channel when training, but all 2 ranks together "
                       "have one (input sizes here: [",
                       rows, ", 3])\n  fix: use a larger batch, or call eval() on the module\n  at:  rank ",
                       group->getRank(), "/2"));
    expect_equal(norm->running_mean, at::zeros(3));
  });
}

TEST(SyncBatchNormErrors, AConvertedModuleHasOneValuePerChannelOnThisRank) {
  run_ranks(1, [](const Group& group) {
    BatchNorm1d norm(3);
    convert_sync_batchnorm(*norm, group);
    EXPECT_EQ(error_text<c10::Error>([&] {
                norm(at::ones({1, 3}));
              }),
              "Expected more than 1 value per channel when training, got input size [1, 3]");
  });
}

TEST(SyncBatchNormErrors, TheGradientOfTheGradientIsAskedFor) {
  run_ranks(1, [](const Group& group) {
    SyncBatchNorm norm(3, group);
    const at::Tensor y = norm(values({3}, group, 0, at::kFloat)).square().sum();
    const auto twice = [&] {
      torch::autograd::grad({y}, {norm->weight}, {}, /*retain_graph=*/true, /*create_graph=*/true);
    };
    EXPECT_EQ(error_text<c10::NotImplementedError>(twice),
              "[SyncBatchNorm] its gradient has no gradient of its own\n"
              "  fix: call backward without create_graph\n"
              "  at:  rank 0/1");
  });
}

}  // namespace
}  // namespace serried::sync_batchnorm_test
