// Every backend reduces alike: dtypes, reductions and sizes through c10d's own methods, against plain ATen in rank order.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include "serried/comm/collectives.h"
#include "tests/support/close.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using c10d::ReduceOp;
using testing::expect_close;
using testing::expect_equal;
using testing::sample;
using testing::samples;
using testing::sibling;
using Tensors = std::vector<at::Tensor>;
using RedOpType = ReduceOp::RedOpType;

class ConformanceReductions : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, ConformanceReductions, ::testing::ValuesIn(testing::settings({1, 2, 3, 4})),
                         testing::name_of);

const std::vector<at::ScalarType> kDtypes = {at::kFloat,         at::kDouble, at::kHalf, at::kBFloat16,
                                             at::kComplexFloat,  at::kComplexDouble, at::kBool, at::kByte,
                                             at::kChar,          at::kShort,  at::kInt,  at::kLong};

bool is_integer(at::ScalarType dtype) { return at::isIntegralType(dtype, /*includeBool=*/true); }

// What the reduction means for the dtype; null where it means nothing, and every backend refuses.
std::function<at::Tensor(const at::Tensor&, const at::Tensor&)> step_of(RedOpType op, at::ScalarType dtype) {
  using T = const at::Tensor&;
  switch (op) {
    case ReduceOp::AVG:
      if (dtype == at::kBool) return nullptr;
      return [](T a, T b) { return a + b; };
    case ReduceOp::SUM:
      if (dtype == at::kBool) return [](T a, T b) { return at::logical_or(a, b); };
      return [](T a, T b) { return a + b; };
    case ReduceOp::PRODUCT:
      return [](T a, T b) { return a * b; };
    case ReduceOp::MIN:
    case ReduceOp::MAX:
      if (at::isComplexType(dtype)) return nullptr;
      if (op == ReduceOp::MIN) return [](T a, T b) { return at::minimum(a, b); };
      return [](T a, T b) { return at::maximum(a, b); };
    default:
      if (!is_integer(dtype)) return nullptr;
      if (op == ReduceOp::BAND) return [](T a, T b) { return at::bitwise_and(a, b); };
      if (op == ReduceOp::BOR) return [](T a, T b) { return at::bitwise_or(a, b); };
      return [](T a, T b) { return at::bitwise_xor(a, b); };
  }
}

std::optional<at::Tensor> expected(RedOpType op, const Tensors& xs) {
  const auto step = step_of(op, xs[0].scalar_type());
  if (!step) return std::nullopt;
  at::Tensor result = xs[0].clone();
  for (size_t i = 1; i < xs.size(); ++i) result = step(result, xs[i]);
  if (op != ReduceOp::AVG) return result;
  if (is_integer(xs[0].scalar_type())) return result.div(int64_t(xs.size()), "trunc");
  return result / int64_t(xs.size());
}

const std::vector<RedOpType> kOps = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT, ReduceOp::MIN,
                                     ReduceOp::MAX, ReduceOp::BAND, ReduceOp::BOR,     ReduceOp::BXOR};

// What a backend does not have although it means something.
bool refuses(const std::string& backend, RedOpType op, at::ScalarType dtype) {
  if (backend != "gloo") return false;
  (void)op;
  (void)dtype;
  return false;
}

std::string label(RedOpType op, at::ScalarType dtype, int64_t size) {
  return c10::str(to_string(op), " of ", c10::toString(dtype), " x ", size);
}

void expect_reduced(const at::Tensor& actual, const at::Tensor& value, RedOpType op, const std::string& what) {
  if (op == ReduceOp::AVG) return expect_close(actual, value, what);
  expect_equal(actual, value, what);
}

void all_reduce_now(const Group& g, at::Tensor& x, const ReduceOp& op) {
  Tensors tensors{x};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  g->allreduce(tensors, options)->wait();
}

// Gloo finds out on its own thread, which ends the group: it gets one to spend.
void expect_refused(const std::string& backend, const Group& g, RedOpType op, at::ScalarType dtype) {
  const Group spent = backend == "gloo" ? sibling(g, backend) : g;
  at::Tensor x = sample({17}, g->getRank(), dtype);
  EXPECT_ANY_THROW(all_reduce_now(spent, x, op)) << label(op, dtype, 17);
}

TEST_P(ConformanceReductions, AllReduceEveryDtypeOpAndSize) {
  on_ranks([&](const Group& g) {
    for (at::ScalarType dtype : kDtypes) {
      for (RedOpType op : kOps) {
        if (!expected(op, {sample({1}, 0, dtype)}) || refuses(GetParam().backend, op, dtype)) {
          expect_refused(GetParam().backend, g, op, dtype);
          continue;
        }
        for (int64_t size : {0, 1, 17, 1000}) {
          const Tensors xs = samples({size}, g->getSize(), dtype);
          at::Tensor x = xs[g->getRank()].clone();
          all_reduce_now(g, x, op);
          expect_reduced(x, *expected(op, xs), op, label(op, dtype, size));
        }
      }
    }
  });
}

}  // namespace
}  // namespace serried
