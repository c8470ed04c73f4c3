// Reading arguments of a call by name.
#include "serried/spmd/op_call.h"

#include <gtest/gtest.h>

#include "tests/support/sample_call.h"

namespace serried::spmd {
namespace {

using serried::testing::SampleCall;

TEST(OpCall, ReadsArgumentsByName) {
  const SampleCall sample(
      "t::f(Tensor x, int[] dim, int n, float p, bool keepdim, str mode, Tensor? bias=None) -> Tensor",
      {torch::zeros({2, 3}), std::vector<int64_t>{-1, 0}, 7, 0.5, true, std::string("mean")});
  const OpCall call = sample.call();
  EXPECT_EQ(call.tensors().size(), 1u);
  EXPECT_EQ(call.tensor("x")->sizes, (c10::DimVector{2, 3}));
  EXPECT_EQ(call.tensor("x")->numel(), 6);
  EXPECT_EQ(call.tensor("bias"), nullptr);
  EXPECT_TRUE(call.has("bias"));
  EXPECT_FALSE(call.has("weight"));
  EXPECT_EQ(call.value("bias"), nullptr);
  EXPECT_EQ(call.integer("n"), 7);
  EXPECT_EQ(call.integer("missing", 3), 3);
  EXPECT_EQ(call.number("p"), 0.5);
  EXPECT_EQ(call.number("n"), 7.0);
  EXPECT_EQ(call.number("missing", 1.5), 1.5);
  EXPECT_TRUE(call.flag("keepdim"));
  EXPECT_TRUE(call.flag("missing", true));
  EXPECT_EQ(call.text("mode"), "mean");
  EXPECT_EQ(call.text("n"), "");
}

TEST(OpCall, DimsCountFromTheFrontAndNoneMeansAll) {
  const SampleCall sample("t::f(Tensor x, int[] dim, int one, int[] none=[], int[]? nothing=None) -> Tensor",
                          {torch::zeros({2, 3, 4}), std::vector<int64_t>{-1, 0}, -2});
  const OpCall call = sample.call();
  EXPECT_EQ(call.dims("dim", 3), (std::vector<int64_t>{2, 0}));
  EXPECT_EQ(call.dims("one", 3), (std::vector<int64_t>{1}));
  EXPECT_EQ(call.dims("none", 3), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(call.dims("nothing", 2), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(call.dims("*", 1), (std::vector<int64_t>{0}));
  EXPECT_EQ(call.integers("one"), (std::vector<int64_t>{-2}));
  EXPECT_FALSE(call.integers("nothing"));
  EXPECT_FALSE(call.integers("x"));
}

TEST(OpCall, ListsAndOutArguments) {
  const SampleCall sample("t::f(Tensor?[] xs, *, Tensor(a!) out) -> Tensor(a!)",
                          {c10::List<std::optional<at::Tensor>>({std::nullopt, torch::zeros({2})}), torch::zeros({2})});
  const OpCall call = sample.call();
  ASSERT_EQ(call.tensors().size(), 1u);
  EXPECT_EQ(call.tensor(0).list_index, 1);
  EXPECT_EQ(call.tensor("xs"), nullptr);
  EXPECT_TRUE(call.has_out());
}

TEST(OpCall, OfAStackIsTheCallOnTop) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_dropout", "");
  const at::Tensor x = torch::ones({3});
  const torch::jit::Stack stack{"something below", x, 0.25, c10::IValue()};
  const OpCall call(op, stack);
  EXPECT_EQ(call.name(), "aten::native_dropout");
  EXPECT_EQ(call.arguments().size(), 3u);
  EXPECT_TRUE(call.argument(0).toTensor().is_same(x));
  EXPECT_TRUE(call.tensor_value("input").is_same(x));
  EXPECT_FALSE(call.tensor_value("mask").defined());
  EXPECT_EQ(call.number("p"), 0.25);
  EXPECT_EQ(call.optional<double>("p"), 0.25);
  EXPECT_EQ(call.optional<bool>("train"), std::nullopt);
  EXPECT_TRUE(call.flag("train", true));
  EXPECT_FALSE(call.has_out());
  EXPECT_TRUE(call.tensors().empty());
}

}  // namespace
}  // namespace serried::spmd
