// gather_rows_into: tensors that lie side by side on each rank arrive whole, each in its place.
#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "serried/comm/collectives/observe.h"
#include "serried/comm/collectives/pieces.h"
#include "serried/comm/collectives/rows.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"
#include "tests/support/on_ranks.h"

namespace serried::testing {
namespace {

using detail::append;
using detail::RowsOfTensor;

/// Tensors [outer, rows, inner], how they lie on each rank, and what they are whole.
struct Laid {
  std::vector<int64_t> table;
  at::Tensor mine, whole;  // zero where the table names nothing
};

Laid laid_out(const std::vector<std::array<int64_t, 3>>& shapes, const Group& group,
              at::ScalarType dtype = at::kFloat) {
  Laid laid;
  std::vector<at::Tensor> mine, whole;
  int64_t from = 3, to = 5;
  for (const auto& [outer, rows, inner] : shapes) {
    const at::Tensor all = sample({outer, rows, inner}, 1, dtype, from);
    append(laid.table, {.from = from, .to = to, .outer = outer, .rows = rows, .inner = inner});
    const std::vector<int64_t> sizes = detail::shard_sizes(rows, group->getSize());
    const at::Tensor part = all.split_with_sizes(sizes, 1)[size_t(group->getRank())].contiguous().view({-1});
    const int64_t room = outer * sizes[0] * inner + 2;
    mine.push_back(at::zeros({from + part.numel()}, dtype));
    mine.back().narrow(0, from, part.numel()).copy_(part);
    whole.push_back(at::zeros({to + all.numel()}, dtype));
    whole.back().narrow(0, to, all.numel()).copy_(all.view({-1}));
    from += room;
    to += all.numel() + 3;
  }
  laid.mine = at::zeros({from}, dtype);
  laid.whole = at::zeros({to}, dtype);
  for (const at::Tensor& x : mine) laid.mine.narrow(0, 0, x.numel()).add_(x);
  for (const at::Tensor& x : whole) laid.whole.narrow(0, 0, x.numel()).add_(x);
  return laid;
}

using GatherRows = OnRanks;

const std::vector<std::array<int64_t, 3>> kUneven = {{1, 7, 5}, {3, 5, 2}, {1, 1, 1}, {2, 0, 3}, {1, 3, 0}, {4, 2, 1}};
const std::vector<std::array<int64_t, 3>> kLarge = {{1, 1001, 37}, {17, 301, 11}, {1, 2, 3}};

TEST_P(GatherRows, PutsUnevenAndEmptyPartsOfAnyDimInTheirPlaces) {
  on_ranks([](const Group& group) {
    for (const auto& shapes : {kUneven, kLarge}) {
      const Laid laid = laid_out(shapes, group);
      const at::Tensor whole = at::zeros_like(laid.whole);
      detail::ops::gather_rows_into(whole, laid.mine, group, laid.table);
      expect_equal(whole, laid.whole);
    }
  });
}

TEST_P(GatherRows, DoesSoOfTensorsInTheGroupsOwnMemoryAndOfEveryDtype) {
  on_ranks([&](const Group& group) {
    for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16, at::kLong, at::kByte}) {
      const Laid laid = laid_out(kUneven, group, dtype);
      const at::Tensor whole = at::zeros_like(laid.whole);
      detail::ops::gather_rows_into(whole, laid.mine, group, laid.table);
      expect_equal(whole, laid.whole);
    }
    if (!is("shm")) return;
    const Laid laid = laid_out(kLarge, group);
    const at::Tensor mine = group->getBackend(at::kCPU)->allocateTensor(laid.mine.numel(), laid.mine.options());
    mine.copy_(laid.mine);
    const at::Tensor whole = at::zeros_like(laid.whole);
    detail::ops::gather_rows_into(whole, mine, group, laid.table);
    expect_equal(whole, laid.whole);
  });
}

TEST_P(GatherRows, MayBeStartedAndWaitedForLaterInTheOrderOfTheCalls) {
  on_ranks([](const Group& group) {
    const Laid first = laid_out(kLarge, group), second = laid_out(kUneven, group);
    const at::Tensor a = at::zeros_like(first.whole), b = at::zeros_like(second.whole);
    detail::WorkPtr one, two;
    detail::ops::gather_rows_into(a, first.mine, group, first.table, &one);
    detail::ops::gather_rows_into(b, second.mine, group, second.table, &two);
    two->wait();
    one->wait();
    expect_equal(a, first.whole);
    expect_equal(b, second.whole);
  });
}

TEST_P(GatherRows, IsOneAllGatherToThoseWhoWatch) {
  on_ranks([&](const Group& group) {
    const Laid laid = laid_out(kUneven, group);
    const at::Tensor whole = at::zeros_like(laid.whole);
    std::vector<std::string> calls;
    const observe::Observer observer(
        [&](const observe::Call& call) { calls.push_back(c10::str(call.name, " ", call.bytes)); });
    detail::ops::gather_rows_into(whole, laid.mine, group, laid.table);
    const std::vector<std::string> expected(world_size() > 1 ? 1 : 0, c10::str("all_gather ", laid.mine.nbytes()));
    EXPECT_EQ(calls, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Backends, GatherRows, ::testing::ValuesIn(settings({1, 2, 3, 4})), name_of);

TEST(GatherRowsInShm, GoesThroughTheStageWhereMemoryIsOutOfReach) {
  run_ranks(3, [](const Group& g) {
    const Group staged = new_group(
        "shm",
        {.store = g->getStore(), .rank = g->getRank(), .world_size = 3, .backend_options = {{"always_stage", true}}});
    for (const auto& shapes : {kUneven, kLarge}) {
      const Laid laid = laid_out(shapes, g);
      const at::Tensor whole = at::zeros_like(laid.whole);
      detail::ops::gather_rows_into(whole, laid.mine, staged, laid.table);
      expect_equal(whole, laid.whole);
    }
  });
}

TEST(GatherRowsErrors, BuffersOfDifferentLengthsAreToldApart) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor mine = at::ones({group->getRank() == 0 ? 8 : 12}), whole = at::zeros({8});
    std::vector<int64_t> table;
    append(table, RowsOfTensor{.from = 0, .to = 0, .rows = 4});
    const std::string text =
        error_text<c10::DistBackendError>([&] { detail::ops::gather_rows_into(whole, mine, group, table); });
    EXPECT_NE(text.find("bytes where rank"), std::string::npos) << text;
  });
}

TEST(GatherRowsErrors, ATableThatLeavesItsTensorsIsRefused) {
  run_ranks(2, [](const Group& group) {
    const at::Tensor mine = at::ones({4}), whole = at::zeros({8});
    for (const RowsOfTensor& wrong : {RowsOfTensor{.from = 3, .to = 0, .rows = 4}, RowsOfTensor{.to = 5, .rows = 4},
                                      RowsOfTensor{.from = -1, .rows = 1}}) {
      std::vector<int64_t> table;
      append(table, wrong);
      const std::string text =
          error_text<c10::ValueError>([&] { detail::ops::gather_rows_into(whole, mine, group, table); });
      EXPECT_NE(text.find("does not fit f32[4] on each of 2 ranks and f32[8]"), std::string::npos) << text;
    }
  });
}

}  // namespace
}  // namespace serried::testing
