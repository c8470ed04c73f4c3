// The NaN check by itself.
#include "serried/comm/collectives/nan_check.h"

#include <limits>

namespace serried::detail {
namespace {

using ::testing::HasSubstr;
using watch::NanCheck;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

at::Tensor with_nan(at::ScalarType dtype) {
  auto x = torch::zeros({4, 5}, dtype);
  x[1][2] = kNan;
  x[3][0] = kNan;
  return x;
}

TEST(NanCheck, NamesRankShapeCountAndFirstIndex) {
  EXPECT_EQ(find_nan(with_nan(at::kFloat), 2), "rank 2 sends 2 NaN in f32[4,5], the first at [1,2]");
  EXPECT_EQ(find_nan(with_nan(at::kBFloat16), 0), "rank 0 sends 2 NaN in bf16[4,5], the first at [1,2]");
  EXPECT_EQ(find_nan(with_nan(at::kComplexDouble), 0), "rank 0 sends 2 NaN in c128[4,5], the first at [1,2]");
  EXPECT_EQ(find_nan(with_nan(at::kFloat).t(), 1), "rank 1 sends 2 NaN in f32[5,4], the first at [0,3]");
  EXPECT_EQ(find_nan(torch::full({}, kNan), 1), "rank 1 sends 1 NaN in f32[], the first at []");
}

TEST(NanCheck, FindsNothingWhereNothingIs) {
  EXPECT_EQ(find_nan(torch::full({3}, std::numeric_limits<float>::infinity()), 0), "");
  EXPECT_EQ(find_nan(torch::zeros({3}, at::kLong), 0), "");
  EXPECT_EQ(find_nan(torch::zeros({0}), 0), "");
  EXPECT_EQ(find_nan({}, 0), "");
}

TEST(NanCheck, LooksAtTheValuesOfSparseTensors) {
  EXPECT_THAT(find_nan(with_nan(at::kFloat).to_sparse(), 3), HasSubstr("rank 3 sends 2 NaN in f32[4,5]"));
}

TEST(NanCheck, RaisesWarnsOrDoesNothing) {
  const auto x = with_nan(at::kFloat);
  EXPECT_NO_THROW(check_nan(NanCheck::off, x, "all_reduce", 2));
  ::testing::internal::CaptureStderr();
  check_nan(NanCheck::warn, x, "all_reduce", 2);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("[all_reduce] rank 2 sends 2 NaN"));
  try {
    check_nan(NanCheck::raise, x, "all_reduce", 2);
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    EXPECT_THAT(error.what(), HasSubstr("[all_reduce] rank 2 sends 2 NaN in f32[4,5], the first at [1,2]\n  fix: "));
  }
}

}  // namespace
}  // namespace serried::detail
