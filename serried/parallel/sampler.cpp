// Deals samples out round by round.
#include "serried/parallel/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <numeric>

#include "serried/base/error.h"

namespace serried {
namespace {

constexpr const char* kSampler = "DistributedSampler";

// PyTorch's order for the same seed: a generator of its own, never the thread's or the process's.
std::vector<size_t> permutation(size_t size, uint64_t seed) {
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  const at::Tensor order = at::randperm(int64_t(size), generator, at::kLong);
  const auto* begin = order.const_data_ptr<int64_t>();
  return {begin, begin + size};
}

std::vector<size_t> ascending(size_t size) {
  std::vector<size_t> order(size);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

struct Seat {
  int64_t num_replicas;
  int64_t rank;
};

Seat seat_of(const DistributedSamplerOptions& options) {
  if (options.num_replicas.has_value() != options.rank.has_value()) {
    raise<c10::ValueError>({kSampler,
                            options.rank
                                ? c10::str("rank is ", *options.rank, " and num_replicas is not given")
                                : c10::str("num_replicas is ", *options.num_replicas, " and rank is not given"),
                            "give both, or a process_group instead"});
  }
  if (!options.rank) {
    const Group group = options.process_group ? options.process_group : require_current_process_group(kSampler);
    return {group->getSize(), group->getRank()};
  }
  if (*options.rank >= 0 && *options.rank < *options.num_replicas) return {*options.num_replicas, *options.rank};
  raise<c10::ValueError>({kSampler, c10::str("rank is ", *options.rank, " of ", *options.num_replicas, " replicas"),
                          "pass a rank from 0 to num_replicas - 1"});
}

}  // namespace

DistributedSampler::DistributedSampler(size_t size, const DistributedSamplerOptions& options)
    : size_(size), shuffle_(options.shuffle), seed_(options.seed), drop_last_(options.drop_last), pad_(options.pad) {
  const Seat seat = seat_of(options);
  num_replicas_ = size_t(seat.num_replicas);
  rank_ = size_t(seat.rank);
  deal();
  note_position();
}

size_t DistributedSampler::num_samples() const {
  return num_rounds(size_);
}

size_t DistributedSampler::num_rounds(size_t num_left) const {
  if (drop_last_) return num_left / num_replicas_;
  const size_t turns_left_out = pad_ ? 0 : rank_;  // where the last round is not full
  return (num_left + num_replicas_ - 1 - turns_left_out) / num_replicas_;
}

void DistributedSampler::deal() {
  shared_->dealt_epoch = epoch();
  const std::vector<size_t> order = shuffle_ ? permutation(size_, seed_ + uint64_t(epoch())) : ascending(size_);
  const size_t rounds = num_rounds(size_ - std::min(first_, size_));
  mine_.clear();
  for (size_t round = 0; round < rounds; ++round) {
    // Past the end the dataset begins again, as often as it takes: it may be smaller than the world.
    mine_.push_back(order[(first_ + round * num_replicas_ + rank_) % size_]);
  }
}

void DistributedSampler::reset(std::optional<size_t> new_size) {
  size_ = new_size.value_or(size_);
  position_ = 0;
  first_ = shared_->start_epoch == epoch() ? shared_->start.load() : 0;
  deal();
  note_position();
}

void DistributedSampler::note_position() {
  shared_->consumed = first_ + position_ * num_replicas_;
  shared_->is_at_end = position_ == mine_.size();
}

void DistributedSampler::go_on(int64_t epoch, size_t consumed) {
  set_epoch(epoch);
  shared_->start = consumed;
  shared_->start_epoch = epoch;
  reset();
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  shared_->start_epoch = -1;  // also where nothing is left of the epoch: the next reset() begins a whole one
  const size_t count = std::min(batch_size, mine_.size() - position_);
  if (count == 0) return std::nullopt;
  const auto begin = mine_.begin() + int64_t(position_);
  position_ += count;
  note_position();
  return std::vector<size_t>(begin, begin + int64_t(count));
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  archive.write("epoch", c10::IValue(epoch()));
  archive.write("position", c10::IValue(int64_t(position_)));
  archive.write("first", c10::IValue(int64_t(first_)));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  c10::IValue epoch;
  c10::IValue position;
  archive.read("epoch", epoch);
  archive.read("position", position);
  c10::IValue first = int64_t(0);  // absent in what older versions wrote
  archive.try_read("first", first);
  set_epoch(epoch.toInt());
  first_ = size_t(first.toInt());
  deal();
  position_ = std::min(size_t(position.toInt()), mine_.size());
  note_position();
}

}  // namespace serried
