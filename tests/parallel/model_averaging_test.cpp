// Averagers of parameters, and the optimizer that uses them, against the same steps written down.
#include "serried/parallel/model_averaging.h"

#include <torch/torch.h>

#include <sstream>

#include "serried/comm/collectives/collectives.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;

class ModelAveragingOnRanks : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(Backends, ModelAveragingOnRanks, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})),
                         testing::name_of);

at::Tensor parameter_of(int rank, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  at::Tensor parameter = (at::arange(c10::multiply_integers(sizes)).view(sizes) + rank * rank * 10).to(dtype);
  parameter.mutable_grad() = at::zeros_like(parameter);
  return parameter.requires_grad_(true);
}

// The mean of `parameter_of` over ranks first..first+count-1.
at::Tensor mean_parameter(int first, int count, at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = at::zeros(sizes, dtype);
  for (int rank = first; rank < first + count; ++rank) sum += parameter_of(rank, sizes, dtype).detach();
  return sum / count;
}

TEST_P(ModelAveragingOnRanks, AveragesParametersThatHaveGradientsInPlace) {
  on_ranks([](const Group& group) {
    const at::Tensor matrix = parameter_of(group->getRank(), {3, 2});
    const at::Tensor wide = parameter_of(group->getRank(), {5}, at::kDouble);
    const at::Tensor turned = parameter_of(group->getRank(), {2, 3}).detach().t().requires_grad_(true);
    turned.mutable_grad() = at::zeros_like(turned);
    const at::Tensor frozen = at::full({2}, double(group->getRank()));
    const void* where = matrix.data_ptr();
    average_parameters({matrix, wide, frozen, turned}, group);
    EXPECT_EQ(matrix.data_ptr(), where);
    expect_close(matrix.detach(), mean_parameter(0, group->getSize(), {3, 2}));
    expect_close(wide.detach(), mean_parameter(0, group->getSize(), {5}, at::kDouble));
    expect_close(turned.detach(), mean_parameter(0, group->getSize(), {2, 3}).t());
    expect_equal(frozen, at::full({2}, double(group->getRank())));
  });
}

TEST(ModelAveraging, NothingHappensWithoutAGroup) {
  const at::Tensor parameter = parameter_of(3, {4});
  average_parameters({parameter}, nullptr);
  expect_equal(parameter.detach(), parameter_of(3, {4}).detach());
}

// How many ranks average at each step: a parameter that is this rank's number becomes a mean.
template <class Averager>
std::vector<int> sizes_of_averages(Averager& averager, const Group& group, int num_steps) {
  std::vector<int> sizes;
  for (int step = 0; step < num_steps; ++step) {
    EXPECT_EQ(averager.step(), step);
    const at::Tensor parameter = parameter_of(group->getRank(), {3});
    averager.average_parameters({parameter});
    int found = 0;
    for (int size = 1; size <= group->getSize(); ++size) {
      const int first = group->getRank() / size * size;
      if (first + size > group->getSize()) continue;
      if (at::allclose(parameter.detach(), mean_parameter(first, size, {3}))) found = size;
    }
    sizes.push_back(found);
  }
  return sizes;
}

TEST(ModelAveraging, PeriodicAveragesAtTheEndOfTheWarmUpAndEveryPeriodFromThere) {
  run_ranks(2, [](const Group& group) {
    PeriodicModelAverager averager({.period = 3, .warmup_steps = 2, .process_group = group});
    EXPECT_EQ(sizes_of_averages(averager, group, 9), (std::vector<int>{1, 1, 2, 1, 1, 2, 1, 1, 2}));
    PeriodicModelAverager at_once({.period = 2});  // of the current group
    EXPECT_EQ(sizes_of_averages(at_once, group, 4), (std::vector<int>{2, 1, 2, 1}));
  });
}

TEST(ModelAveraging, HierarchicalTakesTheLargestPeriodThatDividesTheStep) {
  run_ranks(4, [](const Group& group) {
    HierarchicalModelAverager averager({.period_group_sizes = {{2, 2}, {4, 4}}, .warmup_steps = 2});
    EXPECT_EQ(sizes_of_averages(averager, group, 9), (std::vector<int>{1, 1, 2, 1, 4, 1, 2, 1, 4}));
    HierarchicalModelAverager alone({.period_group_sizes = {{3, 4}}, .process_group = group});
    EXPECT_EQ(sizes_of_averages(alone, group, 5), (std::vector<int>{4, 1, 1, 4, 1}));
  });
}

// Ranks pull one number towards different ones; the program of both ranks in one.
TEST(ModelAveraging, TheOptimizerStepsAloneAndAveragesWhenDue) {
  run_ranks(2, [](const Group& group) {
    at::Tensor mine = torch::zeros({2}, torch::requires_grad());
    PostLocalSGDOptimizer optimizer(torch::optim::SGD({mine}, 0.1),
                                    PeriodicModelAverager({.period = 2, .warmup_steps = 1}));
    at::Tensor expected[2] = {at::zeros({2}), at::zeros({2})};
    for (int step = 0; step < 6; ++step) {
      optimizer.zero_grad();
      EXPECT_FALSE(mine.grad().defined());
      (mine - (group->getRank() + 1)).square().sum().backward();
      optimizer.step();
      for (int rank = 0; rank < 2; ++rank) expected[rank] = expected[rank] - 0.1 * 2 * (expected[rank] - (rank + 1));
      if (step % 2 == 1) expected[0] = expected[1] = (expected[0] + expected[1]) / 2;
      expect_close(mine.detach(), expected[group->getRank()]);
    }
    EXPECT_EQ(optimizer.averager().step(), 6);
    EXPECT_EQ(optimizer.param_groups().size(), 1U);
  });
}

TEST(ModelAveraging, TheOptimizerTakesClosuresAndMoreParameters) {
  run_ranks(2, [](const Group& group) {
    at::Tensor first = torch::full({2}, double(group->getRank()), torch::requires_grad());
    at::Tensor second = torch::full({3}, double(group->getRank()), torch::requires_grad());
    PostLocalSGDOptimizer optimizer(torch::optim::SGD({first}, 0.0),
                                    HierarchicalModelAverager({.period_group_sizes = {{2, 2}}}));
    optimizer.add_param_group(torch::optim::OptimizerParamGroup({second}));
    const at::Tensor loss = optimizer.step([&] {
      at::Tensor sum = first.sum() + second.sum();
      sum.backward();
      return sum;
    });
    EXPECT_EQ(loss.item<double>(), 5.0 * group->getRank());
    expect_equal(first.detach(), at::full({2}, 0.5));
    expect_equal(second.detach(), at::full({3}, 0.5));
  });
}

TEST(ModelAveraging, TheArchiveOfTheOptimizerHasTheAveragersStep) {
  run_ranks(1, [](const Group&) {
    const auto make = [] {
      at::Tensor parameter = torch::ones({2}, torch::requires_grad());
      return PostLocalSGDOptimizer(torch::optim::SGD({parameter}, torch::optim::SGDOptions(0.1).momentum(0.9)),
                                   PeriodicModelAverager({.period = 4}));
    };
    const auto reload = [](auto& from, auto& into) {
      std::stringstream stream;
      torch::serialize::OutputArchive saved;
      from.save(saved);
      saved.save_to(stream);
      torch::serialize::InputArchive loaded;
      loaded.load_from(stream);
      into.load(loaded);
    };
    auto trained = make();
    for (int i = 0; i < 3; ++i) {
      trained.param_groups()[0].params()[0].mutable_grad() = at::ones({2});
      trained.step();
    }
    auto other = make();
    reload(trained, other);
    EXPECT_EQ(other.averager().step(), 3);
    EXPECT_EQ(other.optimizer().state().size(), 1U);

    ::testing::internal::CaptureStderr();
    reload(trained.optimizer(), other);
    EXPECT_EQ(other.averager().step(), 0);
    EXPECT_NE(::testing::internal::GetCapturedStderr().find(
                  "PostLocalSGDOptimizer: the archive has no step of an averager; it starts again at 0"),
              std::string::npos);
  });
}

TEST(ModelAveraging, PeriodOneIsWarnedOf) {
  ::testing::internal::CaptureStderr();
  run_ranks(1, [](const Group&) {
    PeriodicModelAverager periodic({.period = 1});
    HierarchicalModelAverager hierarchical({.period_group_sizes = {{1, 1}}});
  });
  const std::string log = ::testing::internal::GetCapturedStderr();
  for (const char* name : {"PeriodicModelAverager", "HierarchicalModelAverager"}) {
    EXPECT_NE(log.find(std::string(name) + ": the period is 1, so averaging parameters costs as much as"),
              std::string::npos)
        << log;
  }
}

template <class Averager, class Options>
std::string refusal(Options options) {
  return error_text<c10::ValueError>([&] { Averager{std::move(options)}; });
}

TEST(ModelAveraging, PeriodicRefusesPeriodsAndWarmUpsThatAreNone) {
  using Options = PeriodicModelAveragerOptions;
  EXPECT_EQ(refusal<PeriodicModelAverager>(Options{.period = 0}),
            "[PeriodicModelAverager] period is 0\n  fix: pass 2 or more");
  EXPECT_EQ(refusal<PeriodicModelAverager>(Options{.period = 2, .warmup_steps = -3}),
            "[PeriodicModelAverager] warmup_steps is -3\n  fix: pass 0 or more");
}

TEST(ModelAveraging, HierarchicalRefusesLevelsThatDoNotFit) {
  using Options = HierarchicalModelAveragerOptions;
  const std::string where = "[HierarchicalModelAverager] ";
  run_ranks(4, [&](const Group& group) {
    const std::string at = c10::str("\n  at:  rank ", group->getRank(), "/4");
    EXPECT_EQ(refusal<HierarchicalModelAverager>(Options{}),
              where +
                  "period_group_sizes is empty\n  fix: pass pairs of a period and a number of ranks, the last with 4" +
                  at);
    EXPECT_EQ(refusal<HierarchicalModelAverager>(Options{.period_group_sizes = {{0, 4}}}),
              where + "the period 0 comes after 0\n  fix: pass rising periods of 1 or more" + at);
    EXPECT_EQ(refusal<HierarchicalModelAverager>(Options{.period_group_sizes = {{8, 2}, {4, 4}}}),
              where + "the period 4 comes after 8\n  fix: pass rising periods of 1 or more" + at);
    EXPECT_EQ(refusal<HierarchicalModelAverager>(Options{.period_group_sizes = {{2, 3}, {4, 4}}}),
              where + "4 ranks cannot be cut into groups of 3\n  fix: pass a number that divides 4" + at);
    EXPECT_EQ(
        refusal<HierarchicalModelAverager>(Options{.period_group_sizes = {{2, 2}}}),
        where + "the last level has 2 ranks and the process group 4\n  fix: pass 4 as the size of the largest period" +
            at);
    EXPECT_EQ(refusal<HierarchicalModelAverager>(Options{.period_group_sizes = {{2, 4}}, .warmup_steps = -1}),
              where + "warmup_steps is -1\n  fix: pass 0 or more" + at);
  });
}

}  // namespace
}  // namespace serried
