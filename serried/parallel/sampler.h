// Which samples of a dataset each rank sees: for torch::data::make_data_loader.
#pragma once

#include <torch/data/samplers/base.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "serried/comm/groups/group.h"

namespace serried {

struct DistributedSamplerOptions {
  Group process_group = {};  // default: the current group; not needed with num_replicas and rank
  bool shuffle = true;
  uint64_t seed = 0;       // the same on every rank
  bool drop_last = false;  // leave the tail out that does not divide by the ranks, instead of repeating samples
  bool pad = true;         // false: repeat no sample, so that some ranks get one fewer: for evaluation
  std::optional<int64_t> num_replicas = std::nullopt;  // instead of the size of the group
  std::optional<int64_t> rank = std::nullopt;          // instead of the rank in the group
};

/// Deals a dataset of `size` samples out to the ranks: the same number to each, every sample to one, except that the
/// first are dealt again where the last round would not be full, unless `pad` is false. The order is that of PyTorch's
/// DistributedSampler, sample by sample: torch::randperm of a generator seeded with seed + epoch, whatever thread asks
/// and whatever other generators did. Communicates nothing. Copies share their epoch and how far they are, because a
/// data loader keeps a copy:
///     DistributedSampler sampler(dataset.size().value(), {.process_group = world, .seed = 7});
///     auto loader = torch::data::make_data_loader(dataset, sampler, 32);
///     for (int epoch = 0; epoch < 10; ++epoch) {
///       sampler.set_epoch(epoch);
///       for (auto& batch : *loader) ...
///     }
/// LibTorch's DistributedRandomSampler has no seed, cannot be told the epoch once a loader has it, leaves out the same
/// tail in every epoch, and asks for samples that are not there where the dataset is much smaller than the world.
class DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  explicit DistributedSampler(size_t size, const DistributedSamplerOptions& options = {});

  /// Another order from the next reset() on, which a loader calls when it begins. The same on every rank.
  void set_epoch(int64_t epoch) { shared_->epoch.store(epoch); }
  int64_t epoch() const { return shared_->epoch.load(); }

  /// How many samples this rank gets per epoch: the same on all, unless `pad` is false.
  size_t num_samples() const;

  void reset(std::optional<size_t> new_size = std::nullopt) override;
  std::optional<std::vector<size_t>> next(size_t batch_size) override;

  /// How many samples of the epoch all ranks have been given, if every rank has been given as many as this one, by
  /// whichever copy. A loader with workers asks for batches ahead of time.
  size_t consumed() const { return is_in_epoch() ? shared_->consumed.load() : 0; }

  /// Whether this rank has been given all of its samples of the epoch. Where `pad` is false others may have one more.
  bool is_at_end() const { return is_in_epoch() && shared_->is_at_end.load(); }

  /// Of the dataset.
  size_t size() const { return size_; }

  /// The seed of the order; none where samples come as they lie.
  std::optional<uint64_t> order_seed() const { return shuffle_ ? std::optional(seed_) : std::nullopt; }

  /// Goes on behind the first `consumed` samples of an epoch, whoever had those: another number of ranks, maybe. What
  /// is left is dealt out round by round, also by copies that are reset in this epoch before the first next(). Where
  /// nothing is left that epoch is empty, once.
  void go_on(int64_t epoch, size_t consumed);

  /// Epoch and position: `load` goes on in the middle of an epoch.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  /// False between set_epoch() and the reset() that begins another one.
  bool is_in_epoch() const { return shared_->dealt_epoch == shared_->epoch; }
  void deal();
  void note_position();
  size_t num_rounds(size_t num_left) const;

  /// What copies share: a loader keeps one.
  struct Shared {
    std::atomic<int64_t> epoch = 0;
    std::atomic<int64_t> dealt_epoch = 0;  // whose samples are being given
    std::atomic<size_t> consumed = 0;
    std::atomic<bool> is_at_end = false;
    std::atomic<int64_t> start_epoch = -1;  // go_on() was called for it, and next() not since
    std::atomic<size_t> start = 0;
  };

  size_t size_;
  bool shuffle_;
  uint64_t seed_;
  bool drop_last_;
  bool pad_;
  size_t num_replicas_ = 1;
  size_t rank_ = 0;
  std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  size_t first_ = 0;          // samples of the epoch that were dealt before go_on()
  std::vector<size_t> mine_;  // this rank's samples of the rest of it
  size_t position_ = 0;       // in mine_
};

}  // namespace serried
