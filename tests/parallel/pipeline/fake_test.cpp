// A job of 64 ranks on one: which stages a rank has, what it holds of them, and what it would send within a stage.
#include <gtest/gtest.h>

#include <map>

#include "serried/mesh/mesh.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/debug/comm_debug.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/guards.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/support/errors.h"
#include "tests/support/fake_group.h"

namespace serried::testing {
namespace {

using staged::Layer;

void cut(Layer& layer, const DeviceMesh& mesh) {
  parallelize_module(*layer, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
  fully_shard(*layer, {.mesh = mesh["dp"]});
}

DeviceMesh mesh_of_64(int rank) {
  return init_device_mesh("cpu", {4, 4, 4}, {"pp", "dp", "tp"}, {.group = fake_group(rank, 64)});
}

// Elements of each parameter of each stage, added up over the ranks that have it.
using Held = std::map<std::pair<int64_t, std::string>, int64_t>;

void add_held(const std::vector<Layer>& layers, const std::vector<int64_t>& indices, Held& held) {
  for (const int64_t index : indices) {
    for (const auto& item : layers[size_t(index)]->named_parameters()) {
      held[{index, item.key()}] += DTensor(item.value().detach()).to_local().numel();
    }
  }
}

TEST(PipelineOnFakeRanks, SixtyFourShareOutStagesShardsAndHeads) {
  for (const auto& [schedule, per_rank] : staged::kAllTables) {
    const PipelineTable table = pipeline_table(schedule, {.ranks = 4, .stages_per_rank = per_rank, .microbatches = 8});
    Held held;
    for (int rank = 0; rank < 64; ++rank) {
      const DeviceMesh mesh = mesh_of_64(rank);
      std::vector<Layer> layers = staged::make_layers(table.stages());
      const std::vector<int64_t> own = table.stages_of(rank / 16);
      for (const int64_t index : own) cut(layers[size_t(index)], mesh);
      const Pipeline pipe(
          staged::stages_of(table, rank / 16, layers),
          {.group = mesh.get_group("pp"), .schedule = schedule, .microbatches = 8, .loss = staged::loss_fn});
      EXPECT_EQ(pipe.table(), table);
      EXPECT_EQ(pipe.parameters().size(), own.size() * layers[0]->parameters().size());
      add_held(layers, own, held);
    }
    // Nine rows of `up` and nine columns of `down` are cut over four ranks; what all of these share each has once.
    const std::map<std::string, int64_t> whole = {{"norm.weight", 6 * 4}, {"norm.bias", 6 * 4},   {"up.weight", 9 * 6},
                                                  {"up.bias", 9},         {"down.weight", 6 * 9}, {"down.bias", 6 * 4},
                                                  {"scale", 6 * 4}};
    EXPECT_EQ(held.size(), whole.size() * size_t(table.stages()));
    for (const auto& [which, count] : held) EXPECT_EQ(count, whole.at(which.second)) << which.first << which.second;
  }
}

std::map<std::string, int64_t> calls_of_a_stage(const DeviceMesh& mesh) {
  Layer layer = staged::make_layers(1)[0];
  cut(layer, mesh);
  const ImplicitReplication batches_are_whole;
  const CommDebugMode comm;
  layer(staged::values({2, 3, staged::kWidth}, 1)).sum().backward();
  return comm.counts();
}

TEST(PipelineOnFakeRanks, AStageSendsWhatItSendsOnRealOnes) {
  std::map<std::string, int64_t> expected;
  run_ranks(4, [&](const Group& group) {
    const auto counts = calls_of_a_stage(init_device_mesh("cpu", {1, 2, 2}, {"pp", "dp", "tp"}, {.group = group}));
    if (group->getRank() == 0) expected = counts;
  });
  EXPECT_FALSE(expected.empty());
  for (const int rank : {0, 27, 63}) EXPECT_EQ(calls_of_a_stage(mesh_of_64(rank)), expected);
}

TEST(PipelineOnFakeRanks, StepsAreRefused) {
  Layer layer = staged::make_layers(1)[0];
  Pipeline pipe(layer, {.group = fake_group(1, 4), .microbatches = 2, .loss = staged::loss_fn});
  for (const bool trains : {true, false}) {
    const std::string text = error_text<c10::NotImplementedError>([&] {
      const staged::Batch batch = staged::batch_of(2, 2, 0);
      trains ? pipe.step(batch.input, batch.target) : pipe.eval(batch.input);
    });
    EXPECT_EQ(text,
              "[Pipeline] a step needs the messages of other ranks, and a fake group brings none\n"
              "  fix: make stages and tables there, and run steps on ranks that exist");
  }
}

}  // namespace
}  // namespace serried::testing
