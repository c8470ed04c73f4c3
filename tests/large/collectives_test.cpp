// Collectives of more bytes, and of more elements, than 32 bits count.
//
// Tensors are zeros but for marks around the places where a 32-bit count would break: pages of zeros that nobody writes
// take no memory, so only outputs do.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/groups/ranks.h"
#include "tests/support/on_ranks.h"

namespace serried {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr int64_t kTwo31 = int64_t(1) << 31;
constexpr int64_t kTwo32 = int64_t(1) << 32;

using testing::Setting;

/// Between processes, which copies through the segment.
class LargeCollectives : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, LargeCollectives, ::testing::ValuesIn(std::vector<Setting>{{"shm_staged", 2}}),
                         testing::name_of);

/// The ends, and both sides of every border of 32 bits that lies inside.
std::vector<int64_t> places(int64_t size) {
  std::vector<int64_t> all{0, size - 1};
  for (const int64_t border : {kTwo31, kTwo32, kTwo31 / 4, kTwo32 / 4}) {
    for (const int64_t place : {border - 1, border, border + 1}) {
      if (place > 0 && place < size - 1) all.push_back(place);
    }
  }
  return all;
}

/// The mark of `rank` at the i-th place; never 0, and sums of two ranks fit.
int mark(int rank, size_t i) {
  return 1 + int(i % 5) + 8 * rank;
}

void mark_all(const at::Tensor& x, int rank) {
  const std::vector<int64_t> where = places(x.numel());
  for (size_t i = 0; i < where.size(); ++i) x[where[i]] = mark(rank, i);
}

at::Tensor marked(int64_t size, int rank, at::ScalarType dtype = at::kByte) {
  at::Tensor x = at::zeros({size}, dtype);
  mark_all(x, rank);
  return x;
}

/// That `x` has these marks and no others.
void expect_marks(const at::Tensor& x, int64_t size, const std::function<int(size_t)>& expected, const char* what) {
  ASSERT_EQ(x.numel(), size) << what;
  const std::vector<int64_t> where = places(size);
  for (size_t i = 0; i < where.size(); ++i) {
    EXPECT_EQ(x[where[i]].item<int>(), expected(i)) << what << " at " << where[i];
  }
  EXPECT_EQ(at::count_nonzero(x).item<int64_t>(), int64_t(where.size())) << what;
}

void expect_from(const at::Tensor& x, int64_t size, int rank, const char* what) {
  expect_marks(
      x, size, [rank](size_t i) { return mark(rank, i); }, what);
}

void expect_sum(const at::Tensor& x, int64_t size, const char* what) {
  expect_marks(
      x, size, [](size_t i) { return mark(0, i) + mark(1, i); }, what);
}

constexpr int64_t kElements = kTwo31 + 77;    // of one byte
constexpr int64_t kFloats = kTwo31 / 4 + 77;  // of four
constexpr int64_t kPiece = kTwo31 / 2 + 77;   // two of them pass the border

TEST_P(LargeCollectives, AllGatherOfPiecesThatDiffer) {
  on_ranks([&](const Group& g) {
    const int64_t sizes[] = {5, kElements};
    const at::Tensor x = all_gather(marked(sizes[g->getRank()], g->getRank()), g);
    expect_from(x.narrow(0, 0, 5), 5, 0, "short");
    expect_from(x.narrow(0, 5, kElements), kElements, 1, "long");
  });
}

TEST_P(LargeCollectives, ReduceScatter) {
  on_ranks([&](const Group& g) {
    const at::Tensor whole = at::zeros({2 * kPiece}, at::kByte);
    for (int r = 0; r < 2; ++r) mark_all(whole.narrow(0, r * kPiece, kPiece), g->getRank());
    expect_sum(reduce_scatter(whole, g), kPiece, "u8");
  });
}

/// What each rank sends to each: rank 0 sends[0], and so on.
void expect_exchanged(const Group& g, const std::vector<std::vector<int64_t>>& sends) {
  const std::vector<int64_t>& mine = sends[size_t(g->getRank())];
  const at::Tensor whole = at::zeros({mine[0] + mine[1]}, at::kByte);
  mark_all(whole.narrow(0, 0, mine[0]), g->getRank());
  mark_all(whole.narrow(0, mine[0], mine[1]), g->getRank());
  const at::Tensor x = all_to_all(whole, g, {.split_sizes = mine});
  int64_t begin = 0;
  for (int from = 0; from < 2; ++from) {
    const int64_t size = sends[size_t(from)][size_t(g->getRank())];
    expect_from(x.narrow(0, begin, size), size, from, "all_to_all");
    begin += size;
  }
}

TEST_P(LargeCollectives, AllToAll) {
  on_ranks([&](const Group& g) { expect_exchanged(g, {{9, kElements}, {kElements + 3, 7}}); });
}

TEST_P(LargeCollectives, Gather) {
  on_ranks([&](const Group& g) {
    const int64_t sizes[] = {5, kElements};
    Tensors inputs{marked(sizes[g->getRank()], g->getRank())};
    std::vector<Tensors> outputs;
    if (g->getRank() == 0) outputs = {{at::zeros({5}, at::kByte), at::zeros({kElements}, at::kByte)}};
    g->gather(outputs, inputs, {})->wait();
    for (int r = 0; g->getRank() == 0 && r < 2; ++r) expect_from(outputs[0][size_t(r)], sizes[r], r, "gather");
  });
}

TEST_P(LargeCollectives, Scatter) {
  on_ranks([&](const Group& g) {
    const int64_t sizes[] = {5, kElements};
    Tensors outputs{at::zeros({sizes[g->getRank()]}, at::kByte)};
    std::vector<Tensors> inputs;
    if (g->getRank() == 0) inputs = {{marked(5, 0), marked(kElements, 1)}};
    g->scatter(outputs, inputs, {})->wait();
    expect_from(outputs[0], sizes[g->getRank()], g->getRank(), "scatter");
  });
}

TEST_P(LargeCollectives, ReduceOfFloats) {
  on_ranks([&](const Group& g) {
    Tensors tensors{marked(kFloats, g->getRank(), at::kFloat)};
    g->reduce(tensors, {})->wait();
    if (g->getRank() == 0) expect_sum(tensors[0], kFloats, "reduce");
  });
}

TEST_P(LargeCollectives, SendAndReceive) {
  on_ranks([&](const Group& g) {
    if (g->getRank() == 1) return send(marked(kElements, 1), g, {.peer = 0});
    const at::Tensor x = at::zeros({kElements}, at::kByte);
    recv(x, g, {.peer = 1});
    expect_from(x, kElements, 1, "u8");
  });
}

TEST_P(LargeCollectives, CoalescedTensors) {
  on_ranks([&](const Group& g) {
    Tensors tensors{marked(kElements, g->getRank()), marked(100, g->getRank())};
    g->allreduce_coalesced(tensors)->wait();
    expect_sum(tensors[0], kElements, "large");
    expect_sum(tensors[1], 100, "small");
  });
}

/// Where ranks reach each other's memory.
class LargeOnThreads : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, LargeOnThreads, ::testing::ValuesIn(std::vector<Setting>{{"threads", 2}}),
                         testing::name_of);

TEST_P(LargeOnThreads, AllToAllOfMoreThanFourBillionElements) {
  on_ranks([&](const Group& g) { expect_exchanged(g, {{7, kTwo32 + 5}, {9, 11}}); });
}

TEST_P(LargeOnThreads, AllReduceOfFloats) {
  on_ranks([&](const Group& g) {
    at::Tensor x = marked(kFloats, g->getRank(), at::kFloat);
    all_reduce_(x, g);
    expect_sum(x, kFloats, "f32");
  });
}

class LargeOnGloo : public testing::OnRanks {};

INSTANTIATE_TEST_SUITE_P(On, LargeOnGloo, ::testing::ValuesIn(std::vector<Setting>{{"gloo", 2}}), testing::name_of);

TEST_P(LargeOnGloo, AllGather) {
  on_ranks([&](const Group& g) {
    const at::Tensor x = all_gather(marked(kPiece, g->getRank()), g);
    for (int r = 0; r < 2; ++r) expect_from(x.narrow(0, r * kPiece, kPiece), kPiece, r, "all_gather");
  });
}

}  // namespace
}  // namespace serried
