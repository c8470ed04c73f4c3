// Redistributions on rank threads: every part equals the one cut from the global tensor.
#include "serried/tensor/redistribute/redistribute.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "serried/comm/groups/ranks.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using testing::expect_close;
using testing::expect_equal;

at::Tensor counted(const Sizes& sizes, at::ScalarType dtype = at::kFloat) {
  return torch::arange(c10::multiply_integers(sizes)).view(sizes).add_(1).to(dtype);
}

SpecPtr spec_on(const DeviceMesh& mesh, const Placements& placements, const at::Tensor& whole) {
  return intern_spec(mesh, placements, whole.sizes(), whole.strides(), whole.scalar_type());
}

at::Tensor cut(const at::Tensor& whole, const Placements& placements, const Position& at) {
  at::Tensor part = whole;
  for (int64_t dim = 0; dim < whole.dim(); ++dim) {
    std::vector<int64_t> indices;
    for (const Span& span : owned_spans(whole.size(dim), dim, placements, at)) {
      for (int64_t i = span.begin; i < span.end(); ++i) indices.push_back(i);
    }
    part = part.index_select(dim, torch::tensor(indices, torch::kLong));
  }
  return part;
}

// What rank `at` holds so that the reduction over the Partial axes gives `whole`: sign-mixed terms for sums, one rank
// with the value and worse ones elsewhere for max.
at::Tensor partial_part(const at::Tensor& whole, const Placements& placements, const Position& at) {
  at::Tensor part = cut(whole, placements, at).clone();
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (!placements[axis].is_partial()) continue;
    const int64_t ranks = at.mesh_shape[axis];
    const int64_t rank = at.coordinate[axis];
    if (placements[axis].is_partial(ReduceKind::max)) {
      if (rank != ranks - 1) part.sub_(rank + 1);
      continue;
    }
    const double shift = double(rank) * 2 - double(ranks - 1);  // adds up to 0
    const double share =
        placements[axis].is_partial(ReduceKind::avg) ? 1 : double(rank == 0 ? ranks : 0) / double(ranks);
    part = part.mul(share).add(shift);
  }
  return part;
}

void expect_arrives(const at::Tensor& whole, const DeviceMesh& mesh, const Placements& from, const Placements& to) {
  const SpecPtr spec = spec_on(mesh, from, whole);
  const Position at = mesh.position();
  const at::Tensor local = partial_part(whole, from, at);
  at::Tensor moved = redistribute_local(local, *spec, to);
  const std::string what = c10::str(to_string(from), " to ", to_string(to), " of ", whole.sizes());
  Placements final = to;
  for (Placement& p : final) {
    if (p.is_partial()) p = Replicate();
  }
  if (final != to) {
    ASSERT_EQ(moved.sizes(), c10::IntArrayRef(local_sizes(whole.sizes(), to, at))) << what;
    moved = redistribute_local(moved, *spec_on(mesh, to, whole), final);
  }
  expect_close(moved, cut(whole, final, at), what);
}

std::vector<Placements> all_lists(const std::vector<Placement>& words, size_t num_axes) {
  if (num_axes == 0) return {{}};
  std::vector<Placements> lists;
  for (const Placements& list : all_lists(words, num_axes - 1)) {
    for (const Placement& word : words) {
      lists.push_back(list);
      lists.back().push_back(word);
    }
  }
  return lists;
}

bool is_possible(const Placements& from, const Placements& to) {
  bool sums = false;
  bool maxes = false;
  for (size_t axis = 0; axis < from.size(); ++axis) {
    if (from[axis].is_partial() && to[axis].is_partial() && from[axis] != to[axis]) return false;
    for (const Placement& p : {from[axis], to[axis]}) {
      if (!p.is_partial()) continue;
      (p.reduce() == ReduceKind::max ? maxes : sums) = true;
    }
  }
  return !(sums && maxes);
}

void expect_all_pairs_arrive(const Sizes& mesh_shape, const std::vector<Placement>& words,
                             const std::vector<Sizes>& all_sizes) {
  const std::vector<Placements> lists = all_lists(words, mesh_shape.size());
  run_ranks(int(c10::multiply_integers(mesh_shape)), [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", mesh_shape, {}, {.group = group});
    for (const Sizes& sizes : all_sizes) {
      const at::Tensor whole = counted(sizes);
      for (const Placements& from : lists) {
        for (const Placements& to : lists) {
          if (is_possible(from, to)) expect_arrives(whole, mesh, from, to);
        }
      }
    }
  });
}

std::vector<Sizes> pairs_of(const std::vector<int64_t>& sizes) {
  std::vector<Sizes> pairs;
  for (int64_t rows : sizes) {
    for (int64_t columns : sizes) pairs.push_back({rows, columns});
  }
  return pairs;
}

TEST(RedistributeLocal, EveryPairArrivesOnOneAxis) {
  const std::vector<Placement> words{Replicate(),        Shard(0),       Shard(1),       StridedShard(0, 2),
                                     StridedShard(1, 3), Partial("sum"), Partial("max"), Partial("avg")};
  for (int64_t ranks : {1, 2, 3, 4}) expect_all_pairs_arrive({ranks}, words, pairs_of({0, 1, 3, 5, 8}));
}

TEST(RedistributeLocal, EveryPairArrivesOnTwoAxes) {
  expect_all_pairs_arrive({2, 2}, {Replicate(), Shard(0), Shard(1), Partial("sum")},
                          {{0, 3}, {1, 5}, {3, 1}, {5, 3}, {5, 8}, {8, 8}});
}

TEST(RedistributeLocal, StridedAndOtherPartialsArriveOnTwoAxes) {
  expect_all_pairs_arrive({2, 2}, {Replicate(), Shard(0), StridedShard(0, 2), Partial("avg"), Partial("sum")},
                          {{5, 3}, {8, 2}});
  expect_all_pairs_arrive({2, 2}, {Shard(1), StridedShard(1, 2), Partial("max")}, {{5, 3}, {2, 8}});
}

TEST(RedistributeLocal, ThreeDimsArriveOnUnequalAxes) {
  expect_all_pairs_arrive({1, 3}, {Replicate(), Shard(1), Shard(2), Partial("sum")}, {{2, 5, 3}, {1, 6, 6}});
}

TEST(RedistributeLocal, FiveRowsNestedOverTwoAxesAreGatheredWhole) {
  run_ranks(4, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {}, {.group = group});
    const at::Tensor whole = counted({5, 3});
    const SpecPtr spec = spec_on(mesh, parse_placements("S0 S0"), whole);
    const auto& steps = redistribution(*spec, parse_placements("R R"));
    ASSERT_EQ(steps.size(), 1u);
    expect_equal(run_steps(cut(whole, spec->placements, mesh.position()), *spec, steps), whole);
  });
}

TEST(RedistributeLocal, ResultsAreContiguousAndDoNotAliasTheInput) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    const at::Tensor whole = counted({4, 6});
    for (const char* to : {"S0", "S1", "P", "P(avg)", "P(max)"}) {
      const at::Tensor local = whole.t().contiguous().t();
      const at::Tensor moved = redistribute_local(local, *spec_on(mesh, {Replicate()}, whole), parse_placements(to));
      EXPECT_TRUE(moved.is_contiguous()) << to;
      EXPECT_FALSE(moved.is_alias_of(local)) << to;
    }
  });
}

TEST(RedistributeLocal, NoStepsGiveTheSameTensor) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    const at::Tensor local = counted({2, 3});
    EXPECT_TRUE(redistribute_local(local, *spec_on(mesh, {Replicate()}, local), {Replicate()}).is_same(local));
  });
}

TEST(RedistributeLocal, ScalarsAreReduced) {
  run_ranks(3, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {3}, {}, {.group = group});
    const at::Tensor local = torch::tensor(double(group->getRank() + 1));
    expect_equal(redistribute_local(local, *spec_on(mesh, {Partial()}, local), {Replicate()}), torch::tensor(6.0));
  });
}

at::Tensor reduced(const DeviceMesh& mesh, const at::Tensor& local, const char* kind) {
  return redistribute_local(local, *spec_on(mesh, {Partial(kind)}, local), {Replicate()});
}

TEST(RedistributeLocal, BoolReducesAsLogic) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    const bool first = group->getRank() == 0;
    const at::Tensor local = torch::tensor({first, false, true, !first}, torch::kBool);
    const at::Tensor any = torch::tensor({true, false, true, true}, torch::kBool);
    const at::Tensor all = torch::tensor({false, false, true, false}, torch::kBool);
    const at::Tensor odd = torch::tensor({true, false, false, true}, torch::kBool);
    for (const char* kind : {"sum", "max", "bor"}) expect_equal(reduced(mesh, local, kind), any, kind);
    for (const char* kind : {"product", "min", "band"}) expect_equal(reduced(mesh, local, kind), all, kind);
    expect_equal(reduced(mesh, local, "bxor"), odd);
  });
}

TEST(RedistributeLocal, EveryDtypeThatCanBeSummedIs) {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat, at::kComplexDouble,
                                     at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    run_ranks(2, [&](const Group& group) {
      const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
      const at::Tensor local = counted({3, 2}, dtype);
      const SpecPtr spec = spec_on(mesh, {Partial()}, local);
      expect_equal(redistribute_local(local, *spec, {Replicate()}), local * 2, toString(dtype));
      expect_equal(redistribute_local(local, *spec, {Shard(0)}), cut(local * 2, {Shard(0)}, mesh.position()),
                   toString(dtype));
    });
  }
}

TEST(RedistributeLocal, NanWinsMinAndMax) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const at::Tensor local = torch::tensor({group->getRank() == 0 ? nan : 1.0F});
    EXPECT_TRUE(reduced(mesh, local, "max").isnan().item<bool>());
    EXPECT_TRUE(reduced(mesh, local, "min").isnan().item<bool>());
  });
}

TEST(RedistributeLocal, ReductionsWithoutMeaningSaySo) {
  run_ranks(1, [](const Group& group) {
    const at::Tensor integers = torch::ones({2}, torch::kLong);
    const at::Tensor complex = torch::ones({2}, torch::kComplexFloat);
    EXPECT_EQ(error_text<c10::ValueError>([&] { fill_identity_(integers, ReduceKind::avg); }),
              "[redistribute] Partial(avg) of dtype Long has no value: an average has no neutral element\n"
              "  fix: use Partial(\"sum\")\n  at:  rank 0/1");
    EXPECT_EQ(error_text<c10::ValueError>([&] { fill_identity_(complex, ReduceKind::max); }),
              "[redistribute] Partial(max) of dtype ComplexFloat has no value: complex numbers have no order\n"
              "  fix: reduce real and imaginary parts apart\n  at:  rank 0/1");
    EXPECT_EQ(error_text<c10::ValueError>([&] { fill_identity_(complex, ReduceKind::bor); }),
              "[redistribute] Partial(bor) of dtype ComplexFloat has no value: only integers and bool have bits to "
              "combine\n  fix: use an integer dtype\n  at:  rank 0/1");
  });
}

TEST(RedistributeLocal, TheAverageOfIntegersIsRefused) {
  run_ranks(2, [](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {}, {.group = group});
    const at::Tensor local = torch::ones({2}, torch::kLong);
    EXPECT_EQ(error_text<c10::ValueError>([&] { reduced(mesh, local, "avg"); }),
              c10::str("[redistribute] Partial(avg) of dtype Long has no value: the average of integers is not an "
                       "integer\n  fix: use Partial(\"sum\"), or a floating dtype\n  at:  rank ",
                       group->getRank(), "/2"));
  });
}

TEST(Identity, LeavesEveryValueAsItIs) {
  const auto combined = [](ReduceKind kind, const at::Tensor& a, const at::Tensor& b) {
    switch (kind) {
      case ReduceKind::sum: return a.scalar_type() == at::kBool ? a.logical_or(b) : a + b;
      case ReduceKind::product: return a.scalar_type() == at::kBool ? a.logical_and(b) : a * b;
      case ReduceKind::min: return at::minimum(a, b);
      case ReduceKind::max: return at::maximum(a, b);
      case ReduceKind::band: return a.bitwise_and(b);
      case ReduceKind::bor: return a.bitwise_or(b);
      default: return a.bitwise_xor(b);
    }
  };
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble, at::kComplexFloat, at::kBool,
                                     at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
    const at::Tensor x = torch::tensor({0, 1, 5}).to(dtype);
    for (const ReduceKind kind : {ReduceKind::sum, ReduceKind::product, ReduceKind::min, ReduceKind::max,
                                  ReduceKind::band, ReduceKind::bor, ReduceKind::bxor}) {
      const bool ordered = kind == ReduceKind::min || kind == ReduceKind::max;
      const bool adds = kind == ReduceKind::sum || kind == ReduceKind::product;
      if (ordered && x.is_complex()) continue;
      if (!ordered && !adds && !at::isIntegralType(dtype, true)) continue;
      expect_equal(combined(kind, x, identity_like(x, kind)), x, c10::str(to_string(kind), " of ", dtype));
    }
  }
}

// Every pair of meshes and placements given, on four ranks of which some may be in neither mesh.
void expect_crosses(const std::vector<int64_t>& from_ranks, const Sizes& from_shape, const char* from,
                    const std::vector<int64_t>& to_ranks, const Sizes& to_shape, const char* to) {
  run_ranks(4, [&](const Group& group) {
    const MeshOptions options{.group = group};
    const DeviceMesh source("cpu", torch::tensor(from_ranks).view(from_shape), {}, options);
    const DeviceMesh target("cpu", torch::tensor(to_ranks).view(to_shape), {}, options);
    if (!source.contains_this_rank() && !target.contains_this_rank()) return;
    const at::Tensor whole = counted({5, 3});
    const Placements before = parse_placements(from);
    const Placements after = parse_placements(to);
    for (int round = 0; round < 2; ++round) {
      const at::Tensor local =
          source.contains_this_rank() ? partial_part(whole, before, source.position()) : at::Tensor();
      at::Tensor moved = redistribute_across(local, *spec_on(source, before, whole), target, after);
      ASSERT_EQ(moved.defined(), target.contains_this_rank());
      if (!moved.defined()) continue;
      const Placements whole_everywhere(after.size(), Replicate());
      moved = redistribute_local(moved, *spec_on(target, after, whole), whole_everywhere);
      expect_close(moved, whole, c10::str(from, " to ", to));
    }
  });
}

TEST(RedistributeAcross, DisjointMeshes) {
  expect_crosses({0, 1}, {2}, "S0", {2, 3}, {2}, "S1");
  expect_crosses({0, 1}, {2}, "P", {2, 3}, {2}, "R");
  expect_crosses({0, 1}, {2}, "R", {3}, {1}, "S0");
}

TEST(RedistributeAcross, OverlappingMeshesOfOtherShapes) {
  expect_crosses({0, 1, 2, 3}, {2, 2}, "S0 S1", {0, 1, 2, 3}, {4}, "S0");
  expect_crosses({0, 1, 2, 3}, {4}, "S0", {3, 1, 2, 0}, {2, 2}, "S1 S0");
  expect_crosses({0, 1, 2, 3}, {2, 2}, "P R", {1, 2, 3}, {3}, "S0");
  expect_crosses({0, 2}, {2}, "S0/2", {1, 2}, {2}, "P");
}

TEST(RedistributeAcross, MeshesOfTwoRootsAreRefused) {
  run_ranks(2, [](const Group& group) {
    const Group half = split_group(group, {{0, 1}});
    const DeviceMesh source = init_device_mesh("cpu", {2}, {}, {.group = group});
    const DeviceMesh target = init_device_mesh("cpu", {2}, {}, {.group = half});
    const at::Tensor whole = counted({2});
    const std::string text = error_text<c10::ValueError>(
        [&] { redistribute_across(whole, *spec_on(source, {Replicate()}, whole), target, {Shard(0)}); });
    EXPECT_EQ(text, c10::str("[redistribute] ", source.to_string(), " is over group \"", group->getGroupName(),
                             "\" and ", target.to_string(), " over \"", half->getGroupName(),
                             "\"\n  fix: make both meshes over one group: {.group = world}\n  at:  rank ",
                             group->getRank(), "/2"));
  });
}

}  // namespace
}  // namespace serried
