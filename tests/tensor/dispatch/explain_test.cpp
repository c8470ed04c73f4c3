// explain: the text names rule, rows, the row taken, what moves and how results lie.
#include "serried/tensor/dispatch/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/groups/ranks.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dispatch/op_by_name.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried {
namespace {

using testing::error_text;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::on_mesh;

TEST(Explain, ShowsRuleFactorsRowsAndTheOneTaken) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const DTensor a = distribute_tensor(at::ones({8, 16}), mesh, {Shard(0), Replicate()});
    const DTensor b = distribute_tensor(at::ones({16, 4}), mesh, {Replicate(), Shard(1)});
    const std::string text = explain("aten::mm", {a, b});
    EXPECT_THAT(text, HasSubstr("  self: f32[8,16] S0 R\n  mat2: f32[16,4] R S1\nrule: mk, kn -> mn\n"));
    EXPECT_THAT(text, HasSubstr("factors: m=8 k=16 n=4\n"));
    EXPECT_THAT(text, HasSubstr("  * S0 R -> S0"));
    EXPECT_THAT(text, HasSubstr("  * R S1 -> S1"));
    EXPECT_THAT(text, HasSubstr("chosen: nothing moves"));
    EXPECT_THAT(text, HasSubstr("sent by each rank: 0 B\nresult: S0 S1\n"));
  });
}

TEST(Explain, SaysWhatMovesAndTheCallDoesIt) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor a = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)});
    const DTensor b = distribute_tensor(at::ones({4, 6}), mesh, {Shard(1)});
    EXPECT_THAT(explain("aten::add", {a, b}), HasSubstr("all_to_all over axis 0, 24 B\nsent by each rank: 24 B\n"));
    CommDebugMode comm;
    explain("aten::add", {a, b});
    EXPECT_EQ(comm.count(), 0);
    EXPECT_EQ(DTensor(a + b).placements().size(), 1u);
    EXPECT_EQ(comm.count("all_to_all"), 1);
  });
}

TEST(Explain, PromisesThePlacementsThatTheCallGives) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)});
    const torch::jit::Stack stack{at::Tensor(x), c10::List<int64_t>({0}), false, c10::IValue()};
    EXPECT_THAT(explain("aten::sum.dim_IntList", stack), HasSubstr("result: P\n"));
    EXPECT_EQ(DTensor(x.sum(0)).placements(), Placements{Partial("sum")});
  });
}

TEST(Explain, AWrittenInputStaysWhereItIs) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(at::ones({4, 6}), mesh, {Replicate()});
    const DTensor y = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)});
    EXPECT_THAT(explain("aten::add_", {x, y}), HasSubstr("result: R\n"));
  });
}

TEST(Explain, ListsOfForeachAreExplainedByTheirFirstElement) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4}), mesh, {Shard(0)});
    const torch::jit::Stack stack{std::vector<at::Tensor>{x, x}, at::Scalar(2)};
    const std::string text = explain("aten::_foreach_mul_.Scalar", stack);
    EXPECT_THAT(text, HasSubstr("each element of the lists is a call of its own; this is the first\n"));
    EXPECT_THAT(text, HasSubstr("result: S0\n"));
  });
}

TEST(Explain, TensorsAreSharedOutOverLists) {
  const c10::FunctionSchema& schema = detail::find_op_for("aten::_foreach_add.List", 4).schema();
  const torch::jit::Stack stack = detail::fill_arguments(schema, {at::ones(1), at::ones(2), at::ones(3), at::ones(4)});
  EXPECT_EQ(stack[0].toTensorVector().size(), 2u);
  EXPECT_EQ(stack[1].toTensorVector()[0].size(0), 3);
}

TEST(Explain, CompositesNameTheirParts) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)});
    const at::Tensor w = distribute_tensor(at::ones({5, 6}), mesh, {Replicate()});
    const std::string ways =
        ": explain those; CommDebugMode({.ops = true}) shows them in a real call, which may choose by device\n";
    EXPECT_EQ(explain("aten::softmax.int", torch::jit::Stack{x, 1, c10::IValue()}),
              "aten::softmax.int decomposes into aten::_softmax" + ways);
    EXPECT_EQ(explain("aten::matmul", {x, w.t()}), "aten::matmul decomposes into aten::mm" + ways);
    EXPECT_EQ(explain("aten::vstack", torch::jit::Stack{std::vector<at::Tensor>{x, x}}),
              "aten::vstack decomposes into aten::cat" + ways);
    EXPECT_EQ(explain("aten::dropout", torch::jit::Stack{x, 0.5, false}), "aten::dropout runs no op on these\n");
  });
}

TEST(Explain, CompositesNameTheirPartsAsFarAsTheyRunWithoutData) {
  on_mesh({2}, [](const DeviceMesh& mesh) {
    const at::Tensor x = distribute_tensor(at::ones({4, 6}), mesh, {Shard(0)});
    EXPECT_THAT(explain("aten::argwhere", {x}),
                ::testing::StartsWith("aten::argwhere decomposes into aten::nonzero and what follows: "));
    const torch::jit::Stack stack{x, std::vector<int64_t>{6}, c10::IValue(), c10::IValue(), 1e-5, true};
    EXPECT_THAT(explain("aten::layer_norm", stack),
                HasSubstr(" decomposes into aten::native_layer_norm and what follows"));
  });
}

TEST(Explain, NeedsNoRanks) {
  const c10::OperatorHandle op = detail::find_op_for("aten::mm", 2);
  const auto meta = at::TensorOptions().device(at::kMeta);
  const torch::jit::Stack stack =
      detail::fill_arguments(op.schema(), {at::empty({8, 4}, meta), at::empty({4, 2}, meta)});
  const spmd::Call call(op.schema(), stack, {{0, -1, {8, 4}, {4, 1}, at::kFloat}, {1, -1, {4, 2}, {2, 1}, at::kFloat}});
  const std::string text = explain(call, {{Shard(1)}, {Shard(0)}}, {.shape = {4096}, .names = {"tp"}});
  EXPECT_THAT(text, HasSubstr("axis 0 \"tp\" (4096 ranks): S1 S0\n"));
  EXPECT_THAT(text, HasSubstr("result: P\n"));
}

TEST(Explain, MistakesSayWhatToPass) {
  EXPECT_THAT(error_text<c10::ValueError>([] { detail::find_op_for("aten::no_such_op", 1); }),
              HasSubstr("there is no op \"aten::no_such_op\"\n  fix: pass a full name such as aten::mm"));
  EXPECT_THAT(error_text<c10::ValueError>([] { detail::find_op_for("aten::mm.nope", 1); }),
              HasSubstr("no overload of aten::mm is called \"nope\"; known: aten::mm"));
  EXPECT_THAT(error_text<c10::ValueError>([] {
                explain("aten::mm", {at::ones({2, 2}), at::ones({2, 2})});
              }),
              HasSubstr("no argument of aten::mm is a DTensor"));
  EXPECT_THAT(error_text<c10::ValueError>([] {
                explain("aten::_softmax", {at::ones({2, 2})});
              }),
              HasSubstr("argument \"dim\" of aten::_softmax"));
  EXPECT_THAT(error_text<c10::ValueError>([] {
                explain("aten::mm", torch::jit::Stack{at::ones({2, 2})});
              }),
              HasSubstr("takes 2 arguments, not 1"));
}

}  // namespace
}  // namespace serried
