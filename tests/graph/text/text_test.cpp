// How graphs read.
#include "serried/graph/text/text.h"

#include <gtest/gtest.h>

#include <limits>

#include "tests/graph/text/sample_graph.h"

namespace serried::graph {
namespace {

using serried::testing::f32_meta;
using serried::testing::group_argument;
using serried::testing::op_named;
using serried::testing::reduce_op;
using serried::testing::sample_graph;

TEST(GraphText, ReadsLikeCode) {
  EXPECT_EQ(sample_graph().to_string(),
            "graph(%x: f32[4, 3], undefined):\n"
            "  persistent %p1: f32[3, 2]\n"
            "  constant %c2: f32[] = 0.5\n"
            "  %3 = mm(%x, %p1)  # f32[4, 2]\n"
            "  %4 = mul(%3, %c2)  # f32[4, 2]\n"
            "  %5 = all_reduce(%4, group=\"dp\", op=sum)  # f32[4, 2], 32 B\n"
            "  %6 = t(%x)  # f32[3, 4]\n"
            "  %7 = mm(%6, %5)  # f32[3, 2]\n"
            "  add_(%p1, %7, alpha=-0.1)\n"
            "  gradient of f32[3, 2] = %7\n"
            "  return %5\n");
}

TEST(GraphText, DeclaresTheMemoryOfBuffers) {
  Graph g;
  g.add_value({.kind = ValueKind::buffer, .meta = f32_meta({2, 8}), .arena_offset = 64});
  g.set_arena_bytes(2048);
  EXPECT_EQ(g.to_string(), "graph():\n  arena of 2.0 KiB\n  buffer %b0: f32[2, 8] at byte 64\n  return \n");
}

TEST(GraphText, NamesArgumentsFromTheFirstConstantOn) {
  Graph g;
  const ValueId x = g.add_value({.meta = f32_meta({5, 3})}), w = g.add_value({.meta = f32_meta({3})});
  const ValueId y = g.add_value({.meta = f32_meta({5, 3})}), mean = g.add_value({.meta = f32_meta({5, 1})});
  g.add_node({op_named("aten::native_layer_norm"),
              {Argument::of_value(x), Argument::of(std::vector<int64_t>{3}), Argument::of_value(w),
               Argument::of_value(kNoValue), Argument::of(1e-5)},
              {{y}, {mean}, {kNoValue}}});
  EXPECT_EQ(line_of(g, 0),
            "%2, %3 = native_layer_norm(%0, normalized_shape=[3], weight=%1, bias=undefined, eps=1e-05)"
            "  # f32[5, 3], f32[5, 1]");
}

TEST(GraphText, NamesWhatIsWritten) {
  Graph g;
  const ValueId x = g.add_value({.meta = f32_meta({2, 2})});
  const ValueId out = g.add_value({.kind = ValueKind::buffer, .meta = f32_meta({2, 2})});
  const Argument value = Argument::of_value(x);
  g.add_node({op_named("aten::mm", "out"), {value, value, Argument::of_value(out)}, {{out}}});
  EXPECT_EQ(line_of(g, 0), "mm(%0, %0, out=%b1)");
}

TEST(GraphText, LeavesOutWhatIsAsByDefault) {
  Graph g;
  const ValueId x = g.add_value({.meta = f32_meta({5})}), y = g.add_value({.meta = f32_meta({5})});
  g.add_node({op_named("aten::_to_copy"),
              {Argument::of_value(x), Argument::of(int64_t(at::kBFloat16)), Argument::of(c10::IValue()),
               Argument::of(at::Device(at::kCPU)), Argument::of(c10::IValue()), Argument::of(false),
               Argument::of(int64_t(at::MemoryFormat::Preserve))},
              {{y}}});
  EXPECT_EQ(line_of(g, 0), "%1 = _to_copy(%0, dtype=bf16, device=cpu, memory_format=preserve)  # f32[5]");
}

TEST(GraphText, CallsCollectivesTheSameWhereverTheyComeFrom) {
  Graph g;
  const ValueId x = g.add_value({.kind = ValueKind::persistent, .meta = f32_meta({6, 2})});
  const ValueId whole = g.add_value({.kind = ValueKind::persistent, .meta = f32_meta({12, 2})});
  const ValueId work = g.add_value({.kind = ValueKind::work});
  g.add_node({op_named("serried::all_reduce_"),
              {Argument::of_value(x), group_argument("world"), reduce_op(c10d::ReduceOp::MAX)},
              {}});
  g.add_node({op_named("c10d::allreduce_"),
              {Argument::of_values({x}), group_argument("world"), reduce_op(c10d::ReduceOp::AVG),
               Argument::of(c10::IValue()), Argument::of(true), Argument::of(-1)},
              {{x}, {work}}});
  g.add_node({op_named("serried::wait"), {Argument::of_value(work)}, {}});
  g.add_node({op_named("serried::all_gather_into"),
              {Argument::of_value(whole), Argument::of_value(x), group_argument("world")},
              {}});
  EXPECT_EQ(line_of(g, 0), "all_reduce_(%p0, group=\"world\", op=max)  # 48 B");
  EXPECT_EQ(line_of(g, 1), "%w2 = all_reduce_([%p0], group=\"world\", reduce_op=avg, sparse_indices=none)  # 48 B");
  EXPECT_EQ(line_of(g, 2), "serried::wait(%w2)");
  EXPECT_EQ(line_of(g, 3), "all_gather(output=%p1, x=%p0, group=\"world\")  # 48 B");
}

TEST(GraphText, ShortensTheNamesOfHugeGroups) {
  Graph g;
  g.add_node({op_named("serried::barrier"), {group_argument("split:" + std::string(5000, '7') + "@0")}, {}});
  EXPECT_EQ(line_of(g, 0), "barrier(group=\"split:777777777777777777...7777777777777777777777@0\")");
}

TEST(GraphText, WritesNumbersToTheLastBit) {
  EXPECT_EQ(constant_text(0.1), "0.1");
  EXPECT_EQ(constant_text(1.0), "1.0");
  EXPECT_EQ(constant_text(1e300), "1e+300");
  EXPECT_EQ(constant_text(-0.0), "-0.0");
  EXPECT_EQ(constant_text(0.1 + 0.2), "0.30000000000000004");
  EXPECT_EQ(constant_text(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(constant_text(std::numeric_limits<double>::quiet_NaN()), "nan");
  EXPECT_EQ(constant_text(int64_t(7)), "7");
  EXPECT_EQ(constant_text(true), "true");
  EXPECT_EQ(constant_text(c10::IValue()), "none");
  EXPECT_EQ(constant_text("say \"hi\"\n"), R"("say \"hi\"\x0a")");
}

TEST(GraphText, WritesEveryReduceOp) {
  using c10d::ReduceOp;
  const std::pair<ReduceOp, const char*> ops[] = {
      {ReduceOp::SUM, "sum"}, {ReduceOp::AVG, "avg"},   {ReduceOp::PRODUCT, "product"},
      {ReduceOp::MIN, "min"}, {ReduceOp::MAX, "max"},   {ReduceOp::BAND, "band"},
      {ReduceOp::BOR, "bor"}, {ReduceOp::BXOR, "bxor"}, {c10d::makePreMulSum(0.25), "premul_sum(0.25)"}};
  for (const auto& [op, text] : ops) EXPECT_EQ(constant_text(reduce_op(op).constant), text);
}

}  // namespace
}  // namespace serried::graph
