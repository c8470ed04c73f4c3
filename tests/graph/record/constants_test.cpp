// Facts about groups, meshes and placements are constants of a captured graph, under guards where they can change.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/graph/capture.h"
#include "serried/graph/text/serialize.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/fake_group.h"
#include "tests/support/on_mesh.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using testing::fake_group;
using ::testing::HasSubstr;
using testing::on_mesh;
using testing::sibling;

constexpr int kCallsToReplay = 4;

/// Calls until it replays; every result equals that of `eager`.
template <class Step, class Eager>
void expect_replays_as(Step& step, const Eager& eager) {
  const int64_t replays = step.replays();
  for (int i = 0; i < kCallsToReplay; ++i) {
    const at::Tensor x = torch::full({3, 2}, 1.f + i);
    EXPECT_TRUE(at::equal(step(x), eager(x))) << "call " << i;
  }
  EXPECT_GT(step.replays(), replays) << step.last_recapture_reason();
}

TEST(CapturedConstants, RankSizeAndNameOfAGroupFold) {
  for (int world_size : {1, 2, 3}) {
    run_ranks(world_size, [&](const Group& group) {
      const auto eager = [&](const at::Tensor& x) {
        return x * group->getSize() + group->getRank() + (group->getGroupName().empty() ? 1 : 0);
      };
      auto step = capture(eager);
      expect_replays_as(step, eager);
      EXPECT_TRUE(step.graph().collectives().empty());
    });
  }
}

TEST(CapturedConstants, CollectivesNameTheirGroup) {
  run_ranks(2, [](const Group& group) {
    auto step = capture([&](const at::Tensor& x) { return all_reduce(x, group); });
    expect_replays_as(step, [](const at::Tensor& x) { return x * 2; });
    const auto& graph = step.graph();
    ASSERT_EQ(graph.collectives().size(), 1u);
    EXPECT_EQ(graph.nodes()[graph.collectives()[0]].group_name(), group->getGroupName());
  });
}

TEST(CapturedConstants, AGroupThatWasMadeAnewIsNoticed) {
  run_ranks(2, [](const Group& world) {
    Group group = sibling(world, "threads");
    const std::string name = group->getGroupName();
    const auto eager = [&](const at::Tensor& x) { return all_reduce(x, group); };
    auto step = capture(eager);
    expect_replays_as(step, eager);
    group.reset();
    group = sibling(world, "threads");
    expect_replays_as(step, eager);
    EXPECT_EQ(step.captures(), 2);
    EXPECT_EQ(step.last_recapture_reason(), c10::str("the group ", name, ", rank ", world->getRank(), "/2 is gone"));
  });
}

TEST(CapturedConstants, AnotherCurrentGroupIsNoticed) {
  run_ranks(2, [](const Group& world) {
    auto step = capture([](const at::Tensor& x) { return x + current_process_group()->getSize(); });
    expect_replays_as(step, [](const at::Tensor& x) { return x + 2; });
    const ProcessGroupGuard guard(fake_group(0, 64));
    expect_replays_as(step, [](const at::Tensor& x) { return x + 64; });
    EXPECT_THAT(step.last_recapture_reason(), HasSubstr("the current process group is another one"));
    EXPECT_EQ(step.captures(), 2);
  });
}

TEST(CapturedConstants, FactsOfAMeshFoldPerRank) {
  on_mesh({2, 2}, [](const DeviceMesh& mesh) {
    const auto eager = [&](const at::Tensor& x) {
      const std::vector<int64_t> coordinate = *mesh.get_coordinate();
      const int64_t sum = mesh.ndim() + mesh.size() + mesh.size(0) + 10 * coordinate[0] + 100 * mesh.get_local_rank(1) +
                          1000 * mesh.get_rank() + int64_t(mesh.contains_this_rank()) + mesh.flatten("all").size();
      return x + sum;
    };
    auto step = capture(eager);
    expect_replays_as(step, eager);
    const int64_t rank = mesh.get_rank();
    const int64_t folded = 2 + 4 + 2 + 10 * (rank / 2) + 100 * (rank % 2) + 1000 * rank + 1 + 4;
    EXPECT_THAT(step.graph().to_string(), HasSubstr(std::to_string(folded)));
  });
}

TEST(CapturedConstants, AMeshThatWasMadeAnewIsNoticed) {
  const Group group = fake_group(3, 8);
  using Question = int64_t (*)(const DeviceMesh&);
  const std::vector<Question> questions = {
      [](const DeviceMesh& mesh) { return mesh.size(); },
      [](const DeviceMesh& mesh) { return mesh.shape()[0]; },
      [](const DeviceMesh& mesh) { return mesh.get_local_rank(0); },
      [](const DeviceMesh& mesh) { return (*mesh.get_coordinate())[1]; },
      [](const DeviceMesh& mesh) { return mesh["tp"].get_local_rank(); },
      [](const DeviceMesh& mesh) { return int64_t(mesh.get_group("dp")->getRank()); },
  };
  for (const Question question : questions) {
    std::optional<DeviceMesh> mesh = init_device_mesh("cpu", {2, 4}, {"dp", "tp"}, {.group = group});
    const auto eager = [&](const at::Tensor& x) { return x + question(*mesh); };
    auto step = capture(eager);
    expect_replays_as(step, eager);
    mesh.reset();
    mesh = init_device_mesh("cpu", {4, 2}, {"dp", "tp"}, {.group = group});
    expect_replays_as(step, eager);
    EXPECT_THAT(step.last_recapture_reason(), ::testing::EndsWith(" is gone"));
  }
}

TEST(CapturedConstants, AnotherCurrentMeshIsNoticed) {
  const Group group = fake_group(0, 8);
  const DeviceMesh two = init_device_mesh("cpu", {2}, {}, {.group = group});
  const DeviceMesh eight = init_device_mesh("cpu", {8}, {}, {.group = group});
  auto step = capture([](const at::Tensor& x) { return x * current_mesh()->size(); });
  const auto call_under = [&](const DeviceMesh& mesh) {
    const MeshGuard guard(mesh);
    expect_replays_as(step, [&](const at::Tensor& x) { return x * mesh.size(); });
  };
  call_under(two);
  call_under(eight);
  EXPECT_THAT(step.last_recapture_reason(), HasSubstr("current mesh was"));
}

TEST(CapturedConstants, PlacementsAreMadeAndAskedInside) {
  on_mesh({3}, [](const DeviceMesh& mesh) {
    const auto eager = [&](const at::Tensor& x) {
      const Placement rows = Shard(0);
      const Placement target = rows.is_shard() && !rows.is_replicate() ? Replicate() : rows;
      return DTensor::from_local(x, mesh, {rows}).redistribute({target}).to_local();
    };
    auto step = capture(eager);
    expect_replays_as(step, [](const at::Tensor& x) { return at::cat({x, x, x}); });
    EXPECT_EQ(step.graph().count("all_gather"), 1) << step.graph().to_string();
  });
}

TEST(CapturedConstants, ASubMeshMadeInsideIsThatOfBackwardToo) {
  on_mesh({2, 2}, [](const DeviceMesh& root) {
    const DeviceMesh mesh(root.device_type(), root.ranks(), {"dp", "tp"}, {.group = root.root_group()});
    const at::Tensor weight = torch::ones({4, 2}).requires_grad_();
    const auto eager = [&](const at::Tensor& x) {
      weight.mutable_grad().reset();
      const DeviceMesh tp = mesh["tp"];
      const DTensor rows = DTensor::from_local(x, tp, {Shard(0)});
      const DTensor whole = DTensor::from_local(weight, tp, {Replicate()});
      at::mm(whole, rows.transpose(0, 1)).sum().backward();
      return weight.grad().clone();
    };
    auto step = capture(eager);
    // The gradient of each weight is the sum over the rows of both ranks: x is full of one number.
    expect_replays_as(step, [](const at::Tensor& x) { return x[0].mul(6).expand({4, 2}).contiguous(); });
    EXPECT_EQ(step.graph().collectives().size(), 1u);
    for (const size_t i : step.graph().collectives()) {
      EXPECT_EQ(step.graph().nodes()[i].group_name(), mesh.get_group("tp")->getGroupName());
    }
  });
}

TEST(CapturedConstants, AStepOfManyRanksIsCapturedWithoutThem) {
  const Group group = fake_group(3, 4096);
  const DeviceMesh mesh = init_device_mesh("cpu", {512, 8}, {"dp", "tp"}, {.group = group});
  auto step = capture([&](const at::Tensor& x) {
    const DTensor pending = DTensor::from_local(x, mesh, {Partial(), Shard(0)});
    return pending.redistribute({Replicate(), Replicate()}).to_local();
  });
  for (int i = 0; i < kCallsToReplay; ++i) EXPECT_EQ(step(torch::ones({3, 2})).sizes(), at::IntArrayRef({24, 2}));
  EXPECT_EQ(step.replays(), 1);
  EXPECT_EQ(step.graph().count("all_reduce"), 1) << step.graph().to_string();
  EXPECT_EQ(step.graph().count("all_gather"), 1) << step.graph().to_string();
}

TEST(CapturedConstants, TheSameStepHasTheSameText) {
  const Group group = fake_group(0, 4);
  const auto text_of_capture = [&] {
    auto step = capture([&](const at::Tensor& x) { return all_reduce(x.sin() * 0.1, group); });
    for (int i = 0; i < kCallsToReplay; ++i) step(torch::ones({3, 2}));
    return graph::to_text(step.graph());
  };
  EXPECT_EQ(text_of_capture(), text_of_capture());
}

}  // namespace
}  // namespace serried
