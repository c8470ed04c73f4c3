// Views that split a cut dim into heads which the ranks do not divide: right, moved, and said once.
#include "serried/tensor/dispatch/view_gathers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/tensor/constrain.h"
#include "serried/tensor/guards.h"
#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

using ::testing::HasSubstr;

// What the ranks print while `fn` runs on a mesh "tp" of `ranks`. Sizes that no other test has: a process warns once.
std::string printed(int ranks, const std::function<void(const DeviceMesh&)>& fn) {
  ::testing::internal::CaptureStderr();
  run_ranks(ranks, [&](const Group& group) { fn(init_device_mesh("cpu", {ranks}, {"tp"}, {.group = group})); });
  return ::testing::internal::GetCapturedStderr();
}

// A number of rows that this process has not had: tests may be repeated.
int64_t new_rows() {
  static int64_t rows = 1;
  return ++rows;
}

void expect_heads(const DTensor& x, at::IntArrayRef sizes) {
  const at::Tensor y = at::Tensor(x).view(sizes);
  EXPECT_TRUE(full(y).equal(full(x).view(sizes)));
}

TEST(ViewGathers, HeadsThatRanksDoNotDivideAreSaidOnce) {
  const int64_t rows = new_rows();
  const std::string text = printed(2, [&](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(iota({rows, 3, 36}), mesh, {Shard(2)});
    expect_heads(x, {rows, 3, 9, 4});
    expect_heads(x, {rows, 3, 9, 4});
  });
  EXPECT_EQ(text,
            c10::str("[serried rank 0/2 warning] [aten::view] f64[", rows,
                     ",3,36] S2 on mesh tp=2 is moved to R: dim 2 becomes [9,4], and the 2 ranks of \"tp\" do not "
                     "divide 9\n  fix: choose a multiple of 2 in place of 9, the heads of an attention; or ask "
                     "for the move: constrain(x, parse_placements(\"R\")) before the view, or that layout as the "
                     "output of the module's style\n  at:  rank 0/2\n"));
}

TEST(ViewGathers, FusedProjectionsAreLookedAtOneByOne) {
  const int64_t rows = new_rows();
  const std::string text = printed(2, [&](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(iota({rows, 90}), mesh, {StridedShard(1, 3)});
    expect_heads(x, {rows, 3, 5, 6});
  });
  EXPECT_THAT(text, HasSubstr("dim 1 becomes [3,5,6], and the 2 ranks of \"tp\" do not divide 5\n"));
}

TEST(ViewGathers, HeadsThatMergeWithTheBatchAreSeen) {
  const int64_t rows = new_rows();
  const std::string text = printed(2, [&](const DeviceMesh& mesh) {
    const DTensor x = distribute_tensor(iota({5, rows, 28}), mesh, {Shard(2)});
    expect_heads(x, {5, 7 * rows, 4});
  });
  EXPECT_THAT(text, HasSubstr("dim 2 becomes [7,4], and the 2 ranks of \"tp\" do not divide 7\n"));
}

TEST(ViewGathers, AxesThatCutTheSameDimCountTogether) {
  const int64_t rows = new_rows();
  ::testing::internal::CaptureStderr();
  run_ranks(4, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2, 2}, {"a", "b"}, {.group = group});
    expect_heads(distribute_tensor(iota({rows, 24}), mesh, {Shard(1), Shard(1)}), {rows, 6, 4});
  });
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("dim 1 becomes [6,4], and the 4 ranks that cut it do not divide 6\n"));
}

TEST(ViewGathers, NothingIsSaidWhereRanksDivideHeads) {
  EXPECT_EQ(printed(2,
                    [](const DeviceMesh& mesh) {
                      expect_heads(distribute_tensor(iota({2, 3, 40}), mesh, {Shard(2)}), {2, 3, 10, 4});
                      expect_heads(distribute_tensor(iota({2, 120}), mesh, {StridedShard(1, 3)}), {2, 3, 10, 4});
                      expect_heads(distribute_tensor(iota({4, 3, 44}), mesh, {Shard(0)}), {4, 3, 11, 4});
                      expect_heads(distribute_tensor(iota({5, 3, 40}), mesh, {Shard(2)}), {15, 40});
                    }),
            "");
}

TEST(ViewGathers, NothingIsSaidToThoseWhoAskedForTheMove) {
  EXPECT_EQ(printed(2,
                    [](const DeviceMesh& mesh) {
                      const DTensor x = distribute_tensor(iota({2, 3, 52}), mesh, {Shard(2)});
                      expect_heads(DTensor(constrain(x, {Replicate()})), {2, 3, 13, 4});
                      expect_heads(x.redistribute({Replicate()}), {2, 3, 13, 4});
                    }),
            "");
}

TEST(ViewGathers, AScopeThatForbidsTheMoveNeedsNoWarning) {
  EXPECT_EQ(printed(2,
                    [](const DeviceMesh& mesh) {
                      const DTensor x = distribute_tensor(iota({2, 3, 60}), mesh, {Shard(2)});
                      const ExplicitRedistribution scope;
                      EXPECT_THROW(at::Tensor(x).view({2, 3, 15, 4}), c10::ValueError);
                    }),
            "");
}

}  // namespace
}  // namespace serried::testing
