// DistributedSampler against what PyTorch's gives, alone and inside a data loader.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <sstream>
#include <thread>

#include "serried/comm/groups/ranks.h"
#include "serried/parallel/sampler.h"
#include "tests/support/errors.h"

namespace serried {
namespace {

using testing::error_text;
using SampleIndices = std::vector<size_t>;
using LibTorchSampler = torch::data::samplers::DistributedRandomSampler;

template <class Sampler>
SampleIndices rest_of(Sampler& sampler) {
  SampleIndices all;
  while (const auto batch = sampler.next(3)) all.insert(all.end(), batch->begin(), batch->end());
  return all;
}

struct Deal {
  size_t size;
  int64_t num_replicas;
  uint64_t seed;
  int64_t epoch;
  bool shuffle;
  bool drop_last;
  std::vector<SampleIndices> expected;  // recorded from torch.utils.data.DistributedSampler of PyTorch 2.13
};

const std::vector<Deal> kRecordedDeals = {
    {10, 3, 0, 0, true, false, {{4, 5, 0, 2}, {1, 3, 8, 4}, {7, 9, 6, 1}}},
    {10, 3, 7, 2, true, false, {{0, 7, 9, 3}, {5, 6, 1, 0}, {8, 2, 4, 5}}},
    {10, 3, 7, 2, true, true, {{0, 7, 9}, {5, 6, 1}, {8, 2, 4}}},
    {10, 4, 0, 0, false, false, {{0, 4, 8}, {1, 5, 9}, {2, 6, 0}, {3, 7, 1}}},
    {10, 4, 0, 0, false, true, {{0, 4}, {1, 5}, {2, 6}, {3, 7}}},
    {2, 5, 3, 1, true, false, {{0}, {1}, {0}, {1}, {0}}},
    {2, 5, 3, 1, true, true, {{}, {}, {}, {}, {}}},
    {8, 4, 0, 5, true, false, {{3, 1}, {6, 4}, {0, 5}, {2, 7}}},
    {7, 1, 1, 1, true, false, {{2, 4, 3, 0, 6, 1, 5}}},
    {0, 2, 0, 0, true, false, {{}, {}}},
};

TEST(DistributedSampler, DealsAsPyTorchDoes) {
  for (const Deal& c : kRecordedDeals) {
    for (int64_t rank = 0; rank < c.num_replicas; ++rank) {
      DistributedSampler sampler(c.size, {.shuffle = c.shuffle,
                                          .seed = c.seed,
                                          .drop_last = c.drop_last,
                                          .num_replicas = c.num_replicas,
                                          .rank = rank});
      sampler.set_epoch(c.epoch);
      sampler.reset();
      EXPECT_EQ(sampler.num_samples(), c.expected[size_t(rank)].size());
      EXPECT_EQ(rest_of(sampler), c.expected[size_t(rank)]) << c.size << " samples, rank " << rank;
    }
  }
}

TEST(DistributedSampler, WithoutPaddingDealsEverySampleOnce) {
  for (const size_t size : {0, 1, 2, 7, 8, 9}) {
    for (int64_t replicas = 1; replicas <= 4; ++replicas) {
      SampleIndices all;
      for (int64_t rank = 0; rank < replicas; ++rank) {
        DistributedSampler sampler(size, {.seed = 3, .pad = false, .num_replicas = replicas, .rank = rank});
        const SampleIndices mine = rest_of(sampler);
        EXPECT_EQ(mine.size(), sampler.num_samples());
        EXPECT_GE(mine.size(), size / size_t(replicas));
        all.insert(all.end(), mine.begin(), mine.end());
      }
      std::sort(all.begin(), all.end());
      SampleIndices expected(size);
      std::iota(expected.begin(), expected.end(), size_t(0));
      EXPECT_EQ(all, expected) << size << " samples, " << replicas << " ranks";
    }
  }
}

TEST(DistributedSampler, TakesRankAndSizeFromTheGroup) {
  run_ranks(3, [](const Group& g) {
    const SampleIndices expected = kRecordedDeals[0].expected[size_t(g->getRank())];
    DistributedSampler given(10, {.process_group = g});
    DistributedSampler current(10);
    EXPECT_EQ(rest_of(given), expected);
    EXPECT_EQ(rest_of(current), expected);
  });
}

TEST(DistributedSampler, GivesEveryThreadTheSameOrderAndLeavesTheDefaultGeneratorAlone) {
  at::manual_seed(1);
  const at::Tensor expected = at::rand({3});
  at::manual_seed(1);
  SampleIndices here;
  SampleIndices there;
  const auto deal = [](SampleIndices& out) {
    DistributedSampler sampler(100, {.seed = 5, .num_replicas = 2, .rank = 1});
    out = rest_of(sampler);
  };
  deal(here);
  std::thread(deal, std::ref(there)).join();
  EXPECT_EQ(here, there);
  EXPECT_TRUE(at::rand({3}).equal(expected));
}

TEST(DistributedSampler, TakesANewSizeWithReset) {
  DistributedSampler sampler(4, {.shuffle = false, .num_replicas = 2, .rank = 1});
  sampler.reset(7);
  EXPECT_EQ(rest_of(sampler), (SampleIndices{1, 3, 5, 0}));
  sampler.reset();
  EXPECT_EQ(sampler.num_samples(), 4u);
}

TEST(DistributedSampler, GoesOnInTheMiddleOfASavedEpoch) {
  const DistributedSamplerOptions options{.seed = 3, .num_replicas = 2, .rank = 0};
  DistributedSampler first(11, options);
  first.set_epoch(4);
  first.reset();
  first.next(2);
  torch::serialize::OutputArchive saved;
  first.save(saved);
  std::stringstream bytes;
  saved.save_to(bytes);

  DistributedSampler second(11, options);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes);
  second.load(archive);
  EXPECT_EQ(second.epoch(), 4);
  EXPECT_EQ(rest_of(second), rest_of(first));
}

// A dataset whose samples are their own indices.
struct Counting : torch::data::datasets::Dataset<Counting, int64_t> {
  explicit Counting(size_t size) : count(size) {}
  int64_t get(size_t index) override { return int64_t(index); }
  std::optional<size_t> size() const override { return count; }
  size_t count;
};

template <class Loader>
std::vector<int64_t> epoch_of(Loader& loader) {
  std::vector<int64_t> seen;
  for (const auto& batch : loader) seen.insert(seen.end(), batch.begin(), batch.end());
  return seen;
}

// What a checkpoint does that was written when an epoch was over.
TEST(DistributedSampler, GoesOnAtTheEndOfAnEpochForOneEpochOnly) {
  const auto samples_of_epoch = [](DistributedSampler& sampler) {
    sampler.reset();
    size_t count = 0;
    while (const auto batch = sampler.next(3)) count += batch->size();
    return count;
  };
  struct Case {
    bool drop_last;
    size_t consumed, per_epoch;
  };
  // With drop_last 9 of 10 is the end, too: less than a round is left.
  for (const Case& c : {Case{false, 10, 5}, Case{true, 10, 5}, Case{true, 9, 5}}) {
    DistributedSampler sampler(10, {.shuffle = false, .drop_last = c.drop_last, .num_replicas = 2, .rank = 1});
    DistributedSampler copy = sampler;  // as a loader keeps one
    sampler.go_on(0, c.consumed);
    EXPECT_EQ(samples_of_epoch(copy), 0u);
    EXPECT_EQ(samples_of_epoch(copy), c.per_epoch);
    EXPECT_EQ(samples_of_epoch(copy), c.per_epoch);
    sampler.go_on(0, c.consumed);
    sampler.set_epoch(1);
    EXPECT_EQ(samples_of_epoch(copy), c.per_epoch);
    sampler.set_epoch(0);
    EXPECT_EQ(samples_of_epoch(copy), c.per_epoch);
  }
}

TEST(DistributedSampler, FeedsADataLoaderOnEveryRank) {
  for (size_t workers : {0, 2}) {
    std::vector<std::vector<std::vector<int64_t>>> seen(2, std::vector<std::vector<int64_t>>(3));  // [epoch][rank]
    run_ranks(3, [&](const Group& g) {
      DistributedSampler sampler(10, {.process_group = g, .seed = 6});
      const auto loader = torch::data::make_data_loader(
          Counting(10), sampler, torch::data::DataLoaderOptions().batch_size(3).workers(workers));
      for (int64_t epoch = 0; epoch < 2; ++epoch) {
        sampler.set_epoch(epoch);  // the loader's copy follows
        seen[size_t(epoch)][size_t(g->getRank())] = epoch_of(*loader);
      }
    });
    for (const auto& epoch : seen) {
      std::multiset<int64_t> all;
      for (const auto& samples : epoch) {
        EXPECT_EQ(samples.size(), 4u);
        all.insert(samples.begin(), samples.end());
      }
      for (int64_t i = 0; i < 10; ++i) EXPECT_GE(all.count(i), 1u) << "sample " << i;
    }
    EXPECT_NE(seen[0], seen[1]);
    // Seed 6 and epoch 1 are PyTorch's seed 7 and epoch 0.
    DistributedSampler same(10, {.seed = 7, .num_replicas = 3, .rank = 2});
    const SampleIndices expected = rest_of(same);
    EXPECT_EQ(seen[1][2], std::vector<int64_t>(expected.begin(), expected.end()));
  }
}

TEST(DistributedSampler, NamesARankThatDoesNotExist) {
  EXPECT_EQ(error_text<c10::ValueError>([] { DistributedSampler(4, {.num_replicas = 2, .rank = 2}); }),
            "[DistributedSampler] rank is 2 of 2 replicas\n  fix: pass a rank from 0 to num_replicas - 1");
  EXPECT_EQ(error_text<c10::ValueError>([] { DistributedSampler(4, {.num_replicas = 0, .rank = 0}); }),
            "[DistributedSampler] rank is 0 of 0 replicas\n  fix: pass a rank from 0 to num_replicas - 1");
}

TEST(DistributedSampler, WantsBothNumReplicasAndRank) {
  const std::string fix = "\n  fix: give both, or a process_group instead";
  EXPECT_EQ(error_text<c10::ValueError>([] { DistributedSampler(4, {.num_replicas = 2}); }),
            "[DistributedSampler] num_replicas is 2 and rank is not given" + fix);
  EXPECT_EQ(error_text<c10::ValueError>([] { DistributedSampler(4, {.rank = 1}); }),
            "[DistributedSampler] rank is 1 and num_replicas is not given" + fix);
}

TEST(DistributedSampler, WantsAGroup) {
  EXPECT_THROW(DistributedSampler(4), c10::ValueError);
}

// Why LibTorch's own does not do: each of these is a promise of PyTorch's sampler that it breaks.
TEST(LibTorchSampler, AsksForSamplesThatAreNotThere) {
  size_t largest = 0;
  for (size_t rank = 0; rank < 5; ++rank) {
    LibTorchSampler sampler(2, 5, rank);
    for (size_t index : rest_of(sampler)) largest = std::max(largest, index);
  }
  EXPECT_GE(largest, 2u) << "of a dataset of 2 samples";
}

TEST(LibTorchSampler, LeavesTheSameTailOutInEveryEpoch) {
  std::set<size_t> seen;
  for (size_t epoch = 0; epoch < 50; ++epoch) {
    for (size_t rank = 0; rank < 3; ++rank) {
      LibTorchSampler sampler(11, 3, rank, /*allow_duplicates=*/false);
      sampler.set_epoch(epoch);
      sampler.reset();
      for (size_t index : rest_of(sampler)) seen.insert(index);
    }
  }
  EXPECT_EQ(seen.size(), 9u) << "of 11 samples";
}

TEST(LibTorchSampler, CannotBeToldTheEpochOnceALoaderHasIt) {
  LibTorchSampler sampler(20, 2, 0);
  const auto loader = torch::data::make_data_loader(Counting(20), sampler, 4);
  const std::vector<int64_t> first = epoch_of(*loader);
  sampler.set_epoch(1);
  EXPECT_EQ(epoch_of(*loader), first);
}

}  // namespace
}  // namespace serried
