// CommDebugMode: counts, bytes, regions of forward and backward, redistributions, defaults.
#include "serried/tensor/debug/comm_debug.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using ::testing::HasSubstr;
using Counts = std::map<std::string, int64_t>;

DeviceMesh line(const Group& group) {
  return init_device_mesh("cpu", {group->getSize()}, {"x"}, {.group = group});
}

TEST(CommDebugMode, CountsCollectivesAndBytesByName) {
  run_ranks(2, [](const Group& group) {
    CommDebugMode comm;
    all_reduce(at::ones({4}), group);
    all_reduce(at::ones({2}), group);
    all_gather(at::ones({3}), group);
    EXPECT_EQ(comm.counts(), (Counts{{"all_reduce", 2}, {"all_gather", 1}}));
    EXPECT_EQ(comm.count("all_reduce"), 2);
    EXPECT_EQ(comm.count("barrier"), 0);
    EXPECT_EQ(comm.count(), 3);
    EXPECT_EQ(comm.bytes("all_reduce"), 24);
    EXPECT_EQ(comm.bytes(), 36);
  });
}

TEST(CommDebugMode, RefusesNamesOfNoCollective) {
  const CommDebugMode comm;
  EXPECT_EQ(::serried::testing::error_text<c10::ValueError>([&] { comm.count("allreduce"); }),
            "[CommDebugMode::count] there is no collective \"allreduce\"; known: all_reduce, all_gather, "
            "reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, send, recv, barrier\n  fix: pass one of "
            "the known names");
}

TEST(CommDebugMode, NestedModesBothSeeWhatIsInsideThem) {
  run_ranks(2, [](const Group& group) {
    CommDebugMode outer;
    barrier(group);
    {
      CommDebugMode inner;
      barrier(group);
      EXPECT_EQ(inner.count(), 1);
    }
    barrier(group);
    EXPECT_EQ(outer.count(), 3);
  });
}

TEST(CommDebugMode, ScopesNameForwardAndTheBackwardOfTheirOps) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor x = torch::ones({4}, at::TensorOptions().requires_grad(true));
    CommDebugMode comm;
    at::Tensor y;
    {
      CommDebugMode::Scope net("net");
      {
        CommDebugMode::Scope layer("0");
        y = all_gather(x, group);
      }
      CommDebugMode::Scope layer("1");
      y = all_reduce(y, group);
    }
    y.sum().backward();
    ASSERT_EQ(comm.regions().size(), 4u);
    const auto expect = [&](size_t i, const std::string& path, bool backward, const std::string& name) {
      EXPECT_EQ(comm.regions()[i].path, path);
      EXPECT_EQ(comm.regions()[i].backward, backward);
      EXPECT_EQ(comm.regions()[i].calls.count(name), 1u) << path << " " << name;
    };
    expect(0, "net.0", false, "all_gather");
    expect(1, "net.1", false, "all_reduce");
    expect(2, "net.1", true, "all_reduce");
    expect(3, "net.0", true, "reduce_scatter");
  });
}

TEST(CommDebugMode, ShowsWhichOpRedistributedWhat) {
  run_ranks(2, [](const Group& group) {
    const DTensor a = distribute_tensor(at::ones({4, 6}), line(group), {Shard(0)});
    const DTensor b = distribute_tensor(at::ones({4, 6}), line(group), {Shard(1)});
    CommDebugMode comm;
    a + b;
    ASSERT_EQ(comm.redistributions().size(), 1u);
    const CommDebugMode::Redistribution& move = comm.redistributions()[0];
    EXPECT_EQ(move.op, "aten::add.Tensor");
    EXPECT_EQ(move.tensor, "f32[4,6]");
    EXPECT_TRUE(move.implicit);
    EXPECT_FALSE(move.backward);
    EXPECT_EQ(move.bytes, 4 * 6 * 4 / 2 / 2);
    EXPECT_EQ(comm.count("all_to_all"), 1);
  });
}

TEST(CommDebugMode, ShowsTheWayBackOfWhatWasWritten) {
  run_ranks(2, [](const Group& group) {
    const DTensor pending = DTensor::from_local(at::ones({4, 6}), line(group), {Partial("sum")});
    const DTensor cut = distribute_tensor(at::ones({4, 6}), line(group), {Shard(0)});
    CommDebugMode comm;
    at::Tensor(pending).add_(cut);
    EXPECT_EQ(comm.counts(), (Counts{{"all_gather", 1}, {"reduce_scatter", 1}}));
    EXPECT_THAT(
        comm.report(),
        ::testing::AllOf(HasSubstr("aten::add_.Tensor f32[4,6] P -> S0, implicit, 48 B, forward of (no scope)\n"),
                         HasSubstr("aten::add_.Tensor f32[4,6] S0 -> P, implicit, 48 B, forward of (no scope)\n")));
    EXPECT_TRUE(at::equal(pending.full_tensor(), at::full({4, 6}, 3.f)));
  });
}

TEST(CommDebugMode, ARedistributionCountsItsCollectiveOnce) {
  run_ranks(2, [](const Group& group) {
    const DTensor d = distribute_tensor(at::ones({4, 6}), line(group), {Shard(0)});
    const DTensor uneven = distribute_tensor(at::ones({3, 6}), line(group), {Shard(0)});
    CommDebugMode comm;
    d.redistribute({Replicate()});
    EXPECT_EQ(comm.counts(), (Counts{{"all_gather", 1}}));
    uneven.redistribute({Replicate()});
    EXPECT_EQ(comm.counts(), (Counts{{"all_gather", 2}}));
    EXPECT_EQ(comm.bytes(), 2 * 6 * 4 + (group->getRank() == 0 ? 2 : 1) * 6 * 4);
  });
}

TEST(CommDebugMode, TellsExplicitFromImplicitRedistributions) {
  run_ranks(2, [](const Group& group) {
    const SpecPtr spec = intern_spec(line(group), {Partial("sum")}, {4, 6}, {6, 1}, at::kFloat);
    CommDebugMode comm;
    comm_debug::note_redistribution("redistribute", *spec, {Replicate()}, /*implicit=*/false);
    ASSERT_EQ(comm.redistributions().size(), 1u);
    EXPECT_EQ(comm.redistributions()[0].bytes, 2 * 96 / 2);
    EXPECT_THAT(comm.report(), HasSubstr("redistribute f32[4,6] P -> R, explicit, 96 B, forward of (no scope)\n"));
  });
}

TEST(CommDebugMode, ReportAndJsonTellTheSame) {
  run_ranks(2, [](const Group& group) {
    const DTensor a = distribute_tensor(at::ones({4, 6}), line(group), {Shard(0)});
    const DTensor b = distribute_tensor(at::ones({4, 6}), line(group), {Shard(1)});
    CommDebugMode comm({.ops = true});
    {
      CommDebugMode::Scope scope("sum");
      a + b;
    }
    const std::string report = comm.report();
    EXPECT_THAT(report, HasSubstr(c10::str("communication of rank ", group->getRank(), "/2: 1 call, 48 B\n")));
    EXPECT_THAT(report, HasSubstr("all_to_all"));
    EXPECT_THAT(report, HasSubstr("implicit, 24 B, forward of sum\n"));
    EXPECT_GE(comm.ops().at("aten::add.Tensor").distributed, 1);
    EXPECT_GE(comm.ops().at("aten::add.Tensor").plain, 1);
    const nlohmann::json json = nlohmann::json::parse(comm.json());
    EXPECT_EQ(json["collectives"]["all_to_all"]["bytes"], 48);
    EXPECT_EQ(json["scopes"][0]["path"], "sum");
    EXPECT_EQ(json["redistributions"][0]["op"], "aten::add.Tensor");
    EXPECT_EQ(json["rank"], group->getRank());
  });
}

TEST(Coverage, ListsTheOpsThatTookTheReplicateDefault) {
  const std::vector<std::string> names = ops_without_rule([] {
    comm_debug::note_default("aten::histc");
    comm_debug::note_default("aten::bincount");
    comm_debug::note_default("aten::histc");
  });
  EXPECT_EQ(names, (std::vector<std::string>{"aten::bincount", "aten::histc"}));
  EXPECT_TRUE(ops_without_rule([] {}).empty());
}

}  // namespace
}  // namespace serried
