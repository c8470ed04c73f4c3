// The page of a graph, as far as it can be judged without a browser: what it holds, and that it holds nothing else.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "serried/graph/capture.h"
#include "serried/graph/text/report.h"
#include "serried/graph/text/serialize.h"
#include "serried/graph/text/view.h"
#include "serried/parallel/ddp/ddp.h"
#include "tests/graph/text/sample_graph.h"
#include "tests/support/fake_group.h"

namespace serried::graph {
namespace {

using nlohmann::json;
using serried::testing::f32_meta;
using serried::testing::fake_group;
using serried::testing::group_argument;
using serried::testing::op_named;
using serried::testing::reduce_op;
using serried::testing::sample_graph;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::string_view kDataBegin = "<script type=\"application/json\" id=\"graph\">", kDataEnd = "</script>";

// Where a browser would find it: up to the first end of a script.
json data_of(const std::string& page) {
  const size_t begin = page.find(kDataBegin) + kDataBegin.size();
  return json::parse(page.substr(begin, page.find(kDataEnd, begin) - begin));
}

size_t count_of(const std::string& text, std::string_view word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

TEST(GraphPage, HoldsOpsWithTheirPhasesAndBytes) {
  Graph g = sample_graph();
  g.nodes()[0].phase = Phase::forward;
  g.nodes()[2].phase = Phase::backward;
  const json data = data_of(to_html(g));
  ASSERT_EQ(data["nodes"].size(), 6);
  EXPECT_EQ(data["nodes"][0], json::object({{"op", "mm"},
                                            {"name", "aten::mm"},
                                            {"phase", "forward"},
                                            {"line", "%3 = mm(%x, %p1)  # f32[4, 2]"},
                                            {"in", {0, 1}},
                                            {"out", {3}},
                                            {"written", 4 * 4 * 2}}));
  EXPECT_EQ(data["nodes"][2], json::object({{"op", "all_reduce"},
                                            {"name", "serried::all_reduce"},
                                            {"phase", "collective"},
                                            {"during", "backward"},
                                            {"line", "%5 = all_reduce(%4, group=\"dp\", op=sum)  # f32[4, 2], 32 B"},
                                            {"in", {4}},
                                            {"out", {5}},
                                            {"written", 4 * 4 * 2},
                                            {"given", 4 * 4 * 2},
                                            {"group", "dp"}}));
  EXPECT_EQ(data["nodes"][3]["written"], 0);  // a view
  EXPECT_EQ(data["nodes"][5]["out"], json::array({1}));
  EXPECT_EQ(data["values"][0],
            json::object({{"name", "%x"}, {"kind", "input"}, {"shape", "f32[4, 3]"}, {"bytes", 48}}));
  EXPECT_EQ(data["values"][5]["role"], "result of the function");
  EXPECT_EQ(data["values"][7]["role"], "gradient of a parameter");
}

TEST(GraphPage, HoldsTheSumsOfTheReport) {
  const Graph g = sample_graph();
  const json data = data_of(to_html(g));
  EXPECT_EQ(data["phases"], json::array({{{"phase", "collective"}, {"ops", 1}, {"written", 32}},
                                         {{"phase", "other"}, {"ops", 5}, {"written", 32 + 32 + 24 + 24}}}));
  EXPECT_EQ(data["memory"], json::array({{{"what", "persistent"}, {"bytes", 24}},
                                         {{"what", "constants"}, {"bytes", 4}},
                                         {{"what", "inputs"}, {"bytes", 48}},
                                         {{"what", "arena"}, {"bytes", 0}},
                                         {{"what", "computed, at its peak"}, {"bytes", 64}}}));
  EXPECT_EQ(data["collectives"], 1);
  EXPECT_EQ(data["given"], 32);
  EXPECT_EQ(data["peak"], 1);
  EXPECT_EQ(data["live"].size(), 6);
  EXPECT_EQ(data["live"][1], 64);
  EXPECT_THAT(to_html(g), HasSubstr("computed, at its peak           64 B\n"));  // also without a script
}

TEST(GraphPage, TellsFromWhereToWhereACollectiveIsOnItsWay) {
  Graph g;
  const ValueId x = g.add_value({.kind = ValueKind::persistent, .meta = f32_meta({5})});
  const ValueId y = g.add_value({.meta = f32_meta({5})}), work = g.add_value({.kind = ValueKind::work});
  g.add_node({op_named("serried::start_all_reduce_"),
              {Argument::of_value(x), group_argument("dp"), reduce_op(c10d::ReduceOp::SUM)},
              {{work}}});
  g.add_node({op_named("aten::neg"), {Argument::of_value(y)}, {{y}}});
  g.add_node({op_named("serried::wait"), {Argument::of_value(work)}, {}});
  const json nodes = data_of(to_html(g))["nodes"];
  EXPECT_EQ(nodes[0]["until"], 2);
  EXPECT_EQ(nodes[0]["given"], 20);
  EXPECT_EQ(nodes[2]["phase"], "collective");
  EXPECT_FALSE(nodes[2].contains("given"));
  EXPECT_FALSE(nodes[1].contains("until"));
}

TEST(GraphPage, HoldsAStepOfADataParallelModule) {
  torch::nn::Linear net(5, 3);
  DistributedDataParallel ddp(net, {.process_group = fake_group(0, 4)});
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
  auto step = capture([&](const at::Tensor& x) {
    optimizer.zero_grad();
    at::Tensor loss = ddp(x).square().mean();
    loss.backward();
    optimizer.step();
    return loss;
  });
  for (int i = 0; i < 10 && step.replays() == 0; ++i) step(at::rand({2, 5}));
  const json data = data_of(to_html(step.graph()));
  EXPECT_EQ(data["nodes"].size(), step.graph().nodes().size());
  EXPECT_EQ(data["given"], 4 * (5 * 3 + 3));
  std::map<std::string, int64_t> ops, given;
  for (const json& node : data["nodes"]) {
    ++ops[node["phase"]];
    if (node.contains("given")) given[node["op"]] += node["given"].get<int64_t>();
  }
  EXPECT_EQ(given, (std::map<std::string, int64_t>{{"all_reduce", 4 * (5 * 3 + 3)}}));
  EXPECT_EQ(ops.count("other"), 0);
  ASSERT_EQ(data["phases"].size(), 4);
  for (const json& phase : data["phases"]) EXPECT_EQ(phase["ops"], ops[phase["phase"]]) << phase;
}

TEST(GraphPage, TakesNamesOfAnybodyAsText) {
  const std::string evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&\\";
  Graph g = sample_graph();
  g.value(0).name = evil;
  g.gradients()[0].parameter = evil;
  g.nodes()[2].arguments[1] = group_argument(evil);
  const std::string page = to_html(parse_graph(to_text(g)));
  EXPECT_EQ(count_of(page, "<script"), 2);
  EXPECT_EQ(count_of(page, "</script"), 2);
  EXPECT_THAT(page, Not(HasSubstr("<img")));
  const json data = data_of(page);
  EXPECT_EQ(data["values"][0]["name"], "%" + evil);
  EXPECT_EQ(data["nodes"][2]["group"], evil);
}

TEST(GraphPage, TakesNamesThatAreNoText) {
  Graph g = sample_graph();
  g.value(0).name = "a\xff\xfe";
  EXPECT_EQ(data_of(to_html(g))["values"][0]["name"], "%a\xef\xbf\xbd\xef\xbf\xbd");
}

TEST(GraphPage, LoadsNothing) {
  const std::string page = to_html(sample_graph());
  for (const char* word : {"http:", "https:", "src=", "@import", "url(", "fetch("}) {
    EXPECT_THAT(page, Not(HasSubstr(word)));
  }
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
}

// What texts of a graph could become markup by.
TEST(GraphPage, SetsTextsAsText) {
  const std::string page = to_html(sample_graph());
  for (const char* word : {"innerHTML", "outerHTML", "insertAdjacent", "document.write", " eval("}) {
    EXPECT_THAT(page, Not(HasSubstr(word)));
  }
}

TEST(GraphPage, IsThereForAGraphOfNothing) {
  const std::string page = to_html({});
  EXPECT_THAT(page, HasSubstr("<title>0 ops</title>"));
  const json data = data_of(page);
  EXPECT_EQ(data["nodes"], json::array());
  EXPECT_EQ(data["phases"], json::array());
  EXPECT_EQ(data["given"], 0);
}

TEST(GraphPage, GrowsWithTheGraphAndNoFaster) {
  const auto page_of = [](int64_t num_nodes) {
    Graph g;
    ValueId last = g.add_value({.kind = ValueKind::input, .meta = f32_meta({3})});
    for (int64_t i = 0; i < num_nodes; ++i) {
      const ValueId next = g.add_value({.meta = f32_meta({3})});
      g.add_node({op_named("aten::neg"), {Argument::of_value(last)}, {{next}}});
      last = next;
    }
    return to_html(g);
  };
  const int64_t empty = int64_t(page_of(0).size());
  const std::string page = page_of(10'000);
  EXPECT_EQ(data_of(page)["nodes"].size(), 10'000);
  EXPECT_LT(int64_t(page.size()) - empty, 11 * (int64_t(page_of(1000).size()) - empty));
}

}  // namespace
}  // namespace serried::graph
