// visualize_sharding: who holds what, in text, SVG and HTML.
#include "serried/tensor/pictures/visualize.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/groups/group.h"
#include "serried/tensor/dtensor.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using ::testing::HasSubstr;
using ::testing::Not;

// Pictures need no peers.
DeviceMesh mesh_of(const Sizes& shape, std::vector<std::string> names) {
  int ranks = 1;
  for (int64_t size : shape) ranks *= int(size);
  static std::vector<Group> kept;
  kept.push_back(new_group("fake", {.rank = 0, .world_size = ranks}));
  return init_device_mesh("cpu", shape, std::move(names), {.group = kept.back()});
}

std::string draw(const DeviceMesh& mesh, const Sizes& sizes, const Placements& placements,
                 const VisualizeOptions& options = {}) {
  return visualize_sharding(*intern_spec(mesh, placements, sizes, serried::contiguous_strides(sizes), at::kFloat),
                            options);
}

int count(const std::string& text, const std::string& part) {
  int found = 0;
  for (size_t at = text.find(part); at != text.npos; at = text.find(part, at + 1)) ++found;
  return found;
}

TEST(Visualize, OneDimIsARowAndReplicasStandTogether) {
  EXPECT_EQ(draw(mesh_of({2, 2}, {"dp", "tp"}), {8}, {Replicate(), Shard(0)}),
            "f32[8] R S0 on mesh dp=2 tp=2\n"
            "+-----------+-----------+\n"
            "| 0-3       | 4-7       |\n"
            "+-----------+-----------+\n"
            "| ranks 0,2 | ranks 1,3 |\n"
            "+-----------+-----------+\n");
}

TEST(Visualize, TwoDimsAreAGrid) {
  EXPECT_EQ(draw(mesh_of({2, 2}, {"dp", "tp"}), {8, 4}, {Shard(0), Shard(1)}),
            "f32[8,4] S0 S1 on mesh dp=2 tp=2\n"
            "+-----------+--------+--------+\n"
            "| dim 0 \\ 1 | 0-1    | 2-3    |\n"
            "+-----------+--------+--------+\n"
            "| 0-3       | rank 0 | rank 1 |\n"
            "+-----------+--------+--------+\n"
            "| 4-7       | rank 2 | rank 3 |\n"
            "+-----------+--------+--------+\n");
}

TEST(Visualize, UnevenAndEmptyPartsAreShown) {
  EXPECT_EQ(draw(mesh_of({4}, {"x"}), {5}, {Shard(0)}),
            "f32[5] S0 on mesh x=4\n"
            "+--------+--------+--------+\n"
            "| 0-1    | 2-3    | 4      |\n"
            "+--------+--------+--------+\n"
            "| rank 0 | rank 1 | rank 2 |\n"
            "+--------+--------+--------+\n"
            "holds nothing: rank 3\n");
}

TEST(Visualize, StridedCutsAreSeveralPiecesOfOneRank) {
  const std::string text = draw(mesh_of({2}, {"x"}), {8}, {StridedShard(0, 2)});
  EXPECT_THAT(text, HasSubstr("| 0-1    | 2-3    | 4-5    | 6-7    |"));
  EXPECT_THAT(text, HasSubstr("| rank 0 | rank 1 | rank 0 | rank 1 |"));
}

TEST(Visualize, PartialAndWholeTensorsSayWhoHoldsThem) {
  const DeviceMesh mesh = mesh_of({4}, {"x"});
  EXPECT_THAT(draw(mesh, {2, 2}, {Partial("max")}), HasSubstr("pending a max over its ranks"));
  EXPECT_THAT(draw(mesh, {}, {Replicate()}), HasSubstr("| ranks 0-3 |"));
  EXPECT_THAT(draw(mesh, {0, 3}, {Shard(0)}), HasSubstr("holds nothing: ranks 0-3"));
}

TEST(Visualize, MoreDimsShowThoseThatAreCut) {
  const DeviceMesh mesh = mesh_of({2, 2, 2}, {"a", "b", "c"});
  const std::string two = draw(mesh, {2, 3, 4, 6}, {Shard(1), Replicate(), Shard(3)});
  EXPECT_THAT(two, HasSubstr("| dim 1 \\ 3 | 0-2       | 3-5       |"));
  EXPECT_EQ(error_text<c10::ValueError>([&] {
              draw(mesh, {2, 4, 6}, {Shard(0), Shard(1), Shard(2)});
            }),
            "[visualize_sharding] f32[2,4,6] S0 S1 S2 on mesh a=2 b=2 c=2 is cut along 3 dims, and a picture has two\n"
            "  fix: draw two of them: {.dims = {0, 1}}");
  const std::string given = draw(mesh, {2, 4, 6}, {Shard(0), Shard(1), Shard(2)}, {.dims = {0, -1}});
  EXPECT_THAT(given, HasSubstr("dim 1 is cut too: drawn at its index 0"));
  EXPECT_THAT(given, HasSubstr("| 0         | rank 0 | rank 1 |"));
}

TEST(Visualize, BadRequestsSayWhatToPass) {
  const DeviceMesh mesh = mesh_of({2}, {"x"});
  EXPECT_THAT(error_text<c10::ValueError>([&] { draw(mesh, {2}, {Shard(0)}, {.format = "png"}); }),
              HasSubstr("there is no format \"png\"; known: text, svg, html"));
  EXPECT_THAT(error_text<c10::IndexError>([&] { draw(mesh, {2}, {Shard(0)}, {.dims = {3}}); }),
              HasSubstr("fix: pass dims from 0 to 0"));
  EXPECT_THAT(error_text<c10::ValueError>([&] {
                draw(mesh, {2, 2}, {Shard(0)}, {.dims = {1, -1}});
              }),
              HasSubstr("cannot draw the dims [1,1] in a plane"));
  EXPECT_THAT(error_text<c10::TypeError>([] { visualize_sharding(at::ones({2})); }),
              HasSubstr("f32[2] is not a DTensor"));
}

TEST(Visualize, SvgHasOneCellPerPieceAndOneColourPerSetOfRanks) {
  const std::string svg = draw(mesh_of({2, 2}, {"dp", "tp"}), {8, 4}, {Shard(0), Replicate()}, {.format = "svg"});
  EXPECT_EQ(count(svg, "class=\"cell\""), 2);
  EXPECT_THAT(svg, HasSubstr("data-ranks=\"0 1\""));
  EXPECT_THAT(svg, HasSubstr("data-ranks=\"2 3\""));
  EXPECT_EQ(count(svg, "<svg"), 1);
  EXPECT_EQ(count(svg, "</svg>"), 1);
}

TEST(Visualize, HtmlIsOnePageThatNeedsNothingElse) {
  const std::string html = draw(mesh_of({4}, {"<b>"}), {5, 3}, {Shard(0)}, {.format = "html"});
  EXPECT_THAT(html, HasSubstr("<!DOCTYPE html>"));
  EXPECT_THAT(html, HasSubstr("mesh &lt;b&gt;=4"));
  EXPECT_THAT(html, HasSubstr("<tr data-rank=\"3\" class=\"empty\">"));
  EXPECT_EQ(count(html, "data-rank=\""), 4);
  EXPECT_THAT(html, Not(HasSubstr("src=")));
  EXPECT_THAT(html, Not(HasSubstr("href=")));
}

TEST(Visualize, ADTensorIsDrawnByItsSpec) {
  const DeviceMesh mesh = mesh_of({2}, {"x"});
  const DTensor d = DTensor::from_local(at::ones({2, 3}), mesh, {Shard(0)});
  EXPECT_EQ(visualize_sharding(d), draw(mesh, {4, 3}, {Shard(0)}));
}

}  // namespace
}  // namespace serried
