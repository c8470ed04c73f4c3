// Steps of a pipeline beside their simulation with the costs they really had, and beside PyTorch's pipelining.
//
// `serried run -n 2 bench_pipeline <results.json> [pytorch.jsonl]`; the last file holds what pytorch.py has measured.
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "benchmarks/ddp/models.h"
#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/parallel/pipeline/pipeline.h"

namespace {

using namespace serried;
using namespace serried::bench;

// Those of pytorch.py.
constexpr int64_t kMicrobatches = 8, kBlocks = 8, kWidth = 128, kHeads = 4, kBatch = 16, kTokens = 64;

constexpr Schedule kSchedules[] = {
    Schedule::GPipe, Schedule::OneFOneB,  Schedule::Interleaved, Schedule::LoopedBFS, Schedule::InterleavedZeroBubble,
    Schedule::ZBV,   Schedule::DualPipeV,
};

struct Measured {
  Schedule schedule;
  double step_us = 0;
  double over_simulated = 0;  // of a step's makespan, the median
};

std::unique_ptr<Pipeline> make_pipe(const Group& group, Schedule schedule, bool trace) {
  const int64_t per_rank = stages_per_rank_of(schedule).value_or(2);
  const PipelineTable table =
      pipeline_table(schedule, {.ranks = group->getSize(), .stages_per_rank = per_rank, .microbatches = kMicrobatches});
  std::vector<PipelineStage> stages;
  for (size_t i = 0; i < table.stages_of(group->getRank()).size(); ++i) {
    nn::Sequential blocks;
    for (int64_t b = 0; b < kBlocks / table.stages(); ++b) {
      blocks->push_back(std::make_shared<Block>(BlockOptions{kWidth, kHeads, false, true, true}));
    }
    stages.emplace_back(blocks);
  }
  const auto loss = [](const Tensor& y, const Tensor& t) { return torch::mse_loss(y, t); };
  return std::make_unique<Pipeline>(
      stages, PipelineOptions{
                  .group = group, .schedule = schedule, .microbatches = kMicrobatches, .loss = loss, .trace = trace});
}

void clear_gradients(const Pipeline& pipe) {
  for (Tensor parameter : pipe.parameters()) parameter.mutable_grad().reset();
}

Measured measure(const Group& group, Schedule schedule) {
  const auto timed = make_pipe(group, schedule, false), traced = make_pipe(group, schedule, true);
  const Tensor batch = torch::randn({kBatch, kTokens, kWidth}), target = torch::randn({kBatch, kTokens, kWidth});
  const auto step_of = [&](Pipeline& pipe) {
    clear_gradients(pipe);
    pipe.step(batch, target);
  };
  std::vector<Contender> contenders = {{"step", [&] { step_of(*timed); }}};
  take_turns(contenders, group);
  std::vector<double> ratios;
  for (int i = 0; i < 24; ++i) {
    step_of(*traced);
    const PipelineTrace trace = traced->trace();
    if (i < 4) continue;
    ratios.push_back(trace.measured().makespan / simulate(trace.table, trace.costs()).makespan);
  }
  return {schedule, lower_quartile(contenders[0].times), median(ratios)};
}

/// A tiny stage on one rank, beside a loop over micro-batches: what the interpreter adds to each action.
double host_us_per_action(const Group& alone) {
  constexpr int64_t kCount = 64;
  nn::Linear stage(8, 8), plain(8, 8);
  const auto loss = [](const Tensor& y, const Tensor& t) { return torch::mse_loss(y, t); };
  Pipeline pipe(stage, {.group = alone, .microbatches = kCount, .loss = loss});
  const Tensor batch = torch::randn({kCount, 8});
  const auto loop = [&] {
    plain->zero_grad();
    const std::vector<Tensor> parts = batch.tensor_split(kCount);
    for (const Tensor& part : parts) (loss(plain(part), part) / double(kCount)).backward();
  };
  const auto piped = [&] {
    stage->zero_grad();
    pipe.step(batch, batch);
  };
  std::vector<Contender> contenders = {{"loop", loop}, {"pipeline", piped}};
  take_turns(contenders, alone);
  const double added = lower_quartile(contenders[1].times) - lower_quartile(contenders[0].times);
  return std::max(0.0, added / double(2 * kCount));
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc < 2) {
    std::fprintf(stderr, "usage: bench_pipeline <results.json> [pytorch.jsonl]\n");
    return 2;
  }
  const Group group = new_group();
  torch::manual_seed(0);
  std::vector<Row> steps, overheads;
  for (const Schedule schedule : kSchedules) {
    const Measured measured = measure(group, schedule);
    const std::string name = to_string(schedule);
    const double theirs = argc > 2 ? number_in_lines(argv[2], name, "step_us") : 0;
    steps.push_back({"pipeline", name + ", measured / simulated", measured.over_simulated, 1, "simulate", 1.03, "x"});
    if (theirs > 0) overheads.push_back({"pipeline", name, measured.step_us, theirs, "PyTorch", 0.9, "us"});
    if (theirs <= 0) overheads.push_back({"pipeline", name, measured.step_us, measured.step_us, "itself", 0, "us"});
  }
  const Group alone = split_group(group, {{0}, {1}});
  overheads.push_back(
      {"pipeline", "what the interpreter adds to an action", host_us_per_action(alone), 20, "budget", 1, "us"});
  if (group->getRank() != 0) return 0;
  print_table(steps);
  print_table(overheads);
  append_json(steps, argv[1]);
  append_json(overheads, argv[1]);
}
