// What gives a training its data: loaders that are stopped anywhere go on with what was left, generators with what came
// next.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/state_dict.h"
#include "serried/comm/groups/ranks.h"
#include "serried/tensor/making/factories.h"
#include "serried/tensor/random/random.h"
#include "tests/checkpoint/folder.h"
#include "tests/support/close.h"
#include "tests/support/errors.h"

namespace serried::testing {
namespace {

using checkpoint::state_of;

/// Each sample is its number.
struct Numbered : torch::data::datasets::Dataset<Numbered, int64_t> {
  explicit Numbered(size_t count) : count_(count) {}
  int64_t get(size_t index) override { return int64_t(index); }
  std::optional<size_t> size() const override { return count_; }

 private:
  size_t count_;
};

constexpr size_t kSamples = 10, kBatch = 3;
constexpr int64_t kEpochs = 3;

/// Batches of a training that loads `path`, if there is one, and saves and stops behind its `stop`-th batch.
std::vector<std::vector<int64_t>> batches(const std::string& path, int stop) {
  DistributedSampler sampler(kSamples, {.seed = 4, .num_replicas = 1, .rank = 0});
  const auto loader = torch::data::make_data_loader(Numbered(kSamples), sampler, kBatch);
  const checkpoint::Contents contents = {{"sampler", state_of(sampler)}};
  if (checkpoint::exists(path)) checkpoint::load(path, contents);
  std::vector<std::vector<int64_t>> seen;
  for (int64_t epoch = sampler.epoch(); epoch < kEpochs; ++epoch) {
    sampler.set_epoch(epoch);
    for (const std::vector<int64_t>& batch : *loader) {
      seen.push_back(batch);
      if (int(seen.size()) != stop) continue;
      checkpoint::save(path, contents);
      return seen;
    }
  }
  return seen;
}

TEST(CheckpointLoader, ALoopOverEpochsGoesOnBehindItsLastBatch) {
  const Folder folder;
  const std::vector<std::vector<int64_t>> whole = batches(folder / "none", -1);
  ASSERT_EQ(whole.size(), 12u);
  for (int first = 1; first <= 8; ++first) {
    for (int second : {1, 4}) {
      const std::string path = folder / c10::str(first, "_", second);
      std::vector<std::vector<int64_t>> seen = batches(path, first);
      for (int stop : {second, -1}) {
        const auto more = batches(path, stop);
        seen.insert(seen.end(), more.begin(), more.end());
      }
      EXPECT_EQ(seen, whole) << "stopped behind batch " << first << ", and " << second << " later";
    }
  }
}

TEST(CheckpointGenerators, OnesOfOnesOwnGoOnOnEachRank) {
  const Folder folder;
  for (const bool differ : {false, true}) {
    const std::string path = folder / (differ ? "differ" : "same");
    run_ranks(3, [&](const Group& world) {
      const auto make = [&] {
        return at::make_generator<at::CPUGeneratorImpl>(uint64_t(differ ? 5 + world->getRank() : 5));
      };
      at::Generator generator = make(), other = make();
      at::randn({7}, generator);
      const checkpoint::Contents contents = {{"augment", state_of(generator)}};
      checkpoint::save(path, contents);
      const checkpoint::StateDict state = checkpoint::get_state(contents);
      const at::Tensor expected = at::randn({5}, generator);
      checkpoint::load(path, {{"augment", state_of(other)}});
      expect_equal(at::randn({5}, other), expected);
      checkpoint::set_state({{"augment", state_of(other)}}, state);
      expect_equal(at::randn({5}, other), expected);
    });
    at::Generator alone = at::make_generator<at::CPUGeneratorImpl>(uint64_t(1));
    const std::string text = load_error(path, {{"augment", state_of(alone)}});
    EXPECT_EQ(text, differ ? "[checkpoint::load] the random generators of 3 ranks differed when they were saved, and 1 "
                             "rank loads\n  fix: load with as many ranks, or leave the random state out and seed anew"
                           : "no error");
  }
}

TEST(CheckpointGenerators, AreNoOtherThings) {
  const Folder folder;
  EXPECT_EQ(
      error_text<c10::ValueError>([] { (void)state_of(at::Generator()); }),
      "[checkpoint::state_of] the generator is undefined\n  fix: pass one that was made, as by at::make_generator");
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t(1));
  checkpoint::save(folder / "c", {{"all", checkpoint::random_state()}, {"mine", state_of(generator)}});
  EXPECT_EQ(load_error(folder / "c", {{"all", state_of(generator)}}),
            "[checkpoint::load] it is no random generator in the checkpoint\n  fix: give it the name that it was saved "
            "under");
  EXPECT_EQ(
      load_error(folder / "c", {{"mine", checkpoint::random_state()}}),
      "[checkpoint::load] it is no random state in the checkpoint\n  fix: give it the name that it was saved under");
  std::string text = content_of(folder / "c/index.json");
  text.replace(text.find("\"generator\": \"cpu\""), 18, "\"generator\": \"cuda\"");
  write_content(folder / "c/index.json", checkpoint::detail::with_checksum("{" + text.substr(text.find(',') + 1)));
  EXPECT_EQ(load_error(folder / "c", {{"mine", state_of(generator)}}),
            "[checkpoint::load] a random generator is one of \"cuda\" in the checkpoint, and of \"cpu\" here\n  fix: "
            "load into a generator of the same kind of device");
}

// Each rank had its own when it was saved: replicas that are drawn from them would differ.
TEST(CheckpointGenerators, StatesThatDifferBetweenRanksAreFoundByTheNextDraw) {
  const Folder folder;
  run_ranks(2, [&](const Group& group) {
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"dp"}, {.group = group});
    const auto draw = [&] { (void)serried::randn({3}, mesh, {Replicate()}); };
    const checkpoint::Contents contents = {{"random", checkpoint::random_state()}};
    rank_generator().set_current_seed(uint64_t(group->getRank()));
    checkpoint::save(folder / "differ", contents);
    manual_seed(3, mesh);
    checkpoint::save(folder / "agree", contents);
    draw();  // found equal
    checkpoint::load(folder / "agree", contents);
    EXPECT_EQ(error_text<c10::ValueError>(draw), "no error");
    checkpoint::load(folder / "differ", contents);
    EXPECT_EQ(error_text<c10::ValueError>(draw).find("[random] the generators of ranks 1 differ from rank 0's on "),
              0u);
    manual_seed(3, mesh);
    const checkpoint::StateDict agree = checkpoint::get_state(contents);
    rank_generator().set_current_seed(uint64_t(group->getRank()));
    const checkpoint::StateDict differ = checkpoint::get_state(contents);
    checkpoint::set_state(contents, agree);
    draw();
    checkpoint::set_state(contents, differ);
    EXPECT_EQ(error_text<c10::ValueError>(draw).find("[random] the generators of ranks 1 differ from rank 0's on "),
              0u);
  });
}

}  // namespace
}  // namespace serried::testing
