// Stages that communicate inside, and what data-parallel stages do with tables and parameters out of the ordinary.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/mesh/mesh.h"
#include "serried/parallel/context_parallel/context_parallel.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/expert_parallel/moe.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/tensor/dtensor.h"
#include "tests/parallel/pipeline/nets.h"
#include "tests/support/models.h"

namespace serried::testing {
namespace {

namespace nn = torch::nn;

constexpr int64_t kSize = 6;

struct Shape {
  Schedule schedule;
  int64_t per_rank;
  PipelineTable table(int64_t microbatches) const {
    return pipeline_table(schedule, {.ranks = 2, .stages_per_rank = per_rank, .microbatches = microbatches});
  }
};
const std::vector<Shape> kShapes = {{Schedule::OneFOneB, 1}, {Schedule::InterleavedZeroBubble, 2}, {Schedule::ZBV, 2}};

at::Tensor wave(at::IntArrayRef sizes, int64_t salt) {
  return models::values(sizes, salt).to(at::kDouble);
}

/// Within 1e-11 of the largest element: some gradients are nothing but what rounding leaves.
void expect_near_gradient(at::Tensor actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_TRUE(actual.defined()) << what;
  if (is_dtensor(actual)) actual = DTensor(actual).full_tensor();
  const double most = std::max(1.0, expected.abs().max().item<double>());
  EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-11 * most) << what;
}

template <class Holder>
void fill(Holder& module, int64_t salt) {
  const at::NoGradGuard no_grad;
  module->to(at::kDouble);
  for (const at::Tensor& p : module->parameters()) p.copy_(wave(p.sizes(), ++salt) * 0.3);
}

struct ExpertImpl : nn::Module {
  ExpertImpl() {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::tanh(up(x))); }
  nn::Linear up{kSize, 9}, down{9, kSize};
};
TORCH_MODULE(Expert);

/// Four experts over the ranks of a mesh, the same ones whatever their number.
struct ExpertStageImpl : nn::Module {
  ExpertStageImpl(DeviceMesh mesh_, int64_t index) : mesh(std::move(mesh_)) {
    register_module("router", router);
    fill(router, 100 * index);
    const int64_t local = 4 / mesh.size();
    for (int64_t i = local * mesh.get_local_rank(); i < local * (mesh.get_local_rank() + 1); ++i) {
      Expert expert;
      fill(expert, 100 * index + 10 * (i + 1));
      experts.emplace_back(register_module("expert" + std::to_string(i), expert));
    }
  }
  at::Tensor forward(const at::Tensor& x) { return x + moe(x, router(x), experts, {.mesh = mesh, .top_k = 2}); }

  DeviceMesh mesh;
  nn::Linear router{kSize, 4};
  std::vector<nn::AnyModule> experts;
};
TORCH_MODULE(ExpertStage);

std::map<std::string, at::Tensor> gradients_with_experts_alone(int64_t num_stages,
                                                               const std::vector<at::Tensor>& batches) {
  std::map<std::string, at::Tensor> gradients;
  run_ranks(1, [&](const Group& group) {
    std::vector<ExpertStage> stages;
    for (int64_t i = 0; i < num_stages; ++i) stages.emplace_back(ExpertStage(DeviceMesh::from_group(group), i));
    for (const at::Tensor& batch : batches) {
      for (at::Tensor x : batch.tensor_split(3)) {
        for (ExpertStage& stage : stages) x = stage(x);
        (x.square().mean() / 3.).backward();
      }
    }
    for (size_t i = 0; i < stages.size(); ++i) {
      for (const auto& item : stages[i]->named_parameters()) gradients[c10::str(i, item.key())] = item.value().grad();
    }
  });
  return gradients;
}

TEST(PipelineMixed, ExpertsInStagesAreThoseOfOneProcess) {
  const std::vector<at::Tensor> batches = {wave({7, kSize}, 1), wave({7, kSize}, 2)};
  for (const Shape& shape : kShapes) {
    const PipelineTable table = shape.table(3);
    const auto expected = gradients_with_experts_alone(table.stages(), batches);
    run_ranks(4, [&](const Group& world) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "ep"}, {.group = world});
      const Group pp = mesh.get_group("pp");
      std::map<int64_t, ExpertStage> own;
      std::vector<PipelineStage> stages;
      for (const int64_t i : table.stages_of(pp->getRank())) {
        stages.emplace_back(own.emplace(i, ExpertStage(mesh["ep"], i)).first->second);
      }
      const auto loss = [](const at::Tensor& y, const at::Tensor&) { return y.square().mean(); };
      Pipeline pipe(stages, {.group = pp, .schedule = shape.schedule, .microbatches = 3, .loss = loss});
      const at::Tensor mine = batches[size_t(mesh.get_local_rank("ep"))];
      pipe.step(mine, mine);
      for (const auto& [i, stage] : own) {
        for (const auto& item : stage->named_parameters()) {
          at::Tensor gradient = item.value().grad().clone();
          if (item.key().starts_with("router")) all_reduce_(gradient, mesh.get_group("ep"));
          expect_near_gradient(gradient, expected.at(c10::str(i, item.key())),
                               c10::str(to_string(shape.schedule), " stage ", i, " ", item.key()));
        }
      }
    });
  }
}

struct AttentionStageImpl : nn::Module {
  explicit AttentionStageImpl(int64_t index) {
    register_module("qkv", qkv);
    fill(qkv, 10 * index);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor parts = qkv(x).view({x.size(0), x.size(1), 3, 2, kSize / 2}).permute({2, 0, 3, 1, 4});
    const at::Tensor y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0, /*is_causal=*/true);
    return x + y.transpose(1, 2).flatten(2);
  }
  nn::Linear qkv{kSize, 3 * kSize};
};
TORCH_MODULE(AttentionStage);

void run_with_cut_sequence(const DeviceMesh& mesh, const Shape& shape, AttentionWay way, const at::Tensor& x,
                           std::vector<AttentionStage>& plain, bool is_captured) {
  const Group pp = mesh.get_group("pp");
  const PipelineTable table = shape.table(3);
  std::map<int64_t, AttentionStage> own;
  std::vector<PipelineStage> stages;
  for (const int64_t i : table.stages_of(pp->getRank())) {
    stages.emplace_back(own.emplace(i, AttentionStage(i)).first->second);
  }
  const auto loss = [](const at::Tensor& y, const at::Tensor&) { return y.square().sum(); };
  Pipeline pipe(stages, {.group = pp, .schedule = shape.schedule, .microbatches = 3, .loss = loss});
  const ContextParallel scope(mesh["cp"], {.rotate = way, .length = x.size(1)});
  const at::Tensor mine = context_parallel_shard(mesh["cp"], x, {.seq_dim = 1});
  const auto eager = [&](const at::Tensor& part) {
    for (at::Tensor p : pipe.parameters()) p.mutable_grad().reset();
    return pipe.step(part, part);
  };
  auto captured = capture(eager);
  for (int i = 0; i < (is_captured ? 6 : 1); ++i) is_captured ? captured(mine) : eager(mine);
  if (is_captured) EXPECT_GE(captured.replays(), 1) << captured.last_recapture_reason();
  for (auto& [i, stage] : own) {
    for (const auto& item : stage->named_parameters()) {
      const at::Tensor gradient = all_reduce(item.value().grad(), mesh.get_group("cp"));
      expect_near_gradient(gradient, plain[size_t(i)]->named_parameters()[item.key()].grad(),
                           c10::str(to_string(shape.schedule), " by ", to_string(way), " stage ", i, item.key()));
    }
  }
}

TEST(PipelineMixed, CutSequencesInStagesAreThoseOfOneProcess) {
  const at::Tensor x = wave({4, 11, kSize}, 1);
  for (const Shape& shape : kShapes) {
    std::vector<AttentionStage> plain;
    for (int64_t i = 0; i < shape.table(3).stages(); ++i) plain.emplace_back(AttentionStage(i));
    for (at::Tensor y : x.tensor_split(3)) {
      for (AttentionStage& stage : plain) y = stage(y);
      (y.square().sum() / 3.).backward();
    }
    for (const AttentionWay way : {AttentionWay::heads, AttentionWay::gather, AttentionWay::ring}) {
      for (const bool is_captured : {false, true}) {
        run_ranks(4, [&](const Group& world) {
          const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "cp"}, {.group = world});
          run_with_cut_sequence(mesh, shape, way, x, plain, is_captured);
        });
      }
    }
  }
}

/// Uses one of its layers in one of four micro-batches only; below 0: in all.
struct SometimesImpl : nn::Module {
  explicit SometimesImpl(int64_t index) {
    register_module("always", always);
    register_module("sometimes", sometimes);
    fill(always, 10 * index);
    fill(sometimes, 10 * index + 5);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = x + always(x).tanh();
    return microbatch < 0 || calls++ % 4 == microbatch ? y + sometimes(x).sin() : y;
  }
  nn::Linear always{kSize, kSize}, sometimes{kSize, kSize};
  int64_t microbatch = -1, calls = 0;
};
TORCH_MODULE(Sometimes);

enum class Wrapping { ddp, sharded };

PipelineStage wrapped(Sometimes& stage, const DeviceMesh& dp, Wrapping how) {
  if (how == Wrapping::ddp) {
    const DDPOptions options{.process_group = dp.get_group(), .find_unused_parameters = true};
    return std::make_shared<DistributedDataParallel<Sometimes>>(stage, options);
  }
  fully_shard(*stage, {.mesh = dp});
  return stage;
}

// Three steps on pp=2 dp=2 with batches of 7 rows, against a loop over the micro-batches of both.
void expect_averages_of(const PipelineTable& table, int64_t used_in, Wrapping how) {
  run_ranks(4, [&](const Group& world) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"pp", "dp"}, {.group = world});
    std::vector<Sometimes> stages, plain;
    for (int64_t i = 0; i < table.stages(); ++i) {
      for (std::vector<Sometimes>* all : {&stages, &plain}) {
        all->emplace_back(Sometimes(i));
        all->back()->microbatch = used_in;
      }
    }
    const std::vector<int64_t> indices = table.stages_of(mesh.get_local_rank("pp"));
    std::vector<PipelineStage> own;
    for (const int64_t i : indices) own.push_back(wrapped(stages[size_t(i)], mesh["dp"], how));
    Pipeline pipe(own, {.group = mesh.get_group("pp"), .loss = staged::loss_fn, .table = table});
    for (int64_t step = 0; step < 3; ++step) {
      for (int64_t i = 0; i < table.stages(); ++i) stages[size_t(i)]->zero_grad(), plain[size_t(i)]->zero_grad();
      const auto batch = [&](int64_t rank) { return wave({7, kSize}, 10 * step + rank); };
      pipe.step(batch(mesh.get_local_rank("dp")), batch(5));
      for (int64_t rank = 0; rank < 2; ++rank) {
        const auto targets = batch(5).tensor_split(table.microbatches());
        for (int64_t m = 0; m < table.microbatches(); ++m) {
          at::Tensor x = batch(rank).tensor_split(table.microbatches())[size_t(m)];
          for (Sometimes& stage : plain) x = stage(x);
          (staged::loss_fn(x, targets[size_t(m)]) / double(table.microbatches())).backward();
        }
      }
      for (const int64_t i : indices) {
        for (const auto& item : stages[size_t(i)]->named_parameters()) {
          expect_near_gradient(item.value().grad(), plain[size_t(i)]->named_parameters()[item.key()].grad() / 2,
                               c10::str("step ", step, " stage ", i, " ", item.key()));
        }
      }
    }
  });
}

TEST(PipelineMixed, ParametersThatSomeMicroBatchesUseAreAveraged) {
  for (const Wrapping how : {Wrapping::ddp, Wrapping::sharded}) {
    for (const Shape& shape : kShapes) {
      for (const int64_t used_in : {0, 3}) expect_averages_of(shape.table(4), used_in, how);
    }
  }
}

// The last backward of a stage reduces, whichever micro-batch it is of.
TEST(PipelineMixed, TablesMayEndWithTheFirstMicroBatch) {
  const PipelineTable table = PipelineTable::from_csv(
      "0F2,0F0,0F1,0B1,0B2,0B0\n"
      "1F2,1B2,1F0,1F1,1I1,1I0,1W1,1W0\n");
  for (const Wrapping how : {Wrapping::ddp, Wrapping::sharded}) expect_averages_of(table, -1, how);
}

}  // namespace
}  // namespace serried::testing
