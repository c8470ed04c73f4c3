// A program runs what was recorded, and keeps nothing longer than it has to.
#include "serried/graph/replay/program.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "tests/graph/passes/recorded.h"
#include "tests/support/errors.h"
#include "tests/support/fake_group.h"

namespace serried {
namespace {

using namespace serried::testing;

TEST(Program, RunsOpsWithListsAndUndefinedTensors) {
  const at::Tensor index = torch::tensor({2, 0});
  const Function fn = [&](const Tensors& in) -> Tensors {
    return {torch::cat({in[0], in[0].exp(), in[0]}, 1), in[0].index({torch::indexing::Slice(), index}),
            torch::layer_norm(in[0], {3})};
  };
  const Tensors in{torch::randn({2, 3})};
  expect_same_results(fn, record(fn, in), in);
}

TEST(Program, FreesMembersOfListsAfterTheirLastUse) {
  const Function fn = [](const Tensors& in) -> Tensors { return {torch::cat({in[0].exp(), in[0].sin()})}; };
  const Tensors in{torch::randn({3})};
  const Recorded recorded = record(fn, in);
  graph::Program program(recorded.graph, recorded.groups);
  program.run(in);
  for (graph::ValueId id : recorded.graph.nodes().back().arguments[0].ids) EXPECT_FALSE(program.value(id).defined());
  EXPECT_TRUE(program.value(recorded.graph.outputs()[0]).defined());
}

TEST(Program, AFailedRunLeavesNothing) {
  const Function fn = [](const Tensors& in) -> Tensors { return {in[0].exp().mm(in[1])}; };
  const Tensors in{torch::randn({2, 3}), torch::randn({3, 2})};
  const Recorded recorded = record(fn, in);
  graph::Program program(recorded.graph, recorded.groups);
  EXPECT_THROW(program.run({in[0], in[0]}), c10::Error);
  for (size_t id = 0; id < recorded.graph.values().size(); ++id) EXPECT_FALSE(program.value(int(id)).defined());
  testing::expect_equal(rerun(program, recorded, in)[0], fn(in)[0]);
}

TEST(Program, NeedsTheGroupsOfItsCollectives) {
  const Group group = fake_group(0, 2);
  const Recorded recorded =
      record([&](const Tensors& in) -> Tensors { return {all_reduce(in[0], group)}; }, {torch::randn({3})});
  EXPECT_EQ(error_text<c10::ValueError>([&] { graph::Program(recorded.graph, {}); }),
            "[graph] there is no group \"" + group->getGroupName() +
                "\" here\n  fix: give the program the groups that its collectives name");
}

}  // namespace
}  // namespace serried
