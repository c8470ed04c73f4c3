// PowerSGD against its algorithm written down for the gathered gradients, and against numbers of PyTorch.
#include <atomic>
#include <chrono>
#include <limits>

#include <ATen/CPUGeneratorImpl.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/hooks/low_rank.h"
#include "tests/parallel/ddp/buckets.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using hooks::PowerSGDOptions;
using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using testing::expect_same_on_all_ranks;
using testing::gradient_of;
using testing::gradients_of_all;
using testing::make_bucket;
using testing::mean_gradient;
using testing::run_hook;
using testing::Shapes;
using testing::wait_for;

class PowerSGDOnRanks : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(Backends, PowerSGDOnRanks, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})),
                         testing::name_of);

at::Tensor largest_difference(const at::Tensor& a, const at::Tensor& b) {
  return (a - b).abs().max();
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected, double tolerance = 1e-5) {
  EXPECT_LT(largest_difference(actual, expected).item<double>(), tolerance) << actual << "\nexpected\n" << expected;
}

// The options that compress from the first iteration on, without anything kept.
PowerSGDOptions from_the_start(int64_t rank) {
  return {.rank = rank, .start_iter = 0, .min_compression_rate = 0.1, .use_error_feedback = false, .warm_start = false};
}

// numpy.random.RandomState(0).randint(1_000_000_000), as PyTorch draws the seed of its first Q.
constexpr uint64_t kFirstSeed = 209652396;

// The algorithm on all ranks' gradients at once, with LAPACK's QR.
class PowerSGDReference {
 public:
  PowerSGDReference(int num_ranks, int64_t rows, int64_t cols, int64_t rank)
      : errors_(num_ranks, at::zeros({rows, cols})),
        q_(at::randn({1, cols, rank}, at::detail::createCPUGenerator(kFirstSeed)).squeeze(0)) {}

  at::Tensor step(const std::vector<at::Tensor>& gradients) {
    const at::Tensor start = std::get<0>(at::linalg_qr(q_));
    std::vector<at::Tensor> matrices;
    for (size_t r = 0; r < gradients.size(); ++r) matrices.push_back(gradients[r] + errors_[r]);
    const at::Tensor sum = at::stack(matrices).sum(0);
    const at::Tensor p = std::get<0>(at::linalg_qr(sum.mm(start)));
    q_ = sum.t().mm(p) / double(gradients.size());
    const at::Tensor result = p.mm(q_.t());
    for (size_t r = 0; r < gradients.size(); ++r) errors_[r] = matrices[r] - result;
    return result;
  }

 private:
  std::vector<at::Tensor> errors_;
  at::Tensor q_;
};

TEST_P(PowerSGDOnRanks, FollowsTheAlgorithmWithErrorFeedbackAndWarmStart) {
  on_ranks([](const Group& group) {
    for (const int64_t rank : {1, 2, 4}) {
      const CommHook hook = hooks::power_sgd({.rank = rank, .start_iter = 2, .min_compression_rate = 0.5});
      PowerSGDReference reference(group->getSize(), 9, 7, rank);
      for (int64_t iteration = 0; iteration < 6; ++iteration) {
        const at::Tensor result = run_hook(hook, group, gradient_of(group->getRank(), iteration, {9, 7}));
        const at::Tensor expected = iteration < 2
                                        ? mean_gradient(group->getSize(), iteration, {9, 7})
                                        : reference.step(gradients_of_all(group->getSize(), iteration, {9, 7}));
        expect_near(result, expected);
        expect_same_on_all_ranks(result, group);
      }
    }
  });
}

TEST_P(PowerSGDOnRanks, BatchedFollowsTheAlgorithmOnASquare) {
  on_ranks([](const Group& group) {
    const CommHook hook = hooks::batched_power_sgd({.rank = 2, .start_iter = 2});
    PowerSGDReference reference(group->getSize(), 8, 8, 2);
    const Shapes shapes{{5, 7}, {18}};  // 53 elements: 11 zeros fill the square
    for (int64_t iteration = 0; iteration < 5; ++iteration) {
      c10d::GradBucket bucket = make_bucket(gradient_of(group->getRank(), iteration, {53}), shapes);
      const at::Tensor result = wait_for(hook(group, bucket));
      EXPECT_TRUE(result.is_same(bucket.getBuffer()));
      if (iteration < 2) continue;
      std::vector<at::Tensor> squares;
      for (const at::Tensor& flat : gradients_of_all(group->getSize(), iteration, {53})) {
        squares.push_back(at::constant_pad_nd(flat, {0, 11}).view({8, 8}));
      }
      expect_near(result, reference.step(squares).view(-1).narrow(0, 0, 53));
      expect_same_on_all_ranks(result, group);
    }
  });
}

// Elements of the fifth result of torch.distributed's powerSGD_hook on two gloo ranks, for the same gradients.
struct PowerSGDRecord {
  std::string name;
  PowerSGDOptions options;
  std::vector<float> values;
};

const std::vector<PowerSGDRecord> kPowerSGDRecords{
    {"rank 2",
     {.rank = 2, .start_iter = 2, .min_compression_rate = 1},
     {0.5872757, 0.4632131, 0.7205866, -0.7943633, -0.2504095, 0.1896018}},
    {"rank 3, by QR in PyTorch",
     {.rank = 3, .start_iter = 2, .min_compression_rate = 0.5},
     {0.4891317, 0.4205339, 0.8161273, -0.7943632, -0.2672811, 0.0986079}},
    {"stacked",
     {.rank = 2, .start_iter = 2, .min_compression_rate = 1, .batch_tensors_with_same_shape = true},
     {0.6068297, 0.5365298, 0.7579964, -0.7943633, -0.2975882, 0.02550845}},
    {"cold start",
     {.rank = 2, .start_iter = 2, .min_compression_rate = 1, .warm_start = false},
     {0.112082, 1.266195, 0.4766173, -0.7943633, -0.6416179, -0.05001903}},
    {"no error feedback",
     {.rank = 2, .start_iter = 2, .min_compression_rate = 1, .use_error_feedback = false, .random_seed = 7},
     {0.3144408, 0.630599, 0.7457242, -0.7943633, -0.1082424, 0.1165593}},
};

TEST(PowerSGD, GivesTheNumbersOfPyTorch) {
  run_ranks(2, [](const Group& group) {
    const Shapes shapes{{6, 5}, {3}, {6, 5}};
    const at::Tensor places = torch::tensor({0, 1, 13, 31, 33, 62});
    for (const PowerSGDRecord& recorded : kPowerSGDRecords) {
      const CommHook hook = hooks::power_sgd(recorded.options);
      at::Tensor result;
      for (int64_t iteration = 0; iteration < 5; ++iteration) {
        c10d::GradBucket bucket = make_bucket(gradient_of(group->getRank(), iteration, {63}), shapes);
        result = wait_for(hook(group, bucket));
      }
      SCOPED_TRACE(recorded.name);
      expect_near(result.index_select(0, places), torch::tensor(recorded.values), 2e-5);
    }
  });
}

// u v^T with a u per rank: a mean of rank one for each rank of the group.
at::Tensor rank_one(int64_t seed, int64_t rows, int64_t cols) {
  return at::outer(gradient_of(seed, 0, {rows}), gradient_of(seed, 3, {cols}));
}

at::Tensor mean_of_rank_ones(int num_ranks, int64_t rows, int64_t cols) {
  at::Tensor sum = at::zeros({rows, cols});
  for (int rank = 0; rank < num_ranks; ++rank) sum += rank_one(rank, rows, cols);
  return sum / num_ranks;
}

TEST_P(PowerSGDOnRanks, ReproducesAMeanWhoseRankIsNotLarger) {
  on_ranks([](const Group& group) {
    for (const int64_t rank : {4, 6}) {  // more than the mean has, too
      const at::Tensor mine = rank_one(group->getRank(), 11, 13);
      const at::Tensor expected = mean_of_rank_ones(group->getSize(), 11, 13);
      const at::Tensor result = run_hook(hooks::power_sgd(from_the_start(rank)), group, mine);
      expect_near(result, expected);
      expect_same_on_all_ranks(result, group);
    }
  });
}

TEST(PowerSGD, CompressesTheElementTypesOfGradients) {
  run_ranks(2, [](const Group& group) {
    for (const auto& [dtype, tolerance] : std::vector<std::pair<at::ScalarType, double>>{
             {at::kDouble, 1e-6}, {at::kFloat, 1e-5}, {at::kHalf, 1e-2}, {at::kBFloat16, 5e-2}}) {
      const at::Tensor mine = rank_one(group->getRank(), 11, 13).to(dtype);
      const at::Tensor result = run_hook(hooks::power_sgd(from_the_start(3)), group, mine);
      EXPECT_EQ(result.scalar_type(), dtype);
      expect_near(result.to(at::kFloat), mean_of_rank_ones(2, 11, 13), tolerance);
      expect_same_on_all_ranks(result, group);
    }
  });
}

TEST(PowerSGD, AveragesWhatItCannotCompress) {
  run_ranks(3, [](const Group& group) {
    const at::Tensor complex =
        at::complex(gradient_of(group->getRank(), 0, {4, 5}), gradient_of(group->getRank(), 1, {4, 5}));
    const at::Tensor expected = at::complex(mean_gradient(3, 0, {4, 5}), mean_gradient(3, 1, {4, 5}));
    expect_close(run_hook(hooks::power_sgd(from_the_start(1)), group, complex), expected);
    // 5 + 4 numbers instead of 20 are not a quarter; a vector never is worth it.
    PowerSGDOptions options = from_the_start(1);
    options.min_compression_rate = 4;
    for (const Shapes& shapes : {Shapes{{4, 5}}, Shapes{{20}}, Shapes{{0, 4}, {}, {19}}}) {
      c10d::GradBucket bucket = make_bucket(gradient_of(group->getRank(), 0, {20}), shapes);
      expect_close(wait_for(hooks::power_sgd(options)(group, bucket)), mean_gradient(3, 0, {20}));
    }
    expect_equal(run_hook(hooks::batched_power_sgd(from_the_start(1)), group, at::zeros({0})), at::zeros({0}));
    const Shapes shapes{{4, 5}};
    c10d::GradBucket sparse = make_bucket(gradient_of(group->getRank(), 0, {4, 5}).to_sparse(), shapes);
    expect_close(wait_for(hooks::power_sgd(options)(group, sparse)).to_dense(), mean_gradient(3, 0, {4, 5}));
  });
}

TEST(PowerSGD, WritesIntoTheBucketsOwnBuffer) {
  run_ranks(2, [](const Group& group) {
    for (const bool stack : {false, true}) {
      PowerSGDOptions options = from_the_start(2);
      options.batch_tensors_with_same_shape = stack;
      const Shapes shapes{{6, 5}, {3}, {6, 5}};
      const at::Tensor flat = gradient_of(group->getRank(), 0, {63});
      c10d::GradBucket bucket = make_bucket(flat, shapes);
      EXPECT_TRUE(wait_for(hooks::power_sgd(options)(group, bucket)).is_same(flat));
    }
  });
}

// Every collective of the hook meets its own, although the program has some between the buckets.
TEST_P(PowerSGDOnRanks, BucketsAndOtherCollectivesMayBeOnTheirWayTogether) {
  on_ranks([](const Group& group) {
    const CommHook hook = hooks::power_sgd(from_the_start(4));
    for (int64_t iteration = 0; iteration < 3; ++iteration) {
      std::vector<HookFuture> futures;
      for (int64_t b = 0; b < 6; ++b) {
        const Shapes shapes{{11 + b, 13}};
        c10d::GradBucket bucket =
            make_bucket(rank_one(group->getRank(), 11 + b, 13).view(-1), shapes, {.index = size_t(b), .count = 6});
        futures.push_back(hook(group, bucket));
        at::Tensor other = at::ones({7 + b});
        all_reduce_(other, group);
        expect_equal(other, at::full({7 + b}, double(group->getSize())));
      }
      for (int64_t b = 0; b < 6; ++b) {
        const at::Tensor expected = mean_of_rank_ones(group->getSize(), 11 + b, 13);
        expect_near(wait_for(futures[b]).view({11 + b, 13}), expected);
      }
    }
  });
}

TEST(PowerSGD, ErrorFeedbackSendsInTheEndWhatWasLeftOut) {
  run_ranks(2, [](const Group& group) {
    const CommHook hook = hooks::power_sgd({.rank = 1, .start_iter = 2, .min_compression_rate = 1});
    const at::Tensor mine = gradient_of(group->getRank(), 0, {6, 5});
    for (int i = 0; i < 2; ++i) run_hook(hook, group, mine);
    at::Tensor sum = at::zeros({6, 5});
    constexpr int kSteps = 200;
    for (int i = 0; i < kSteps; ++i) sum += run_hook(hook, group, mine);
    expect_near(sum / kSteps, mean_gradient(2, 0, {6, 5}), 0.05);
  });
}

TEST(PowerSGD, GradientsOfZerosLeaveItAbleToSendOthers) {
  run_ranks(2, [](const Group& group) {
    const CommHook hook =
        hooks::power_sgd({.rank = 2, .start_iter = 2, .min_compression_rate = 1, .use_error_feedback = false});
    for (int i = 0; i < 4; ++i) expect_equal(run_hook(hook, group, at::zeros({11, 13})), at::zeros({11, 13}));
    const at::Tensor result = run_hook(hook, group, rank_one(group->getRank(), 11, 13));
    expect_near(result, mean_of_rank_ones(2, 11, 13));
  });
}

TEST(PowerSGD, AGradientThatIsNoNumberSpoilsOnlyItsOwnIteration) {
  run_ranks(2, [](const Group& group) {
    const CommHook hook = hooks::power_sgd({.rank = 2, .start_iter = 2, .min_compression_rate = 1});
    for (int i = 0; i < 2; ++i) run_hook(hook, group, at::zeros({11, 13}));
    const double odd = group->getRank() == 0 ? std::numeric_limits<double>::infinity() : 1;
    EXPECT_FALSE(at::isfinite(run_hook(hook, group, at::full({11, 13}, odd))).all().item<bool>());
    const at::Tensor result = run_hook(hook, group, rank_one(group->getRank(), 11, 13));
    expect_near(result, mean_of_rank_ones(2, 11, 13));
    expect_same_on_all_ranks(result, group);
  });
}

TEST(PowerSGD, ABucketThatIsCutDifferentlyStartsAnew) {
  run_ranks(2, [](const Group& group) {
    const CommHook hook = hooks::power_sgd({.rank = 2, .start_iter = 2, .min_compression_rate = 1});
    for (const int64_t rows : {11, 11, 11, 9, 12}) {
      const at::Tensor result = run_hook(hook, group, rank_one(group->getRank(), rows, 13));
      expect_near(result, mean_of_rank_ones(2, rows, 13));
    }
  });
}

TEST(PowerSGD, GoesOnWithAnotherGroupAtTheLargestCount) {
  run_ranks(3, [](const Group& group) {
    const CommHook hook = hooks::power_sgd({.rank = 2, .start_iter = 4, .min_compression_rate = 1});
    // Rank 1 misses the last bucket of an iteration, as it does when a peer is lost.
    const Shapes shapes{{11, 13}};
    for (int i = 0; i < 3; ++i) {
      c10d::GradBucket bucket = make_bucket(rank_one(group->getRank(), 11, 13).view(-1), shapes,
                                            {.index = size_t(i == 2 && group->getRank() == 1 ? 0 : 1), .count = 2});
      wait_for(hook(group, bucket));
    }
    const Group survivors = split_group(group, {{0, 1}});
    if (!survivors) return;
    for (int i = 0; i < 4; ++i) {
      const at::Tensor result = run_hook(hook, survivors, rank_one(survivors->getRank(), 11, 13));
      expect_near(result, mean_of_rank_ones(2, 11, 13));
    }
  });
}

TEST(PowerSGD, ARankThatFailsEndsTheWaitOfTheOthers) {
  for (const char* backend : {"gloo", "shm", "threads"}) {
    std::atomic<bool> raised = false;
    const auto run = [&] {
      run_ranks(2,
                [&](const Group& group) {
                  const CommHook hook = hooks::power_sgd(from_the_start(2));
                  run_hook(hook, group, rank_one(group->getRank(), 11, 13));
                  if (group->getRank() == 1) raise<c10::ValueError>({"test", "rank 1 gives up", "none"});
                  EXPECT_ANY_THROW(run_hook(hook, group, rank_one(0, 11, 13)));
                  raised = true;
                },
                {.backend = backend, .timeout = std::chrono::seconds(120)});
    };
    const auto began = std::chrono::steady_clock::now();
    EXPECT_NE(error_text<c10::ValueError>(run).find("rank 1 gives up"), std::string::npos);
    EXPECT_TRUE(raised) << backend;
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(60)) << backend;
  }
}

TEST_P(PowerSGDOnRanks, AHookThatIsDroppedWaitsForWhatItStarted) {
  on_ranks([](const Group& group) {
    const at::Tensor flat = rank_one(group->getRank(), 11, 13).view(-1);
    const Shapes shapes{{11, 13}};
    {
      const CommHook hook = hooks::power_sgd(from_the_start(4));
      c10d::GradBucket bucket = make_bucket(flat, shapes);
      hook(group, bucket);
    }
    expect_near(flat.view({11, 13}), mean_of_rank_ones(group->getSize(), 11, 13));
  });
}

TEST(PowerSGD, RunsInsideACompressingHook) {
  run_ranks(2, [](const Group& group) {
    const CommHook hook = hooks::bf16_compress(hooks::power_sgd(from_the_start(2)));
    const at::Tensor result = run_hook(hook, group, rank_one(group->getRank(), 11, 13));
    EXPECT_EQ(result.scalar_type(), at::kFloat);
    expect_near(result, mean_of_rank_ones(2, 11, 13), 5e-2);
  });
}

TEST(PowerSGD, TellsHowMuchItSavedAsOftenAsAsked) {
  ::testing::internal::CaptureStderr();
  log::set_topics("comm");
  run_ranks(1, [](const Group& group) {
    PowerSGDOptions options = from_the_start(1);
    options.min_compression_rate = 2;
    options.compression_stats_logging_frequency = 2;
    const CommHook hook = hooks::power_sgd(options);
    const Shapes shapes{{11, 13}, {6}};
    for (int i = 0; i < 4; ++i) {
      c10d::GradBucket bucket = make_bucket(gradient_of(0, i, {149}), shapes);
      wait_for(hook(group, bucket));
    }
  });
  log::set_topics("none");
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("power_sgd: iteration 0, 149 elements before compression, 30 after, rate 4.96667\n"),
            std::string::npos)
      << log;
  EXPECT_NE(log.find("power_sgd: iteration 2, 447 elements before compression, 90 after, rate 4.96667\n"),
            std::string::npos)
      << log;
  EXPECT_EQ(log.find("power_sgd: iteration 1,"), std::string::npos) << log;
}

TEST(PowerSGD, RefusesToKeepWhatTheRebuildOfBucketsWouldSpoil) {
  EXPECT_EQ(
      error_text<c10::ValueError>([] { hooks::power_sgd({.start_iter = 1}); }),
      "[power_sgd] start_iter is 1, but buckets are rebuilt after the first iteration and their errors and factors "
      "with them\n  fix: pass a start_iter of 2 or more, or switch use_error_feedback and warm_start off");
  EXPECT_EQ(
      error_text<c10::ValueError>([] { hooks::batched_power_sgd({.start_iter = 0, .warm_start = false}); }),
      "[batched_power_sgd] start_iter is 0, but buckets are rebuilt after the first iteration and their errors and "
      "factors with them\n  fix: pass a start_iter of 2 or more, or switch use_error_feedback and warm_start off");
  EXPECT_NO_THROW(hooks::power_sgd({.start_iter = 2}));
}

TEST(PowerSGD, RefusesARankOfNothing) {
  EXPECT_EQ(error_text<c10::ValueError>([] { hooks::power_sgd({.rank = 0}); }),
            "[power_sgd] rank is 0\n  fix: pass a rank of 1 or more; 1 to 4 is usual");
}

void expect_orthonormal(const at::Tensor& matrices) {
  const at::Tensor square = at::bmm(matrices.transpose(1, 2), matrices);
  const at::Tensor identity = at::eye(matrices.size(2), matrices.options()).expand_as(square);
  EXPECT_LT(largest_difference(square, identity).item<double>(), 1e-5) << square;
}

TEST(Orthogonalize, KeepsTheSpanOfIndependentColumns) {
  const at::Tensor given = at::stack({gradient_of(0, 0, {9, 4}), gradient_of(1, 2, {9, 4})});
  const at::Tensor made = given.clone();
  hooks::detail::orthogonalize(made, 0);
  expect_orthonormal(made);
  const at::Tensor inside = at::bmm(made, at::bmm(made.transpose(1, 2), given));
  expect_close(inside, given);
}

TEST(Orthogonalize, ReplacesColumnsThatAddNothing) {
  at::Tensor made = gradient_of(0, 0, {1, 5, 4});
  made.select(2, 1).copy_(made.select(2, 0) * 3);  // but for rounding
  made.select(2, 2).zero_();
  hooks::detail::orthogonalize(made, 0);
  expect_orthonormal(made);
  at::Tensor zeros = at::zeros({2, 4, 4});
  hooks::detail::orthogonalize(zeros, 0);
  expect_orthonormal(zeros);
}

TEST(Orthogonalize, EpsilonBoundsWhatTinyColumnsBecome) {
  at::Tensor made = at::full({1, 4, 1}, 1e-10);
  hooks::detail::orthogonalize(made, 1e-8);
  expect_close(made, at::full({1, 4, 1}, 1e-10 / (2e-10 + 1e-8)));
}

}  // namespace
}  // namespace serried
