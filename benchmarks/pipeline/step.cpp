// Steps of a pipeline beside their simulation with the costs they really had, and beside PyTorch's pipelining.
//
// `serried run -n 2 bench_pipeline <results.json> <schedule|host> [pytorch.jsonl]`; the last file holds what pytorch.py
// has measured just before. "host" is what an action costs besides.
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "benchmarks/ddp/models.h"
#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/pipeline/pipeline.h"

namespace {

using namespace serried;
using namespace serried::bench;

// Those of pytorch.py.
constexpr int64_t kMicrobatches = 8, kBlocks = 8, kWidth = 128, kHeads = 4, kBatch = 16, kTokens = 64;

struct Measured {
  double shm_us = 0, gloo_us = 0;
  double over_simulated = 0;       // from the first action to the end of the last one, over the makespan: the median
  double call_over_simulated = 0;  // step() from call to return, over the same
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
  const Group gloo = new_group("gloo");
  const auto timed = make_pipe(group, schedule, false), over_gloo = make_pipe(gloo, schedule, false),
             traced = make_pipe(group, schedule, true);
  const Tensor batch = torch::randn({kBatch, kTokens, kWidth}), target = torch::randn({kBatch, kTokens, kWidth});
  const auto step_of = [&](Pipeline& pipe) {
    clear_gradients(pipe);
    pipe.step(batch, target);
  };
  std::vector<Contender> contenders = {{"shm", [&] { step_of(*timed); }}, {"gloo", [&] { step_of(*over_gloo); }}};
  take_turns(contenders, group);
  std::vector<double> ratios, call_ratios;
  for (int i = 0; i < 24; ++i) {
    clear_gradients(*traced);
    barrier(group);
    const double call_us = slowest({us_of([&] { traced->step(batch, target); })}, group)[0];
    const PipelineTrace trace = traced->trace();
    if (i < 4) continue;
    const double simulated = simulate(trace.table, trace.costs()).makespan;
    ratios.push_back(trace.measured().makespan / simulated);
    call_ratios.push_back(call_us / simulated);
  }
  return {lower_quartile(contenders[0].times), lower_quartile(contenders[1].times), median(ratios),
          median(call_ratios)};
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

/// Tiny stages on two ranks, beside a loop of each rank over its own one: what an action costs with its messages. The
/// loop is as long as the table, which has one micro-batch's time more than it has work.
double host_us_with_messages(const Group& group, Schedule schedule) {
  constexpr int64_t kCount = 64;
  nn::Linear stage(8, 8), plain(8, 8);
  const auto loss = [](const Tensor& y, const Tensor& t) { return torch::mse_loss(y, t); };
  Pipeline pipe(stage, {.group = group, .schedule = schedule, .microbatches = kCount, .loss = loss});
  const Tensor batch = torch::randn({kCount, 8}), longer = torch::randn({kCount + group->getSize() - 1, 8});
  const auto loop = [&] {
    plain->zero_grad();
    for (const Tensor& part : longer.split(1)) (loss(plain(part), part) / double(kCount)).backward();
  };
  const auto piped = [&] {
    stage->zero_grad();
    pipe.step(batch, batch);
  };
  std::vector<Contender> contenders = {{"loop", loop}, {"pipeline", piped}};
  take_turns(contenders, group);
  const double added = lower_quartile(contenders[1].times) - lower_quartile(contenders[0].times);
  return std::max(0.0, added / double(2 * kCount));
}

std::vector<Row> host_rows(const Group& group) {
  const Group alone = split_group(group, {{0}, {1}});
  std::vector<Row> rows = {
      {"pipeline", "what the interpreter adds to an action", host_us_per_action(alone), 20, "budget", 1, "us"}};
  for (const Schedule schedule : {Schedule::GPipe, Schedule::OneFOneB}) {
    rows.push_back({"pipeline", "an action with its messages, " + to_string(schedule),
                    host_us_with_messages(group, schedule), 20, "budget", 1, "us"});
  }
  return rows;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc < 3) {
    std::fprintf(stderr, "usage: bench_pipeline <results.json> <schedule|host> [pytorch.jsonl]\n");
    return 2;
  }
  const Group group = new_group();
  torch::manual_seed(0);
  const std::string name = argv[2];
  std::vector<Row> ratios, times;
  if (name == "host") {
    times = host_rows(group);
  } else {
    const Measured measured = measure(group, parse_schedule(name));
    const double theirs = argc > 3 ? number_in_lines(argv[3], name, "step_us") : 0;
    ratios = {{"pipeline", name + ", measured / simulated", measured.over_simulated, 1, "simulate", 1.03, "x"},
              {"pipeline", name + ", step() / simulated", measured.call_over_simulated, 1, "simulate", 1.03, "x"}};
    const double reference = theirs > 0 ? theirs : measured.shm_us;
    const char* whose = theirs > 0 ? "PyTorch on Gloo" : "itself";
    times = {{"pipeline", name, measured.shm_us, reference, whose, theirs > 0 ? 0.9 : 0, "us"},
             {"pipeline", name + ", ours on Gloo", measured.gloo_us, reference, whose, 0, "us"}};
  }
  if (group->getRank() != 0) return 0;
  if (!ratios.empty()) print_table(ratios);
  print_table(times);
  if (!ratios.empty()) append_json(ratios, argv[1]);
  append_json(times, argv[1]);
}
