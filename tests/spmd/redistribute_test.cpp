// Redistribution plans: their texts, and every step carried out on ranks that exist in memory only.
#include "serried/spmd/redistribute.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <set>

#include "tests/support/errors.h"
#include "tests/support/on_mesh.h"

namespace serried::spmd {
namespace {

using serried::testing::error_text;

std::vector<Step> plan(const char* from, const char* to, const Sizes& mesh_shape, const Sizes& sizes = {8, 8}) {
  return redistribution(sizes, parse_placements(from), parse_placements(to), mesh_shape);
}

std::string text(const char* from, const char* to, const Sizes& mesh_shape, const Sizes& sizes = {8, 8}) {
  return to_string(plan(from, to, mesh_shape, sizes));
}

// A mesh without processes: the part of an iota tensor that each rank would hold.
class FakeMesh {
 public:
  FakeMesh(Sizes mesh_shape, const Sizes& sizes)
      : shape_(std::move(mesh_shape)), whole_(torch::arange(c10::multiply_integers(sizes)).view(sizes)) {}

  int64_t num_ranks() const { return c10::multiply_integers(shape_); }

  at::Tensor part(const Placements& placements, int64_t rank) const {
    const c10::DimVector coordinate = coordinate_of(rank, shape_);
    at::Tensor part = whole_;
    for (int64_t dim = 0; dim < whole_.dim(); ++dim) {
      std::vector<int64_t> indices;
      for (const Span& span : owned_spans(whole_.size(dim), dim, placements, {shape_, coordinate})) {
        for (int64_t i = span.begin; i < span.end(); ++i) indices.push_back(i);
      }
      part = part.index_select(dim, torch::tensor(indices, torch::kLong));
    }
    return part;
  }

  // The ranks that differ from `rank` in `axes` only, row-major, and where it stands among them.
  std::pair<std::vector<int64_t>, size_t> peers(int64_t rank, const std::vector<int64_t>& axes) const {
    std::vector<int64_t> ranks;
    size_t mine = 0;
    const c10::DimVector self = coordinate_of(rank, shape_);
    for (int64_t other = 0; other < num_ranks(); ++other) {
      const c10::DimVector at = coordinate_of(other, shape_);
      bool peer = true;
      for (int64_t axis = 0; axis < int64_t(shape_.size()); ++axis) {
        const bool free = std::find(axes.begin(), axes.end(), axis) != axes.end();
        peer = peer && (free || at[axis] == self[axis]);
      }
      if (!peer) continue;
      if (other == rank) mine = ranks.size();
      ranks.push_back(other);
    }
    return {ranks, mine};
  }

  // Whether every rank has what it should after `step`; each step is tried once.
  bool is_exact(const Step& step) {
    if (!tried_.insert(to_string(step)).second) return true;
    for (int64_t rank = 0; rank < num_ranks(); ++rank) {
      const at::Tensor reached = after(step, rank);
      if (!reached.defined() || !at::equal(reached, part(step.after, rank))) return false;
    }
    return true;
  }

 private:
  // What `rank` has after `step` if every rank had its part before. Values that are pending a reduction count as
  // equal on all ranks: only places are checked here.
  at::Tensor after(const Step& step, int64_t rank) const {
    const auto [ranks, mine] = peers(rank, step.axes);
    std::vector<at::Tensor> before;
    std::vector<at::Tensor> wanted;
    for (int64_t peer : ranks) {
      before.push_back(part(step.before, peer));
      wanted.push_back(part(step.after, peer));
    }
    switch (step.kind) {
      case Step::Kind::all_reduce:
      case Step::Kind::to_partial: return before[mine];
      case Step::Kind::all_gather: return at::cat(before, step.from.dim());
      case Step::Kind::reduce_scatter: return piece(before[mine], wanted, step.to.dim(), mine);
      case Step::Kind::all_to_all: {
        std::vector<at::Tensor> pieces;
        for (const at::Tensor& b : before) pieces.push_back(piece(b, wanted, step.to.dim(), mine));
        return at::cat(pieces, step.from.dim());
      }
      case Step::Kind::slice: return found_in({before[mine]}, wanted[mine]);
      case Step::Kind::exchange: return found_in(before, wanted[mine]);
    }
    return {};
  }

  // The mine-th of consecutive pieces as long as the ranks' wanted parts.
  static at::Tensor piece(const at::Tensor& x, const std::vector<at::Tensor>& wanted, int64_t dim, size_t mine) {
    int64_t begin = 0;
    for (size_t i = 0; i < mine; ++i) begin += wanted[i].size(dim);
    return x.narrow(dim, begin, wanted[mine].size(dim));
  }

  // `wanted` where all of its elements are in some source, else an empty tensor.
  static at::Tensor found_in(const std::vector<at::Tensor>& sources, const at::Tensor& wanted) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& source : sources) flat.push_back(source.reshape(-1));
    return at::isin(wanted, at::cat(flat)).all().item<bool>() ? wanted : at::Tensor();
  }

  Sizes shape_;
  at::Tensor whole_;
  std::set<std::string> tried_;
};

void expect_exact(FakeMesh& mesh, const std::vector<Step>& steps, const Placements& from, const Placements& to) {
  Placements now = from;
  for (const Step& step : steps) {
    ASSERT_EQ(step.before, now) << to_string(steps);
    ASSERT_TRUE(mesh.is_exact(step)) << to_string(steps);
    now = step.after;
  }
  ASSERT_EQ(now, to) << to_string(steps);
}

void expect_all_pairs_exact(const std::vector<Placement>& words, const Sizes& mesh_shape,
                            const std::vector<Sizes>& all_sizes) {
  const std::vector<Placements> lists = serried::testing::placement_lists(words, mesh_shape.size());
  for (const Sizes& sizes : all_sizes) {
    FakeMesh mesh(mesh_shape, sizes);
    for (const Placements& from : lists) {
      for (const Placements& to : lists) {
        expect_exact(mesh, redistribution(sizes, from, to, mesh_shape), from, to);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(RedistributionPlan, EveryStepIsExactOnOneAxis) {
  const std::vector<Placement> words{Replicate(), Shard(0), Shard(1), StridedShard(0, 2), BalancedShard(0), Partial()};
  for (int64_t ranks : {2, 3, 4}) {
    expect_all_pairs_exact(words, {ranks}, {{8, 6}, {5, 3}, {1, 7}, {0, 3}});
  }
}

TEST(RedistributionPlan, EveryStepIsExactOnTwoAxes) {
  const std::vector<Placement> words{Replicate(), Shard(0), Shard(1), StridedShard(0, 2), BalancedShard(0), Partial()};
  expect_all_pairs_exact(words, {2, 2}, {{5, 3}, {8, 4}});
  expect_all_pairs_exact(words, {3, 2}, {{7, 3}});
}

TEST(RedistributionPlan, EveryStepIsExactOnThreeAxes) {
  expect_all_pairs_exact({Replicate(), Shard(0), Shard(1), Partial()}, {2, 2, 2}, {{5, 3}});
}

TEST(RedistributionPlan, EqualPlacementsTakeNoStep) {
  EXPECT_EQ(text("S0 P", "S0 P", {2, 2}), "");
}

TEST(RedistributionPlan, OneAxisTakesOneCollective) {
  EXPECT_EQ(text("S0", "R", {2}), "S0 -> R: all_gather over axis 0");
  EXPECT_EQ(text("P", "R", {2}), "P -> R: all_reduce over axis 0");
  EXPECT_EQ(text("P", "S1", {2}), "P -> S1: reduce_scatter over axis 0");
  EXPECT_EQ(text("S0", "S1", {2}), "S0 -> S1: all_to_all over axis 0");
  EXPECT_EQ(text("R", "S0", {2}), "R -> S0: slice over axis 0");
  EXPECT_EQ(text("R", "P", {2}), "R -> P: to_partial over axis 0");
  EXPECT_EQ(text("S0/2", "R", {2}), "S0/2 -> R: exchange over axis 0");
  EXPECT_EQ(text("S0~", "R", {2}), "S0~ -> R: exchange over axis 0");
  EXPECT_EQ(text("S0~", "S1", {2}), "S0~ -> S1: exchange over axis 0");
  EXPECT_EQ(text("R", "S0~", {2}), "R -> S0~: slice over axis 0");
}

TEST(RedistributionPlan, ShardsBecomePartialThroughReplicate) {
  EXPECT_EQ(text("S0", "P", {2}), "S0 -> R: all_gather over axis 0; R -> P: to_partial over axis 0");
}

TEST(RedistributionPlan, AxesOfOneRankAreRenamed) {
  EXPECT_EQ(text("S0 P", "P(max) R", {1, 1}), "");
  EXPECT_EQ(text("S0 S0", "R R", {1, 2}), "R S0 -> R R: all_gather over axis 1");
}

TEST(RedistributionPlan, EqualKindsOfSeveralAxesMerge) {
  EXPECT_EQ(text("P P", "R R", {2, 2}), "P P -> R R: all_reduce over axes 0, 1");
  EXPECT_EQ(text("P P(avg)", "R R", {2, 2}), "P P(avg) -> R R: all_reduce over axes 0, 1");
  EXPECT_EQ(text("S0 S0", "R R", {2, 2}), "S0 S0 -> R R: all_gather over axes 0, 1");
  EXPECT_EQ(text("S0 S0", "R R", {2, 2}, {5, 3}), "S0 S0 -> R R: all_gather over axes 0, 1");
  EXPECT_EQ(text("P P", "S0 S0", {2, 2}, {5, 3}), "P P -> S0 S0: reduce_scatter over axes 0, 1");
  EXPECT_EQ(text("S0 S0", "S1 S1", {2, 2}, {5, 3}), "S0 S0 -> S1 S1: all_to_all over axes 0, 1");
  EXPECT_EQ(text("R R", "S0 S1", {2, 2}), "R R -> S0 S1: slice over axes 0, 1");
}

TEST(RedistributionPlan, PartialsAreReducedWhileThePartIsSmall) {
  EXPECT_EQ(text("P S0", "R R", {2, 2}, {1024, 1024}),
            "P S0 -> R S0: all_reduce over axis 0; R S0 -> R R: all_gather over axis 1");
  EXPECT_EQ(text("R P", "S0 R", {2, 2}, {1024, 1024}),
            "R P -> S0 P: slice over axis 0; S0 P -> S0 R: all_reduce over axis 1");
}

TEST(RedistributionPlan, AnInnerCutIsUndoneWithoutTheOuterOne) {
  EXPECT_EQ(text("S0 S0", "S0 R", {2, 2}), "S0 S0 -> S0 R: all_gather over axis 1");
  EXPECT_EQ(text("S0 S0", "S0 S1", {2, 2}), "S0 S0 -> S0 S1: all_to_all over axis 1");
}

TEST(RedistributionPlan, WhatNoPlainCollectiveCanDoIsOneExchange) {
  EXPECT_EQ(text("S0 S0", "R S0", {2, 2}), "S0 S0 -> R S0: exchange over axes 0, 1");
  EXPECT_EQ(text("S0 S1", "S1 S0", {2, 2}), "S0 S1 -> S1 S0: exchange over axes 0, 1");
  EXPECT_EQ(text("S0 R", "R S0", {2, 2}, {1024, 1024}), "S0 R -> R S0: exchange over axis 0");
}

TEST(RedistributionPlan, OnePartialDoesNotBecomeAnother) {
  EXPECT_EQ(error_text<c10::ValueError>([] {
              plan("R P", "R P(max)", {2, 2});
            }),
            "[redistribute] cannot turn P into P(max) on axis 1: one pending reduction does not become another\n"
            "  fix: redistribute to R first");
}

TEST(RedistributionPlan, AxesAndPlacementsMustMatch) {
  EXPECT_EQ(error_text<c10::ValueError>([] {
              plan("R P", "R", {2, 2});
            }),
            "[redistribute] the mesh has 2 axes, and the placements are \"R P\" and \"R\"\n"
            "  fix: pass one placement per mesh axis");
}

TEST(Boxes, AStridedCutGivesSeveral) {
  const Sizes mesh_shape{2};
  const Sizes coordinate{1};
  const auto boxes = owned_boxes({8, 3}, Placements{StridedShard(0, 2)}, {mesh_shape, coordinate});
  ASSERT_EQ(boxes.size(), 2u);
  EXPECT_EQ(boxes[0][0], (Span{2, 2}));
  EXPECT_EQ(boxes[1][0], (Span{6, 2}));
  EXPECT_EQ(boxes[1][1], (Span{0, 3}));
}

TEST(Boxes, IntersectOrDoNot) {
  const Box a{{0, 4}, {2, 3}};
  const Box b{{3, 4}, {0, 3}};
  const auto common = intersect(a, b);
  ASSERT_TRUE(common.has_value());
  EXPECT_EQ((*common)[0], (Span{3, 1}));
  EXPECT_EQ((*common)[1], (Span{2, 1}));
  EXPECT_FALSE(intersect(a, Box{{4, 1}, {2, 3}}).has_value());
}

}  // namespace
}  // namespace serried::spmd
