// Pictures of graphs.
#include "serried/graph/text/view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/graph/text/sample_graph.h"

namespace serried::graph {
namespace {

using serried::testing::sample_graph;
using ::testing::HasSubstr;

TEST(GraphView, DrawsDot) {
  EXPECT_EQ(to_dot(sample_graph()),
            "digraph step {\n"
            "  node [shape=box, fontname=monospace];\n"
            "  edge [fontname=monospace, fontsize=9];\n"
            "  v0 [shape=oval, label=\"%x: f32[4, 3]\"];\n"
            "  v1 [shape=oval, label=\"%p1: f32[3, 2]\"];\n"
            "  v2 [shape=oval, label=\"%c2: f32[]\"];\n"
            "  n0 [label=\"mm\", tooltip=\"%3 = mm(%x, %p1)  # f32[4, 2]\"];\n"
            "  n1 [label=\"mul\", tooltip=\"%4 = mul(%3, %c2)  # f32[4, 2]\"];\n"
            "  n2 [label=\"all_reduce\\n32 B over \\\"dp\\\"\", tooltip=\"%5 = all_reduce(%4, group=\\\"dp\\\", "
            "op=sum)  # f32[4, 2], 32 B\", style=filled, fillcolor=\"#f4a261\"];\n"
            "  n3 [label=\"t\", tooltip=\"%6 = t(%x)  # f32[3, 4]\"];\n"
            "  n4 [label=\"mm\", tooltip=\"%7 = mm(%6, %5)  # f32[3, 2]\"];\n"
            "  n5 [label=\"add_\", tooltip=\"add_(%p1, %7, alpha=-0.1)\"];\n"
            "  v0 -> n0;\n"
            "  v1 -> n0;\n"
            "  n0 -> n1 [label=\"f32[4, 2]\"];\n"
            "  v2 -> n1;\n"
            "  n1 -> n2 [label=\"f32[4, 2]\"];\n"
            "  v0 -> n3;\n"
            "  n3 -> n4 [label=\"f32[3, 4]\"];\n"
            "  n2 -> n4 [label=\"f32[4, 2]\"];\n"
            "  v1 -> n5;\n"
            "  n4 -> n5 [label=\"f32[3, 2]\"];\n"
            "}\n");
}

TEST(GraphView, DrawsAGraphOfNothing) {
  EXPECT_THAT(to_dot({}), HasSubstr("digraph step"));
}

}  // namespace
}  // namespace serried::graph
