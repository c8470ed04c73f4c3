// Random tables: what simulate lets pass ends, with the gradients of a loop, and all else is refused on every rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "tests/parallel/pipeline/nets.h"
#include "tests/support/errors.h"

namespace serried::testing::random_tables {
namespace {

using staged::Layer;
using Kind = PipelineAction::Kind;
using Rows = std::vector<PipelineTable::Row>;

/// One random table: stages on ranks in any assignment, backwards split or whole, rows in any order in which somebody
/// can always go on.
class RandomTable {
 public:
  explicit RandomTable(uint64_t seed) : dice_(seed) {
    num_ranks_ = below(4) + 1;
    num_stages_ = num_ranks_ + below(2 * num_ranks_ + 1);
    num_microbatches_ = below(5) + 1;
    for (int64_t stage = 0; stage < num_stages_; ++stage) {
      rank_of_.push_back(stage < num_ranks_ ? stage : below(num_ranks_));
    }
    std::shuffle(rank_of_.begin(), rank_of_.end(), dice_);
  }

  Rows draw() {
    std::vector<PipelineAction> waiting;
    for (int64_t stage = 0; stage < num_stages_; ++stage) {
      for (int64_t m = 0; m < num_microbatches_; ++m) {
        waiting.push_back({Kind::F, stage, m});
        if (below(2) == 0) {
          waiting.push_back({Kind::B, stage, m});
        } else {
          waiting.push_back({Kind::I, stage, m});
          waiting.push_back({Kind::W, stage, m});
        }
      }
    }
    Rows rows(static_cast<size_t>(num_ranks_));
    while (!waiting.empty()) {
      std::shuffle(waiting.begin(), waiting.end(), dice_);
      const auto next = std::find_if(waiting.begin(), waiting.end(), [&](const auto& a) { return can_begin(a); });
      done_[{next->kind == Kind::B ? Kind::I : next->kind, next->stage}].push_back(next->microbatch);
      rows[size_t(rank_of_[size_t(next->stage)])].push_back(*next);
      waiting.erase(next);
    }
    return rows;
  }

  int64_t below(int64_t count) { return int64_t(dice_() % uint64_t(count)); }

 private:
  bool is_done(Kind kind, int64_t stage, int64_t microbatch) {
    const std::vector<int64_t>& of_stage = done_[{kind, stage}];
    return std::find(of_stage.begin(), of_stage.end(), microbatch) != of_stage.end();
  }
  bool can_begin(const PipelineAction& a) {
    switch (a.kind) {
      case Kind::F: return a.stage == 0 || is_done(Kind::F, a.stage - 1, a.microbatch);
      case Kind::W: return is_done(Kind::I, a.stage, a.microbatch);
      default:
        return is_done(Kind::F, a.stage, a.microbatch) &&
               (a.stage + 1 == num_stages_ || is_done(Kind::I, a.stage + 1, a.microbatch));
    }
  }

  std::mt19937_64 dice_;
  int64_t num_ranks_ = 1, num_stages_ = 1, num_microbatches_ = 1;
  std::vector<int64_t> rank_of_;
  std::map<std::pair<Kind, int64_t>, std::vector<int64_t>> done_;  // I stands for B, too
};

using Gradients = std::vector<at::Tensor>;  // of a stage

/// Of each stage and micro-batch, in one process.
std::vector<std::vector<Gradients>> plain_gradients(int64_t num_stages, const staged::Batch& batch, int64_t count) {
  std::vector<std::vector<Gradients>> all(static_cast<size_t>(num_stages));
  std::vector<Layer> layers = staged::make_layers(num_stages);
  const auto inputs = batch.input.tensor_split(count), targets = batch.target.tensor_split(count);
  for (size_t m = 0; m < inputs.size(); ++m) {
    for (Layer& layer : layers) layer->zero_grad();
    at::Tensor x = inputs[m];
    for (Layer& layer : layers) x = layer->forward(x);
    (staged::loss_fn(x, targets[m]) / double(count)).backward();
    for (size_t stage = 0; stage < layers.size(); ++stage) {
      all[stage].emplace_back();
      for (const at::Tensor& p : layers[stage]->parameters()) all[stage].back().push_back(p.grad().clone());
    }
  }
  return all;
}

// A loop that takes micro-batches in the order in which the stage has them.
Gradients added_up(const std::vector<Gradients>& of_microbatches, const PipelineTable::Row& row, int64_t stage) {
  Gradients sums;
  for (const PipelineAction& action : row) {
    if (action.stage != stage || (action.kind != Kind::B && action.kind != Kind::W)) continue;
    const Gradients& next = of_microbatches[size_t(action.microbatch)];
    if (sums.empty()) {
      for (const at::Tensor& gradient : next) sums.push_back(gradient.clone());
    } else {
      for (size_t i = 0; i < sums.size(); ++i) sums[i].add_(next[i]);
    }
  }
  return sums;
}

void expect_like_loop(const PipelineTable& table, const std::string& backend, int64_t length) {
  const staged::Batch batch = staged::batch_of(2 * table.microbatches() + 1, length, 3);
  const std::vector<int64_t> peaks = simulate(table).peak_in_flight;
  const auto on_rank = [&](const Group& group) {
    // On a thread of its own, as the stages: norms add up their gradients by threads.
    const auto plain = plain_gradients(table.stages(), batch, table.microbatches());
    const int rank = group->getRank();
    std::vector<Layer> layers = staged::make_layers(table.stages());
    Pipeline pipe(staged::stages_of(table, rank, layers), {.group = group, .loss = staged::loss_fn, .table = table});
    for (int step = 0; step < 2; ++step) {
      for (Layer& layer : layers) layer->zero_grad();
      pipe.step(batch.input, batch.target);
      EXPECT_EQ(pipe.peak_in_flight(), peaks[size_t(rank)]);
      for (const int64_t stage : table.stages_of(rank)) {
        const Gradients expected = added_up(plain[size_t(stage)], table.rows()[size_t(rank)], stage);
        const auto parameters = layers[size_t(stage)]->parameters();
        for (size_t i = 0; i < parameters.size(); ++i) {
          expect_equal(parameters[i].grad(), expected[i], c10::str("stage ", stage, ", parameter ", i));
        }
      }
    }
  };
  run_ranks(int(table.ranks()), on_rank, {.backend = backend, .timeout = std::chrono::seconds(20)});
}

TEST(PipelineRandomTables, GiveTheGradientsOfALoopBitForBit) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    const PipelineTable table(RandomTable(seed).draw());
    SCOPED_TRACE(c10::str("seed ", seed, "\n", table.to_text()));
    expect_like_loop(table, "threads", 2);
  }
}

// Messages of 140 KiB and more, in every order: streams between ranks hold 128 KiB.
TEST(PipelineRandomTables, WithLargeMessagesWaitForNothingElse) {
  for (const char* backend : {"shm", "gloo"}) {
    for (uint64_t seed = 100; seed < 108; ++seed) {
      const PipelineTable table(RandomTable(seed).draw());
      SCOPED_TRACE(c10::str(backend, ", seed ", seed, "\n", table.to_text()));
      expect_like_loop(table, backend, 3'000);
    }
  }
}

// Tables that are right but for two actions of a rank, which have changed places.
TEST(PipelineRandomTables, EndOrAreRefusedWithACycle) {
  int num_refused = 0, num_run = 0;
  for (uint64_t seed = 200; seed < 280; ++seed) {
    RandomTable random(seed);
    Rows rows = random.draw();
    PipelineTable::Row& row = rows[size_t(random.below(int64_t(rows.size())))];
    std::swap(row[size_t(random.below(int64_t(row.size())))], row[size_t(random.below(int64_t(row.size())))]);
    const PipelineTable table(rows);
    SCOPED_TRACE(c10::str("seed ", seed, "\n", table.to_text()));
    bool waits_for_ever = false;
    try {
      simulate(table);
    } catch (const c10::ValueError&) {
      waits_for_ever = true;
    }
    if (!waits_for_ever) {
      ++num_run;
      expect_like_loop(table, "threads", 1);
      continue;
    }
    ++num_refused;
    run_ranks(int(table.ranks()), [&](const Group& group) {
      const std::vector<Layer> layers = staged::make_layers(table.stages());
      EXPECT_THAT(error_text<c10::ValueError>([&] {
                    Pipeline(staged::stages_of(table, group->getRank(), layers),
                             {.group = group, .loss = staged::loss_fn, .table = table});
                  }),
                  ::testing::HasSubstr("[simulate] the table waits for ever: rank "));
    });
  }
  EXPECT_GT(num_run, 5);
  EXPECT_GT(num_refused, 5);
}

}  // namespace
}  // namespace serried::testing::random_tables
