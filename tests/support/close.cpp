// Comparing tensors with a message that shows both.
#include "tests/support/close.h"

namespace serried::testing {
namespace {

bool same_kind(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  EXPECT_TRUE(actual.defined() && expected.defined()) << what;
  if (!actual.defined() || !expected.defined()) return false;
  EXPECT_EQ(actual.sizes(), expected.sizes()) << what;
  EXPECT_EQ(actual.dtype(), expected.dtype()) << what;
  return actual.sizes() == expected.sizes() && actual.dtype() == expected.dtype();
}

std::string shown(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  if (actual.numel() > 64) return c10::str(what, ": ", actual.ne(expected).sum().item<int64_t>(), " elements differ");
  return c10::str(what, ":\n", actual, "\nexpected:\n", expected);
}

double tolerance(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf: return 2e-3;
    case at::kBFloat16: return 2e-2;
    case at::kDouble:
    case at::kComplexDouble: return 1e-12;
    default: return 1e-5;
  }
}

}  // namespace

void expect_equal(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  if (!same_kind(actual, expected, what)) return;
  EXPECT_TRUE(actual.equal(expected)) << shown(actual, expected, what);
}

void expect_close(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  if (!same_kind(actual, expected, what)) return;
  const double limit = tolerance(actual.scalar_type());
  EXPECT_TRUE(at::allclose(actual, expected, limit, limit)) << shown(actual, expected, what);
}

}  // namespace serried::testing
