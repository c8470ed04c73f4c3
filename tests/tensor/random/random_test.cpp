// Random numbers of DTensors: equal to one device's, or to those of any other mesh.
#include <gmock/gmock.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/tensor/making/factories.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/random/owned_runs.h"
#include "serried/tensor/random/philox_fill.h"
#include "serried/tensor/random/random.h"
#include "serried/tensor/random/random_fill.h"
#include "serried/tensor/random/stream_fill.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

#include <ATen/core/PhiloxRNGEngine.h>

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;
using ::testing::HasSubstr;

// Placements of one, two and two axes; strided cuts too.
struct Case {
  Sizes mesh;
  Placements placements;
};

std::vector<Case> cases() {
  return {{{1}, {Replicate()}},
          {{2}, {Shard(0)}},
          {{3}, {Shard(1)}},
          {{4}, {Shard(0)}},
          {{2, 2}, {Shard(0), Shard(1)}},
          {{2, 2}, {StridedShard(0, 2), Shard(0)}},
          {{2, 2}, {Shard(1), Shard(1)}},
          {{2, 2}, {Replicate(), Shard(0)}}};
}

int world_of(const Case& c) {
  int64_t n = 1;
  for (const int64_t size : c.mesh) n *= size;
  return int(n);
}

// Runs `fn` on the ranks of every case, generators seeded with 7.
void on_meshes(const std::function<void(const DeviceMesh&, const Placements&)>& fn) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(to_string(c.placements));
    run_ranks(world_of(c), [&](const Group&) {
      const DeviceMesh mesh = init_device_mesh("cpu", c.mesh);
      manual_seed(7, mesh);
      fn(mesh, c.placements);
    });
  }
}

// The part of `whole` that this rank holds.
at::Tensor part_of(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& placements) {
  at::Tensor part = whole;
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    std::vector<at::Tensor> pieces{part.narrow(dim, 0, 0)};
    for (const Span& span : owned_spans(whole.size(dim), dim, placements, mesh.position())) {
      pieces.push_back(part.narrow(dim, span.begin, span.size));
    }
    part = at::cat(pieces, dim);
  }
  return part;
}

struct Whole {
  at::Tensor values;
  at::Tensor state;  // of the generator afterwards
};

// What the op gives on one device for seed 7.
Whole on_one_device(const detail::StreamOp& op, at::Tensor whole) {
  at::Generator generator = at::detail::createCPUGenerator(7);
  torch::jit::Stack stack{whole};
  stack.insert(stack.end(), op.arguments.begin(), op.arguments.end());
  stack.emplace_back(generator);
  op.op.callBoxed(stack);
  return {whole, generator.get_state()};
}

// `empty` makes the whole: sizes, dtype and strides.
void expect_same_stream(const detail::StreamOp& op, const std::function<at::Tensor()>& empty) {
  on_meshes([&](const DeviceMesh& mesh, const Placements& placements) {
    const Whole expected = on_one_device(op, empty());
    const at::Tensor& whole = expected.values;
    const SpecPtr spec = intern_spec(mesh, placements, whole.sizes(), whole.strides(), whole.scalar_type());
    const c10::DimVector sizes = spec->local_sizes();
    const at::Tensor local = at::empty_strided(sizes, dense_strides(sizes, whole.strides()), whole.options());
    at::Generator generator = rank_generator();
    detail::stream_fill(local, *spec, op, generator);
    const std::string what = c10::str(op.op.operator_name(), " ", whole.dtype(), " ", whole.sizes());
    expect_equal(local.contiguous(), part_of(whole, mesh, placements), what);
    EXPECT_TRUE(at::equal(generator.get_state(), expected.state)) << what;
  });
}

TEST(StreamFill, NormalNumbersEqualOneDeviceForEverySizeAndDtype) {
  const detail::StreamOp op = detail::stream_op("aten::normal_", "", {0.5, 2.});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
    for (const int64_t rows : {0, 1, 2, 3, 5, 6, 11, 16, 37}) {
      expect_same_stream(op, [&] { return at::empty({rows, 3}, dtype); });
    }
  }
}

TEST(StreamFill, UniformNumbersEqualOneDeviceForEverySizeAndDtype) {
  const detail::StreamOp op = detail::stream_op("aten::uniform_", "", {-0.25, 0.75});
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexDouble}) {
    for (const int64_t rows : {0, 1, 5, 17}) {
      expect_same_stream(op, [&] { return at::empty({rows, 5}, dtype); });
    }
  }
}

TEST(StreamFill, TensorsLargerThanTheBufferEqualOneDevice) {
  for (const char* name : {"aten::normal_", "aten::uniform_", "aten::log_normal_"}) {
    const detail::StreamOp op = detail::stream_op(name, "", {0., 1.});
    expect_same_stream(op, [] { return at::empty({1003, 301}, at::kFloat); });
  }
}

TEST(StreamFill, OtherDistributionsEqualOneDevice) {
  const std::vector<detail::StreamOp> ops = {
      detail::stream_op("aten::exponential_", "", {0.7}), detail::stream_op("aten::cauchy_", "", {0.5, 2.}),
      detail::stream_op("aten::log_normal_", "", {0.5, 1.}), detail::stream_op("aten::geometric_", "", {0.3})};
  for (const detail::StreamOp& op : ops) {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      expect_same_stream(op, [&] { return at::empty({7, 5}, dtype); });
    }
  }
}

TEST(StreamFill, IntegersEqualOneDevice) {
  const std::vector<detail::StreamOp> ops = {detail::stream_op("aten::random_", "", {}),
                                             detail::stream_op("aten::random_", "to", {100}),
                                             detail::stream_op("aten::random_", "from", {-5, 100})};
  for (const detail::StreamOp& op : ops) {
    for (const at::ScalarType dtype : {at::kLong, at::kInt, at::kShort, at::kFloat, at::kDouble, at::kBFloat16}) {
      expect_same_stream(op, [&] { return at::empty({7, 5}, dtype); });
    }
  }
  const int64_t large = int64_t(1) << 40;
  expect_same_stream(detail::stream_op("aten::random_", "from", {-large, large}), [] {
    return at::empty({7, 5}, at::kLong);
  });
  expect_same_stream(detail::stream_op("aten::random_", "from", {0, c10::IValue()}), [] {
    return at::empty({7, 5}, at::kLong);
  });
}

TEST(StreamFill, FollowsTheMemoryOrderOfOtherStrides) {
  for (const char* name : {"aten::normal_", "aten::uniform_"}) {
    const detail::StreamOp op = detail::stream_op(name, "", {0., 1.});
    expect_same_stream(op, [] { return at::empty({5, 9}, at::kFloat).t(); });
    expect_same_stream(op, [] {
      return at::empty({3, 4, 5, 2}, at::TensorOptions(at::kFloat).memory_format(at::MemoryFormat::ChannelsLast));
    });
  }
}

TEST(StreamFill, BadArgumentsRaiseOnRanksWithoutElementsToo) {
  run_ranks(3, [](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    const SpecPtr spec = intern_spec(mesh, {Shard(0)}, {1, 40}, {40, 1}, at::kFloat);
    const at::Tensor local = at::empty(spec->local_sizes());
    EXPECT_THAT(
        error_text<c10::Error>([&] {
          detail::stream_fill(local, *spec, detail::stream_op("aten::normal_", "", {0., -1.}), rank_generator());
        }),
        HasSubstr("std >= 0.0"));
  });
}

// --- counter-based ---

using Fill = std::function<void(const at::Tensor&, const Spec&)>;

void expect_same_everywhere(const Fill& fill, at::ScalarType dtype, c10::IntArrayRef sizes) {
  at::Tensor whole = at::empty(sizes, dtype);
  run_ranks(1, [&](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {1});
    fill(whole, *intern_spec(mesh, {Replicate()}, sizes, whole.strides(), dtype));
  });
  on_meshes([&](const DeviceMesh& mesh, const Placements& placements) {
    const SpecPtr spec = intern_spec(mesh, placements, sizes, whole.strides(), dtype);
    const at::Tensor local = at::empty(spec->local_sizes(), dtype);
    fill(local, *spec);
    expect_equal(local, part_of(whole, mesh, placements));
  });
}

TEST(PhiloxFill, EveryMeshAndPlacementGivesTheSameNumbers) {
  const std::vector<std::pair<Fill, std::vector<at::ScalarType>>> fills = {
      {[](auto& t, auto& spec) { detail::philox_bernoulli_(t, spec, 11, 0.3); },
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kBool}},
      {[](auto& t, auto& spec) { detail::philox_uniform_(t, spec, 11); },
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}},
      {[](auto& t, auto& spec) { detail::philox_normal_(t, spec, 11); },
       {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexDouble}},
      {[](auto& t, auto& spec) { detail::philox_integers_(t, spec, 11, -3, 9); }, {at::kLong, at::kInt, at::kFloat}}};
  for (const auto& [fill, dtypes] : fills) {
    for (const at::ScalarType dtype : dtypes) {
      for (const int64_t rows : {0, 1, 2, 5, 13}) expect_same_everywhere(fill, dtype, {rows, 7});
    }
  }
}

// A replicated tensor of one rank.
at::Tensor on_one_rank(c10::IntArrayRef sizes, at::ScalarType dtype, const Fill& fill) {
  at::Tensor whole = at::empty(sizes, dtype);
  run_ranks(1, [&](const Group&) {
    fill(whole, *intern_spec(init_device_mesh("cpu", {1}), {Replicate()}, sizes, whole.strides(), dtype));
  });
  return whole;
}

TEST(PhiloxFill, WordsAreThoseOfPhilox) {
  const at::Tensor drawn =
      on_one_rank({9}, at::kDouble, [](auto& t, auto& spec) { detail::philox_bernoulli_(t, spec, 99, 0.5); });
  at::Philox4_32 engine(99, 0, 0);
  for (int64_t i = 0; i < 9; ++i) EXPECT_EQ(drawn[i].item<double>(), engine() < 0x80000000u ? 1 : 0);
}

TEST(PhiloxFill, NumbersHaveTheRightMoments) {
  const int64_t n = 200000;
  const at::Tensor normal =
      on_one_rank({n}, at::kFloat, [](auto& t, auto& spec) { detail::philox_normal_(t, spec, 5); });
  EXPECT_NEAR(normal.mean().item<double>(), 0, 0.01);
  EXPECT_NEAR(normal.var().item<double>(), 1, 0.02);
  EXPECT_NEAR(normal.pow(4).mean().item<double>(), 3, 0.1);
  const at::Tensor uniform =
      on_one_rank({n}, at::kDouble, [](auto& t, auto& spec) { detail::philox_uniform_(t, spec, 5); });
  EXPECT_NEAR(uniform.mean().item<double>(), 0.5, 0.005);
  EXPECT_NEAR(uniform.var().item<double>(), 1. / 12, 0.005);
  const at::Tensor ones =
      on_one_rank({n}, at::kFloat, [](auto& t, auto& spec) { detail::philox_bernoulli_(t, spec, 5, 0.1); });
  EXPECT_NEAR(ones.mean().item<double>(), 0.1, 0.005);
}

TEST(PhiloxFill, ProbabilityZeroAndOneAreCertain) {
  for (const double p : {0., 1.}) {
    const at::Tensor drawn =
        on_one_rank({1000}, at::kFloat, [p](auto& t, auto& spec) { detail::philox_bernoulli_(t, spec, 5, p); });
    EXPECT_EQ(drawn.sum().item<double>(), 1000 * p);
  }
}

TEST(OwnedRuns, AreTheRowMajorPlacesOfThePart) {
  for (const Case& c : cases()) {
    run_ranks(world_of(c), [&](const Group&) {
      const DeviceMesh mesh = init_device_mesh("cpu", c.mesh);
      const at::Tensor places = at::arange(5 * 7 * 2).view({5, 7, 2});
      detail::OwnedRuns runs({5, 7, 2}, c.placements, mesh.position());
      std::vector<int64_t> found;
      for (Span run; runs.next(run);) {
        for (int64_t i = run.begin; i < run.end(); ++i) found.push_back(i);
      }
      EXPECT_EQ(int64_t(found.size()), runs.numel());
      expect_equal(at::tensor(found, at::kLong), part_of(places, mesh, c.placements).flatten());
    });
  }
}

// --- generators ---

TEST(ManualSeed, GivesEachRankThreadTheStreamOfTorch) {
  at::Generator expected = at::detail::createCPUGenerator(7);
  run_ranks(3, [&](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3});
    manual_seed(7, mesh);
    EXPECT_TRUE(at::equal(rank_generator().get_state(), expected.get_state()));
  });
}

TEST(RankGenerator, OutsideOfRankThreadsIsTorchs) {
  EXPECT_EQ(rank_generator(), at::detail::getDefaultCPUGenerator());
}

TEST(ManualSeed, RaisesOnARankOutsideTheMesh) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    if (group->getRank() < 2) return manual_seed(7, mesh);
    EXPECT_EQ(error_text<c10::ValueError>([&] { manual_seed(7, mesh); }),
              "[manual_seed] rank 2 is not in " + mesh.to_string() +
                  "\n  fix: call it on the ranks of the mesh only: if (mesh.contains_this_rank())\n  at:  rank 2/3");
  });
}

TEST(RankGenerator, RankThreadsBeginWithTorchsState) {
  at::manual_seed(21);
  const at::Tensor expected = at::detail::createCPUGenerator(21).get_state();
  run_ranks(4, [&](const Group& group) {
    EXPECT_TRUE(at::equal(rank_generator().get_state(), expected));
    EXPECT_NE(rank_generator(), at::detail::getDefaultCPUGenerator());
    torch::rand({3});
    barrier(group);
  });
}

TEST(RankGenerator, RanksThatDifferAreNamedOnEveryRank) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"dp", "tp"});
    rank_generator().set_current_seed(group->getRank() == 1 || group->getRank() == 3 ? 5 : 6);
    EXPECT_EQ(error_text<c10::ValueError>([&] { generator_for(std::nullopt, mesh); }),
              c10::str("[random] the generators of ranks 1, 3 differ from rank 0's on ", mesh.to_string(),
                       "\n  fix: call manual_seed(seed, mesh) with one seed on every rank of the mesh\n  at:  rank ",
                       group->getRank(), "/4"));
    manual_seed(3, mesh);
    EXPECT_EQ(generator_for(std::nullopt, mesh), rank_generator());
    // Once found equal they are not compared again.
    if (group->getRank() == 0) generator_for(std::nullopt, mesh);
  });
}

TEST(RankGenerator, AGivenGeneratorCounts) {
  run_ranks(2, [](const Group&) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2});
    const at::Generator own = at::detail::createCPUGenerator(1);
    EXPECT_EQ(generator_for(own, mesh), own);
  });
}

TEST(RankGenerator, GoesWhereAnOpHasNone) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::poisson", "");
  torch::jit::Stack stack{at::ones({2}), c10::IValue()};
  detail::put_rank_generator(op.schema(), stack);
  EXPECT_EQ(stack.back().toGenerator(), rank_generator());
  const at::Generator own = at::detail::createCPUGenerator(1);
  stack.back() = own;
  detail::put_rank_generator(op.schema(), stack);
  EXPECT_EQ(stack.back().toGenerator(), own);
}

TEST(SeedFor, DiffersByStageInTheBitsThatTorchLooksAt) {
  EXPECT_EQ(seed_for(7, 0), 7u);
  EXPECT_NE(uint32_t(seed_for(7, 1)), uint32_t(seed_for(7, 2)));
  EXPECT_NE(uint32_t(seed_for(7, 1)), uint32_t(seed_for(8, 1)));
  EXPECT_EQ(seed_for(7, 3), seed_for(7, 3));
  EXPECT_EQ(error_text<c10::ValueError>([] { seed_for(7, -1); }),
            "[seed_for] stage is -1\n  fix: pass the number of the stage, 0 or more");
}

}  // namespace
}  // namespace serried
