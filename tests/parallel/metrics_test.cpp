// Means and accuracies over all ranks beside those of one process that has all the samples.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "serried/comm/groups/ranks.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/metrics.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using ::testing::HasSubstr;

// Rank r has r samples: rank 0 has none.
at::Tensor samples_of(int64_t rank) {
  return torch::arange(rank, torch::kDouble) + 10 * rank;
}

at::Tensor samples_of_all(int64_t num_ranks) {
  std::vector<at::Tensor> all;
  for (int64_t rank = 0; rank < num_ranks; ++rank) all.push_back(samples_of(rank));
  return torch::cat(all);
}

TEST(Mean, IsThatOfAllSamplesOfAllRanks) {
  for (int ranks = 2; ranks <= 4; ++ranks) {
    run_ranks(ranks, [&](const Group& world) {
      const at::Tensor mine = samples_of(world->getRank());
      const double expected = samples_of_all(ranks).mean().item<double>();
      Mean by_value(world), by_mean(world), by_number(world);
      for (int64_t i = 0; i < mine.size(0); ++i) by_value.add(mine[i]);
      by_value.add(torch::empty({0}));
      by_mean.add(mine.mean(), mine.size(0));  // NaN on rank 0
      by_number.add(mine.size(0) > 0 ? mine.mean().item<double>() : 0, mine.size(0));
      for (const Mean* mean : {&by_value, &by_mean, &by_number}) {
        EXPECT_DOUBLE_EQ(mean->compute(), expected);
        EXPECT_EQ(mean->count(), samples_of_all(ranks).size(0));
      }
    });
  }
}

TEST(Mean, CountsHalvesAndIntegersExactlyAndKeepsNoGraph) {
  run_ranks(2, [](const Group& world) {
    Mean mean(world);
    const at::Tensor ones = torch::ones({3000}, torch::TensorOptions(torch::kHalf).requires_grad(true));
    mean.add(ones * 1);
    mean.add(torch::full({1000}, 4, torch::kLong));
    EXPECT_DOUBLE_EQ(mean.compute(), 1.75);
  });
}

TEST(Mean, BeginsAnew) {
  run_ranks(2, [](const Group& world) {
    Mean mean(world);
    mean.add(5, 3);
    mean.reset();
    mean.add(double(world->getRank()), 1);
    EXPECT_DOUBLE_EQ(mean.compute(), 0.5);
    EXPECT_DOUBLE_EQ(mean.compute(), 0.5);
  });
}

TEST(Mean, SaysWhatIsWrong) {
  run_ranks(2, [](const Group& world) {
    Mean mean(world);
    EXPECT_THAT(error_text<c10::ValueError>([&] { mean.compute(); }),
                HasSubstr("[Mean.compute] no rank has added anything\n  fix: add values before asking for their mean"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { mean.add(1.0, -2); }),
                HasSubstr("[Mean.add] count is -2\n  fix: pass how many samples the mean is of"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { mean.add(torch::ones({2}), 2); }),
                HasSubstr("[Mean.add] the mean of 2 samples has sizes [2]\n  fix: pass one number, or values without a "
                          "count"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { mean.add(at::Tensor()); }),
                HasSubstr("[Mean.add] the tensor is undefined\n  fix: pass a tensor"));
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = world});
    const at::Tensor cut = distribute_tensor(torch::ones({4}), mesh, {Shard(0)});
    EXPECT_THAT(error_text<c10::TypeError>([&] { mean.add(cut); }),
                HasSubstr("[Mean.add] the tensor is a DTensor, f32[4] S0 on mesh dp=2\n  fix: pass this rank's own "
                          "samples: to_local() of what is cut along the batch"));
  });
}

TEST(Accuracy, IsThatOfAllSamplesOfAllRanks) {
  run_ranks(3, [](const Group& world) {
    const at::Tensor scores = torch::tensor({0.1, 0.7, 0.2, 0.5, 0.3, 0.2, 0.2, 0.3, 0.5, 0.4, 0.1, 0.5}).view({4, 3});
    const at::Tensor targets = torch::tensor({1, 1, 2, -1});
    const int64_t rows = world->getRank() + 1;  // 1, 2 and 3 of them
    Accuracy first({.process_group = world}), second({.process_group = world, .top_k = 2});
    first.add(scores.narrow(0, 0, rows), targets.narrow(0, 0, rows));
    second.add(scores.narrow(0, 0, rows), targets.narrow(0, 0, rows));
    EXPECT_DOUBLE_EQ(first.compute(), 4.0 / 6);  // right: row 0 three times, row 2 once
    EXPECT_DOUBLE_EQ(second.compute(), 1.0);
    Accuracy counted({.process_group = world, .ignore_index = -1});
    counted.add(scores, targets);
    counted.add(scores.argmax(-1), targets);
    EXPECT_EQ(counted.count(), 18);
    EXPECT_DOUBLE_EQ(counted.compute(), 2.0 / 3);
  });
}

TEST(Accuracy, OfScoresAndOfClassesIsTheSameWhereScoresAreEqual) {
  run_ranks(2, [](const Group& world) {
    for (const int64_t classes : {2, 5, 10, 16, 17, 40, 100}) {
      const at::Tensor targets = torch::zeros({8}, at::kLong);
      for (const double score : {0.0, double(NAN)}) {
        const at::Tensor scores = torch::full({8, classes}, score);
        Accuracy of_scores({.process_group = world}), of_classes({.process_group = world});
        of_scores.add(scores, targets);
        of_classes.add(scores.argmax(-1), targets);
        EXPECT_EQ(of_scores.compute(), of_classes.compute()) << classes << " classes, all " << score;
      }
    }
  });
}

TEST(Mean, TakesNeitherComplexNumbersNorCountsThatNoDoubleHolds) {
  run_ranks(1, [](const Group& world) {
    Mean mean(world);
    EXPECT_THAT(error_text<c10::TypeError>([&] { mean.add(torch::ones({2}, at::kComplexFloat)); }),
                HasSubstr("[Mean.add] the tensor is complex, and means are real\n  fix: pass its absolute value or a "
                          "part"));
    EXPECT_THAT(error_text<c10::ValueError>([&] { mean.add(2.0, std::numeric_limits<int64_t>::max()); }),
                HasSubstr("[Mean.add] count is 9223372036854775807\n  fix: "));
    mean.add(2.0, int64_t(1) << 53);
    EXPECT_EQ(mean.count(), int64_t(1) << 53);
  });
}

TEST(Accuracy, SaysWhatIsWrong) {
  run_ranks(1, [](const Group& world) {
    EXPECT_THAT(error_text<c10::ValueError>([&] { Accuracy({.process_group = world, .top_k = 0}); }),
                HasSubstr("[Accuracy] top_k is 0\n  fix: pass 1 or more"));
    Accuracy accuracy({.process_group = world});
    EXPECT_THAT(error_text<c10::ValueError>([&] {
                  accuracy.add(torch::ones({4, 3}), torch::ones({3}));
                }),
                HasSubstr("[Accuracy.add] predictions are [4, 3] and targets [3] with top_k 1\n  fix: pass scores of "
                          "[..., classes], at least top_k of them, or classes as integers, beside targets of [...]"));
    EXPECT_THROW(accuracy.add(torch::rand({4}), torch::ones({4})), c10::ValueError);  // probabilities are no classes
    EXPECT_THAT(
        error_text<c10::IndexError>([&] {
          accuracy.add(torch::rand({2, 3}), torch::tensor({2, 3}));
        }),
        HasSubstr("[Accuracy.add] target 3 is none of the 3 classes\n  fix: pass targets from 0 on, or name the "
                  "one to leave out: {.ignore_index = ...}"));
    EXPECT_EQ(accuracy.count(), 0);
  });
}

}  // namespace
}  // namespace serried
