// Graphs keep how DTensor arguments and results lie on their meshes, in text and in files.
#include "serried/graph/dtensor_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include <filesystem>

#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/graph/replay/program.h"
#include "serried/graph/text/serialize.h"
#include "serried/tensor/dtensor.h"
#include "tests/graph/text/sample_graph.h"
#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::graph {
namespace {

using serried::testing::error_text;
using serried::testing::iota;
using serried::testing::place;
using serried::testing::sample_graph;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

// Every rank of four has its own mesh.
void on_named_mesh(const std::function<void(const DeviceMesh&)>& fn) {
  run_ranks(4, [&](const Group& group) { fn(init_device_mesh("cpu", {2, 2}, {"dp", "tp"}, {.group = group})); });
}

template <class Fn>
Graph graph_of(Fn fn, const Tensors& inputs, CaptureOptions options = {}) {
  const torch::NoGradGuard no_grad;
  auto step = capture(std::move(fn), std::move(options));
  for (int i = 0; i < 3; ++i) step(inputs);
  return step.graph();
}

void expect_same_layouts(const Graph& actual, const Graph& expected) {
  EXPECT_EQ(actual.input_layouts(), expected.input_layouts());
  EXPECT_EQ(actual.output_layouts(), expected.output_layouts());
  EXPECT_EQ(actual.to_string(), expected.to_string());
  EXPECT_EQ(to_text(actual), to_text(expected));
}

Graph loaded_copy(const Graph& graph, int64_t rank) {
  const std::string path = c10::str(::testing::TempDir(), "serried_spread_", ::getpid(), "_", rank);
  save(graph, path, {.persistent_data = true});
  Graph loaded = load(path);
  std::filesystem::remove(path);
  return loaded;
}

TEST(GraphDTensorLayout, IsThatOfTheArgumentsAndResults) {
  on_named_mesh([](const DeviceMesh& mesh) {
    const at::Tensor x = place(iota({7, 5}), mesh, {Shard(0), Replicate()});
    const at::Tensor w = place(iota({5, 3}), mesh, {Replicate(), Shard(1)});
    const auto product = [](const Tensors& in) { return Tensors{in[0].mm(in[2]), in[1].neg(), in[0].t().neg()}; };
    const Graph g = graph_of(product, {x, iota({2}), w});

    const DTensorLayout first{.placements = {Shard(0), Replicate()},
                              .sizes = {7, 5},
                              .strides = {5, 1},
                              .mesh_shape = {2, 2},
                              .mesh_names = {"dp", "tp"},
                              .mesh_ranks = {0, 1, 2, 3},
                              .group = mesh.root_group()->getGroupName()};
    DTensorLayout second = first;
    second.placements = {Replicate(), Shard(1)};
    second.sizes = {5, 3};
    second.strides = {3, 1};
    EXPECT_EQ(g.input_layouts(), (DTensorLayouts{{0, first}, {2, second}}));

    DTensorLayout both = first;
    both.placements = {Shard(0), Shard(1)};
    both.sizes = {7, 3};
    both.strides = {3, 1};
    DTensorLayout turned = first;
    turned.placements = {Shard(1), Replicate()};
    turned.sizes = {5, 7};
    turned.strides = c10::DimVector(product({x, x, w})[2].strides());
    EXPECT_EQ(g.output_layouts(), (DTensorLayouts{{0, both}, {2, turned}}));
    expect_same_layouts(parse_graph(to_text(g)), g);
    expect_same_layouts(loaded_copy(g, mesh.get_rank()), g);
  });
}

TEST(GraphDTensorLayout, StandsInTheSignatureAndBehindReturn) {
  on_named_mesh([](const DeviceMesh& mesh) {
    const at::Tensor x = place(iota({7, 5}), mesh, {Shard(0), Partial()});
    const Graph g = graph_of([](const Tensors& in) { return in[0].neg(); }, {x, iota({2})}, {.passes = {}});
    const int rows = mesh.get_local_rank(0) == 0 ? 4 : 3;
    EXPECT_EQ(g.to_string(), c10::str("graph(%in0: f64[", rows,
                                      ", 5] = S0 P of [7, 5] on mesh dp=2 tp=2, %in1: f64[2]):\n  %2 = neg(%in0)  # "
                                      "f64[",
                                      rows, ", 5]\n  return %2 = S0 P of [7, 5] on mesh dp=2 tp=2\n"));
  });
  serried::testing::on_mesh({3}, [](const DeviceMesh& mesh) {
    const Graph g = graph_of([](const Tensors& in) { return in[0].sum(); }, {place(iota({7, 5}), mesh, {Shard(0)})});
    EXPECT_EQ(g.output_layouts().at(0).to_string(), "P of [] on mesh 3");
    EXPECT_TRUE(g.output_layouts().at(0).mesh_names.empty());
    expect_same_layouts(parse_graph(to_text(g)), g);
  });
}

TEST(GraphDTensorLayout, KeepsEveryPlacementOfACapturedFunction) {
  const auto is_bitwise = [](const Placement& p) { return p.is_partial() && p.reduce() >= ReduceKind::band; };
  const Placements others = {Replicate(),        Shard(1),        StridedShard(0, 2), StridedShard(1, 3),
                             Partial("sum"),     Partial("avg"),  Partial("min"),     Partial("max"),
                             Partial("product"), Partial("band"), Partial("bor"),     Partial("bxor")};
  on_named_mesh([&](const DeviceMesh& mesh) {
    Tensors inputs;
    for (const Placement& placement : others) {
      const Placements placements = {placement, Shard(0)};
      const Sizes sizes = {7, 5};
      const c10::DimVector part = local_sizes(sizes, placements, mesh.position());
      inputs.push_back(DTensor::from_local(at::ones(part, is_bitwise(placement) ? at::kLong : at::kFloat), mesh,
                                           placements, {.shape = sizes, .stride = Sizes{5, 1}}));
    }
    const Graph g = graph_of([](const Tensors& in) { return in; }, inputs);
    for (size_t i = 0; i < others.size(); ++i) {
      EXPECT_EQ(g.input_layouts().at(i).placements, (Placements{others[i], Shard(0)}));
      EXPECT_EQ(g.output_layouts().at(i), g.input_layouts().at(i));
    }
    expect_same_layouts(parse_graph(to_text(g)), g);
    expect_same_layouts(loaded_copy(g, mesh.get_rank()), g);
  });
}

TEST(GraphDTensorLayout, SubMeshesKeepTheirRanks) {
  on_named_mesh([](const DeviceMesh& mesh) {
    const DeviceMesh tp = mesh["tp"];
    const Graph g = graph_of([](const Tensors& in) { return in[0] * 2; }, {place(iota({3}), tp, {Shard(0)})});
    const int64_t begin = 2 * mesh.get_local_rank("dp");
    const DTensorLayout& layout = g.output_layouts().at(0);
    EXPECT_EQ(layout.mesh_ranks, (std::vector<int64_t>{begin, begin + 1}));
    EXPECT_EQ(layout.mesh_names, std::vector<std::string>{"tp"});
    expect_same_layouts(parse_graph(to_text(g)), g);
  });
}

TEST(GraphDTensorLayout, SaysEnoughToPlaceResultsOfALoadedGraph) {
  on_named_mesh([](const DeviceMesh& mesh) {
    const at::Tensor whole = iota({7, 5});
    const DTensor x = place(whole, mesh, {Shard(0), Shard(1)});
    const auto doubled = [](const Tensors& in) { return in[0] * 2; };
    const Graph g = loaded_copy(graph_of(doubled, {x}), mesh.get_rank());
    Program program(g, {});
    program.run({x.to_local()});
    const DTensorLayout& layout = g.output_layouts().at(0);
    const DTensor result = DTensor::from_local(program.value(g.outputs()[0]), mesh, layout.placements,
                                               {.shape = Sizes(layout.sizes.begin(), layout.sizes.end()),
                                                .stride = Sizes(layout.strides.begin(), layout.strides.end())});
    EXPECT_TRUE(at::equal(result.full_tensor(), whole * 2));
  });
}

TEST(GraphDTensorLayout, OfATrainingStepOutlivesPassesAndHiddenGradients) {
  on_named_mesh([](const DeviceMesh& mesh) {
    at::Tensor w = place(iota({5, 3}) / 10, mesh, {Replicate(), Shard(1)}).detach().requires_grad_();
    const DTensor x = place(iota({7, 5}), mesh, {Shard(0), Replicate()});
    std::vector<Pass> passes = passes::defaults();
    passes.insert(passes.begin(), {passes::bucket_collectives(), passes::overlap()});
    auto step = capture(
        [&](const at::Tensor& input) {
          at::Tensor loss = input.mm(w).square().sum();
          loss.backward();  // adds to the gradient of the call before, which is a hidden input
          return loss;
        },
        {.passes = passes});
    for (int i = 0; i < 5; ++i) step(x);
    EXPECT_GT(step.graph().inputs().size(), 1);
    ASSERT_EQ(step.graph().input_layouts().size(), 1);
    EXPECT_EQ(step.graph().input_layouts().at(0).placements, x.placements());
    EXPECT_TRUE(step.graph().output_layouts().at(0).sizes.empty());
    expect_same_layouts(parse_graph(to_text(step.graph())), step.graph());
  });
}

TEST(GraphDTensorLayout, IsWrittenInFull) {
  Graph g = sample_graph();
  g.output_layouts()[0] = {.placements = {StridedShard(0, 2), Partial("max")},
                           .sizes = {7, 2},
                           .strides = {1, 7},
                           .mesh_shape = {2, 1},
                           .mesh_names = {"d\"p", "tp"},
                           .mesh_ranks = {3, 1},
                           .group = "threads/1"};
  g.output_layouts()[9] = {};  // of a result that is no more
  EXPECT_THAT(to_text(g), HasSubstr("outputs [%5]\n"
                                    "output 0 placed \"S0/2 P(max)\" of [7, 2] strides [1, 7] on [2, 1] names "
                                    "[\"d\\\"p\", \"tp\"] ranks [3, 1] group \"threads/1\"\nend\n"));
  const Graph read = parse_graph(to_text(g));
  EXPECT_EQ(read.output_layouts().size(), 1);
  EXPECT_EQ(read.output_layouts().at(0), g.output_layouts().at(0));
}

// What parse_graph says of a text with this line behind its one input.
std::string error_of(const std::string& line) {
  const std::string text = "serried graph 2\nvalue %0 input f32[2]\ninputs [%0]\n" + line + "\noutputs []\nend\n";
  const std::string error = error_text<c10::ValueError>([&] { parse_graph(text); });
  const std::string fix = "\n  fix: give it what serried::graph::to_text wrote, unchanged and whole";
  return error.ends_with(fix) ? error.substr(0, error.size() - fix.size()) : error;
}

TEST(GraphDTensorLayout, OfADamagedTextIsRefused) {
  const std::string mesh = " on [2, 2] ranks [0, 1, 2, 3]";
  EXPECT_EQ(error_of("input 0 placed \"S0 R\" of [7]" + mesh), "no error");
  EXPECT_EQ(error_of("input 0 placed \"S0 Q\" of [7]" + mesh), "[graph] line 4: \"S0 Q\" are no placements");
  EXPECT_EQ(error_of("input 0 placed \"P(most) R\" of [7]" + mesh), "[graph] line 4: \"P(most) R\" are no placements");
  EXPECT_EQ(error_of("input 0 placed \"S0\" of [7]" + mesh),
            "[graph] line 4: 1 placements \"S0\" for a mesh of shape [2, 2]");
  EXPECT_EQ(error_of("input 0 placed \"S0 S1\" of [7]" + mesh),
            "[graph] line 4: placement S1 for a tensor of shape [7]");
  EXPECT_EQ(error_of("input 0 placed \"S0 R\" of [7] strides [1, 1]" + mesh),
            "[graph] line 4: 2 strides for a tensor of shape [7]");
  EXPECT_EQ(error_of("input 0 placed \"S0 R\" of [7] on [2, 2] names [\"dp\"] ranks [0, 1, 2, 3]"),
            "[graph] line 4: 1 names [\"dp\"] for a mesh of shape [2, 2]");
  for (const std::string shape : {"[2, 3]", "[4, 4611686018427387904]", "[0, 2]", "[-2, -2]"}) {
    EXPECT_EQ(error_of("input 0 placed \"S0 R\" of [7] on " + shape + " ranks [0, 1, 2, 3]"),
              "[graph] line 4: 4 ranks for a mesh of shape " + shape);
  }
  EXPECT_EQ(error_of("input 1 placed \"S0 R\" of [7]" + mesh), "[graph] line 4: there is no input 1");
  EXPECT_EQ(error_of("output 0 placed \"S0 R\" of [7]" + mesh), "[graph] line 4: there is no output 0");
  EXPECT_EQ(error_of("input 0 placed \"S0 R\" of [7]" + mesh + "\ninput 0 placed \"R R\" of [7]" + mesh),
            "[graph] line 5: input 0 is placed twice");
  EXPECT_EQ(error_of("input 0 placed \"S0 R\" of [7] on [2, 2]"), "[graph] line 4: expected ranks before \"\"");
}

}  // namespace
}  // namespace serried::graph
