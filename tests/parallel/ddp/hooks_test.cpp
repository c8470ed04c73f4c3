// Hooks that average, compress and quantise, on buckets made by hand.
#include "serried/parallel/ddp/hooks/hooks.h"

#include <cmath>

#include "tests/parallel/ddp/buckets.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

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

const Shapes kHookShapes{{6, 5}, {3}, {}, {29}};
constexpr int64_t kHookElements = 63;

class HooksOnRanks : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(Backends, HooksOnRanks, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})),
                         testing::name_of);

TEST_P(HooksOnRanks, AllreduceIsTheMeanInTheBucketsOwnBuffer) {
  on_ranks([](const Group& group) {
    const at::Tensor flat = gradient_of(group->getRank(), 0, {kHookElements});
    c10d::GradBucket bucket = make_bucket(flat, kHookShapes);
    const at::Tensor result = wait_for(hooks::allreduce()(group, bucket));
    EXPECT_TRUE(result.is_same(flat));
    expect_close(result, mean_gradient(group->getSize(), 0, {kHookElements}));
    expect_same_on_all_ranks(result, group);
  });
}

TEST_P(HooksOnRanks, AllreduceAveragesSparseGradients) {
  on_ranks([](const Group& group) {
    const Shapes shapes{{6, 3}};
    const int64_t rank = group->getRank();
    const at::Tensor indices = torch::tensor({{int64_t(0), 1 + rank}});
    const at::Tensor mine = at::sparse_coo_tensor(indices, torch::ones({2, 3}) * (rank + 1), {6, 3});
    c10d::GradBucket bucket = make_bucket(mine.clone(), shapes);
    at::Tensor expected = at::zeros({6, 3});
    for (int64_t peer = 0; peer < group->getSize(); ++peer) {
      expected[0] += double(peer + 1) / group->getSize();
      expected[1 + peer] += double(peer + 1) / group->getSize();
    }
    expect_close(wait_for(hooks::allreduce()(group, bucket)).to_dense(), expected);
  });
}

TEST_P(HooksOnRanks, CompressionDividesAndSumsInTheSmallTypeAndCastsBack) {
  on_ranks([](const Group& group) {
    for (const bool half : {true, false}) {
      const at::ScalarType dtype = half ? at::kHalf : at::kBFloat16;
      const at::Tensor flat = gradient_of(group->getRank(), 0, {kHookElements});
      c10d::GradBucket bucket = make_bucket(flat, kHookShapes);
      const at::Tensor result = wait_for((half ? hooks::fp16_compress() : hooks::bf16_compress())(group, bucket));
      EXPECT_TRUE(result.is_same(flat));
      EXPECT_TRUE(bucket.getBuffer().is_same(flat));
      at::Tensor expected = at::zeros({kHookElements}, dtype);
      for (const at::Tensor& gradient : gradients_of_all(group->getSize(), 0, {kHookElements})) {
        expected += gradient.to(dtype) / group->getSize();
      }
      EXPECT_EQ(result.scalar_type(), at::kFloat);
      expect_close(result.to(dtype), expected);
      expect_equal(result, result.to(dtype).to(at::kFloat), "a number of the small type");
      expect_same_on_all_ranks(result, group);
    }
  });
}

TEST_P(HooksOnRanks, CompressionDoesNotOverflowWhereTheMeanFits) {
  on_ranks([](const Group& group) {
    const at::Tensor result = run_hook(hooks::fp16_compress(), group, at::full({5}, 60000.0));
    EXPECT_TRUE(at::isfinite(result).all().item<bool>()) << result;
  });
}

TEST(Hooks, ACompressedHookSeesTheSmallTypeAndTheCallerItsOwn) {
  run_ranks(1, [](const Group& group) {
    const at::Tensor flat = gradient_of(0, 0, {kHookElements});
    const at::Tensor given = flat.clone();
    c10d::GradBucket bucket = make_bucket(flat, kHookShapes);
    at::ScalarType seen = at::kFloat;
    const CommHook inner = [&](c10d::GradBucket& small) {
      seen = small.getGradients().front().scalar_type();
      return hooks::noop()(nullptr, small);
    };
    const at::Tensor result = wait_for(hooks::bf16_compress(inner)(group, bucket));
    EXPECT_EQ(seen, at::kBFloat16);
    EXPECT_TRUE(result.is_same(flat));
    expect_equal(result, given.to(at::kBFloat16).to(at::kFloat));
  });
}

TEST_P(HooksOnRanks, CompressionWrapsAnyHook) {
  on_ranks([](const Group& group) {
    const at::Tensor mine = gradient_of(group->getRank(), 0, {kHookElements});
    const at::Tensor result =
        run_hook(hooks::fp16_compress(hooks::quantize_per_channel({.bucket_size = 16})), group, mine);
    EXPECT_LT((result - mean_gradient(group->getSize(), 0, {kHookElements})).abs().max().item<double>(), 0.01);
    expect_same_on_all_ranks(result, group);
  });
}

TEST(Hooks, NoopLeavesTheGradientsAlone) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor mine = gradient_of(group->getRank(), 0, {kHookElements});
    expect_equal(run_hook(hooks::noop(), group, mine), mine);
  });
}

// The published formula, element by element.
at::Tensor quantized(const at::Tensor& values, int64_t row_size) {
  at::Tensor result = values.clone();
  for (int64_t begin = 0; begin < values.numel(); begin += row_size) {
    const int64_t end = std::min(begin + row_size, values.numel());
    float low = 0;
    float high = 0;
    for (int64_t i = begin; i < end; ++i) low = std::min(low, values[i].item<float>());
    for (int64_t i = begin; i < end; ++i) high = std::max(high, values[i].item<float>());
    const float scale = (high - low) / 255;
    const float zero_point = std::min(255.0F, std::max(0.0F, -std::nearbyint(low / scale)));
    for (int64_t i = begin; i < end; ++i) {
      const float code = std::nearbyint(values[i].item<float>() / scale) + zero_point;
      result[i] = (std::min(255.0F, std::max(0.0F, code)) - zero_point) * scale;
    }
  }
  return result;
}

at::Tensor quantized_mean(int num_ranks, int64_t row_size) {
  at::Tensor sum = at::zeros({kHookElements});
  for (const at::Tensor& gradient : gradients_of_all(num_ranks, 0, {kHookElements})) {
    sum += quantized(gradient, row_size);
  }
  return sum / num_ranks;
}

TEST_P(HooksOnRanks, QuantizationIsTheMeanOfWhatEightBitsKeep) {
  on_ranks([](const Group& group) {
    const at::Tensor mine = gradient_of(group->getRank(), 0, {kHookElements});
    const at::Tensor per_tensor = run_hook(hooks::quantize_per_tensor(), group, mine);
    expect_close(per_tensor, quantized_mean(group->getSize(), kHookElements));
    expect_same_on_all_ranks(per_tensor, group);
    for (const int64_t size : {1, 7, 16, 512}) {  // 7 divides 63
      const at::Tensor per_channel = run_hook(hooks::quantize_per_channel({.bucket_size = size}), group, mine);
      expect_close(per_channel, quantized_mean(group->getSize(), size));
      expect_same_on_all_ranks(per_channel, group);
    }
  });
}

TEST(Hooks, QuantizationWritesIntoTheBucketsOwnBufferOfAnyFloatingType) {
  run_ranks(2, [](const Group& group) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16}) {
      const at::Tensor flat = gradient_of(group->getRank(), 0, {kHookElements}).to(dtype);
      c10d::GradBucket bucket = make_bucket(flat, kHookShapes);
      EXPECT_TRUE(wait_for(hooks::quantize_per_tensor()(group, bucket)).is_same(flat));
      EXPECT_LT((flat.to(at::kFloat) - mean_gradient(2, 0, {kHookElements})).abs().max().item<double>(), 0.02);
    }
  });
}

TEST(Hooks, QuantizationKeepsSmallGradientsZerosAndWhatIsNoNumber) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor small = at::full({5}, 1e-12);
    expect_close(run_hook(hooks::quantize_per_tensor(), group, small) * 1e12, at::ones({5}));
    expect_equal(run_hook(hooks::quantize_per_tensor(), group, at::zeros({5})), at::zeros({5}));
    expect_equal(run_hook(hooks::quantize_per_tensor(), group, at::zeros({0})), at::zeros({0}));
    const double odd = group->getRank() == 0 ? std::nan("") : 1.0;
    EXPECT_TRUE(run_hook(hooks::quantize_per_tensor(), group, at::full({5}, odd)).isnan().all().item<bool>());
  });
}

TEST_P(HooksOnRanks, SeveralBucketsMayBeOnTheirWay) {
  on_ranks([](const Group& group) {
    for (const CommHook& hook : {hooks::allreduce(), hooks::fp16_compress(), hooks::quantize_per_tensor()}) {
      std::vector<HookFuture> futures;
      for (int64_t b = 0; b < 5; ++b) {
        const Shapes shapes{{kHookElements + b}};
        c10d::GradBucket bucket =
            make_bucket(gradient_of(group->getRank(), b, shapes[0]), shapes, {.index = size_t(b), .count = 5});
        futures.push_back(hook(group, bucket));
      }
      for (int64_t b = 4; b >= 0; --b) {
        const at::Tensor expected = mean_gradient(group->getSize(), b, {kHookElements + b});
        EXPECT_LT((wait_for(futures[b]) - expected).abs().max().item<double>(), 0.02) << hook.name() << " " << b;
      }
    }
  });
}

TEST(Hooks, ThenRunsOnceTheBucketIsFilled) {
  run_ranks(3, [](const Group& group) {
    at::Tensor parameter = at::zeros({7});
    const CommHook hook = hooks::then(hooks::fp16_compress(), [](const c10d::GradBucket& bucket) {
      bucket.getParameters().front().sub_(bucket.getGradients().front());
    });
    const at::Tensor flat = gradient_of(group->getRank(), 0, {7});
    const Shapes shapes{{7}};
    HookFuture future;
    {
      c10d::GradBucket bucket = make_bucket(flat, shapes, {.parameters = {parameter}});
      future = hook(group, bucket);
    }
    const at::Tensor result = wait_for(future);
    EXPECT_EQ(hook.name(), "fp16_compress_then");
    expect_equal(parameter, -result);
    expect_close(result.to(at::kHalf), mean_gradient(3, 0, {7}).to(at::kHalf));
  });
}

TEST(Hooks, AnErrorOfAHookIsTheErrorOfWhatWrapsIt) {
  run_ranks(1, [](const Group& group) {
    const CommHook failing = [](c10d::GradBucket&) {
      auto future = c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
      future->setError(std::make_exception_ptr(c10::ValueError("it broke")));
      return future;
    };
    bool called = false;
    const CommHook hook = hooks::then(hooks::fp16_compress(failing), [&](const c10d::GradBucket&) { called = true; });
    EXPECT_EQ(error_text<c10::ValueError>([&] { run_hook(hook, group, at::ones({3})); }), "it broke");
    EXPECT_FALSE(called);
  });
}

TEST(Hooks, EachTypeHasItsHook) {
  using hooks::CommHookType;
  const std::vector<std::pair<CommHookType, std::string>> names{
      {CommHookType::ALLREDUCE, "allreduce"},
      {CommHookType::FP16_COMPRESS, "fp16_compress"},
      {CommHookType::BF16_COMPRESS, "bf16_compress"},
      {CommHookType::QUANTIZE_PER_TENSOR, "quantize_per_tensor"},
      {CommHookType::QUANTIZE_PER_CHANNEL, "quantize_per_channel"},
      {CommHookType::POWER_SGD, "power_sgd"},
      {CommHookType::POWER_SGD_RANK2, "power_sgd"},
      {CommHookType::BATCHED_POWER_SGD, "batched_power_sgd"},
      {CommHookType::BATCHED_POWER_SGD_RANK2, "batched_power_sgd"},
      {CommHookType::NOOP, "noop"},
  };
  for (const auto& [type, name] : names) EXPECT_EQ(hooks::make(type).name(), name);
  EXPECT_EQ(hooks::fp16_compress(hooks::power_sgd()).name(), "fp16_compress_power_sgd");
}

TEST(Hooks, ANumberThatIsNoTypeIsRefused) {
  EXPECT_EQ(error_text<c10::ValueError>([] { hooks::make(hooks::CommHookType(99)); }),
            "[make] no hook has the number 99\n  fix: pass one of the names of CommHookType");
}

TEST(Hooks, QuantizationRefusesWhatItCannotEncode) {
  EXPECT_EQ(error_text<c10::ValueError>([] { hooks::quantize_per_channel({.bucket_size = 0}); }),
            "[quantize_per_channel] bucket_size is 0\n  fix: pass how many elements share a scale: 1 or more");
  run_ranks(1, [](const Group& group) {
    const Shapes shapes{{2, 2}};
    c10d::GradBucket bucket = make_bucket(at::ones({2, 2}).to_sparse(), shapes);
    EXPECT_EQ(error_text<c10::ValueError>([&] { hooks::quantize_per_tensor()(group, bucket); }),
              "[quantize_per_tensor] cannot quantise a bucket of Sparse Float\n"
              "  fix: register hooks::allreduce(), or keep such parameters out of the module\n"
              "  at:  rank 0/1");
  });
}

}  // namespace
}  // namespace serried
