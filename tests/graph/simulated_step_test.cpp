// Captured steps as programs of simulated ranks: what is computed, started and waited for, in order.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/group.h"
#include "serried/graph/capture.h"
#include "tests/support/errors.h"
#include "tools/serried/graph_job.h"

namespace serried {
namespace {

using simulation::Action;
using simulation::Fitted;
using simulation::Kind;
using ::testing::HasSubstr;

/// 1 us per op, 1 ns per flop, nothing for bytes.
const simulation::Compute kOneEach{Fitted::exactly(1), Fitted::exactly(1), Fitted::exactly(0)};

template <class Fn, class... Args>
graph::Graph graph_of(Fn fn, const Args&... args) {
  auto step = capture(std::move(fn));
  for (int i = 0; i < 4; ++i) step(args...);
  return step.graph();
}

std::vector<Action> issues_of(const simulation::Program& program) {
  std::vector<Action> all;
  for (const Action& action : program) {
    if (action.kind == Action::Kind::issue) all.push_back(action);
  }
  return all;
}

TEST(SimulatedStep, ProductsOfMatricesCountTheirFlops) {
  const graph::Graph graph = graph_of([](const at::Tensor& a, const at::Tensor& b) { return at::mm(a, b); },
                                      at::ones({3, 5}), at::ones({5, 7}));
  const simulation::Program program = tools::program_of(graph, {{"dp", 2}}, {.compute = kOneEach});
  simulation::Time total = 0;
  for (const Action& action : program) total += action.time;
  EXPECT_EQ(total, simulation::time_of_us(1) + simulation::time_of_ns(2 * 3 * 5 * 7));
}

TEST(SimulatedStep, IsScaledToWhatWasMeasured) {
  const graph::Graph graph = graph_of([](const at::Tensor& a) { return at::mm(a, a).relu().sum(); }, at::ones({8, 8}));
  const simulation::Program program = tools::program_of(graph, {}, {.step_us = 500});
  double total = 0;
  for (const Action& action : program) total += simulation::to_us(action.time);
  EXPECT_NEAR(total, 500, 0.01);
}

TEST(SimulatedStep, CollectivesAreIssuedOnTheirAxisAndWaitedForWhereTheStepWaits) {
  const Group group = new_group("fake", {.rank = 0, .world_size = 4});
  const graph::Graph graph = graph_of(
      [&](const at::Tensor& a) {
        at::Tensor sum = at::mm(a, a);
        auto pending = async::all_gather(sum, group);
        const at::Tensor other = at::mm(a, a);
        return pending.wait().sum() + all_reduce(other, group).sum();
      },
      at::ones({16, 16}));
  const simulation::Program program =
      tools::program_of(graph, {{"tp", 2}, {group->getGroupName(), 4}}, {.compute = kOneEach});
  const std::vector<Action> issues = issues_of(program);
  ASSERT_EQ(issues.size(), 2u);
  for (const Action& issue : issues) {
    EXPECT_EQ(issue.axis, 1u);
    EXPECT_EQ(issue.call.bytes, 16 * 16 * 4);
    EXPECT_EQ(issue.call.element_bytes, 4);
  }
  EXPECT_EQ(issues[0].call.kind, Kind::all_gather);
  EXPECT_EQ(issues[1].call.kind, Kind::all_reduce);
  const auto at = [&](Action::Kind kind, size_t number) {
    for (size_t i = 0, seen = 0; i < program.size(); ++i) {
      const bool is_it = program[i].kind == kind && (kind != Action::Kind::wait || program[i].issued == number);
      if (is_it && (kind == Action::Kind::wait || seen++ == number)) return i;
    }
    ADD_FAILURE() << "there is none";
    return size_t(0);
  };
  // A product runs beside the gather; the all_reduce is waited for at once.
  bool computes_between = false;
  for (size_t i = at(Action::Kind::issue, 0); i < at(Action::Kind::wait, 0); ++i) {
    computes_between |= program[i].kind == Action::Kind::compute && program[i].time > simulation::time_of_us(5);
  }
  EXPECT_TRUE(computes_between);
  EXPECT_EQ(at(Action::Kind::wait, 1), at(Action::Kind::issue, 1) + 1);
}

TEST(SimulatedStep, WhatIsNotSimulatedIsNamed) {
  const Group group = new_group("fake", {.rank = 0, .world_size = 2});
  const graph::Graph reduced =
      graph_of([&](const at::Tensor& a) { return all_reduce(a, group).sum(); }, at::ones({16, 16}));
  const std::string unknown = testing::error_text<c10::ValueError>([&] {
    tools::program_of(reduced, {{"dp", 2}}, {.compute = kOneEach});
  });
  EXPECT_THAT(unknown, HasSubstr("the step calls all_reduce on the group \"" + group->getGroupName() +
                                 "\", which is no axis of the mesh: dp\n  fix: give the mesh an axis of that name"));
  graph::Graph sent = reduced;
  sent.nodes().clear();
  sent.add_node(graph::make_node("c10d::send", std::vector<graph::Argument>(4), {}));
  EXPECT_THAT(testing::error_text<c10::ValueError>([&] {
                tools::program_of(sent, {{"dp", 2}}, {.compute = kOneEach});
              }),
              HasSubstr("the step calls send, which is not simulated"));
}

}  // namespace
}  // namespace serried
