// How many micro-batches' activations a rank really holds: as many as its table says, by all seven.
#include <gtest/gtest.h>

#include <memory>

#include "tests/parallel/pipeline/nets.h"

namespace serried::testing::in_flight {
namespace {

using staged::kWidth;
using staged::ScheduleCase;

/// Of all stages of a rank.
struct Alive {
  int64_t now = 0, peak = 0;
};

/// A copy that is counted as long as its memory lives.
struct Counted : torch::autograd::Function<Counted> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, Alive* alive) {
    const auto values = std::make_shared<at::Tensor>(x.clone());
    alive->peak = std::max(alive->peak, ++alive->now);
    return at::from_blob(
        values->mutable_data_ptr(), x.sizes(), [values, alive](void*) { --alive->now; }, x.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], at::Tensor()};
  }
};

/// The gradient of its weight needs what is counted.
struct CountingImpl : torch::nn::Module {
  explicit CountingImpl(Alive* alive_) : alive(alive_) {
    linear = register_module("linear", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(linear(Counted::apply(x, alive))); }
  Alive* alive;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Counting);

// Of every rank, in a real step.
std::vector<int64_t> peaks_of(const ScheduleCase& each, const TableOptions& sizes) {
  std::vector<int64_t> peaks(size_t(sizes.ranks), 0);
  run_ranks(int(sizes.ranks), [&](const Group& group) {
    const PipelineTable table = pipeline_table(each.schedule, sizes);
    Alive alive;
    std::vector<PipelineStage> stages;
    for (int64_t i = 0; i < each.stages_per_rank; ++i) stages.emplace_back(Counting(&alive));
    Pipeline pipe(
        stages,
        {.group = group, .schedule = each.schedule, .microbatches = sizes.microbatches, .loss = staged::loss_fn});
    const staged::Batch batch = staged::batch_of(2 * sizes.microbatches, 3, 0);
    for (int step = 0; step < 2; ++step) {
      alive.peak = 0;
      pipe.step(batch.input, batch.target);
      EXPECT_EQ(alive.now, 0);
      EXPECT_EQ(alive.peak, pipe.peak_in_flight());
    }
    peaks[size_t(group->getRank())] = alive.peak;
  });
  return peaks;
}

TEST(PipelineInFlight, RanksHoldTheActivationsOfAsManyMicroBatchesAsTheirTableSays) {
  std::vector<ScheduleCase> all = staged::kAllTables;
  all.push_back({Schedule::Interleaved, 3});
  all.push_back({Schedule::InterleavedZeroBubble, 3});
  for (const ScheduleCase& each : all) {
    for (const int64_t ranks : {1, 2, 3, 4}) {
      for (const int64_t microbatches : {1, 3, 8}) {
        const TableOptions sizes{.ranks = ranks, .stages_per_rank = each.stages_per_rank, .microbatches = microbatches};
        EXPECT_EQ(peaks_of(each, sizes), simulate(pipeline_table(each.schedule, sizes)).peak_in_flight)
            << to_string(each.schedule) << " p=" << ranks << " v=" << each.stages_per_rank << " m=" << microbatches;
      }
    }
  }
}

// The first ranks' of PyTorch's tables.
TEST(PipelineInFlight, FirstRanksHoldWhatTheSchedulesAreKnownFor) {
  const std::vector<int64_t> of_two = {8, 2, 5, 16, 4, 4, 5}, of_four = {8, 4, 11, 16, 8, 8, 9};
  for (size_t i = 0; i < staged::kAllTables.size(); ++i) {
    const ScheduleCase& each = staged::kAllTables[i];
    for (const int64_t ranks : {2, 4}) {
      const TableOptions sizes{.ranks = ranks, .stages_per_rank = each.stages_per_rank, .microbatches = 8};
      EXPECT_EQ(peaks_of(each, sizes)[0], (ranks == 2 ? of_two : of_four)[i]) << to_string(each.schedule) << ranks;
    }
  }
}

}  // namespace
}  // namespace serried::testing::in_flight
