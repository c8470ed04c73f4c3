// Training steps of models that are cut over ranks, eager and captured, taking turns with the plain model.
//
// `serried run -n 2 bench_sharded deep|gpt <results.json> [pytorch.jsonl]`; the last file holds what
// ../graph/pytorch.py has measured. Plain is a whole model on each rank, which all run at once.
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "benchmarks/ddp/models.h"
#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/graph/capture.h"
#include "serried/optim/adam.h"
#include "serried/parallel/fsdp/fully_shard.h"
#include "serried/parallel/tensor_parallel/parallelize.h"
#include "serried/tensor/making/modules.h"

namespace {

using namespace serried;
using namespace serried::bench;

constexpr double kDeepBudgetUs = 3000;  // for 20 gathered layers

DeviceMesh line_of(const Group& group, const char* name) {
  return init_device_mesh("cpu", {group->getSize()}, {name}, {.group = group});
}

/// What makes of a fresh model one that is trained over the group, and of its target what the output is.
template <class Model>
struct Strategy {
  std::function<void(Model&)> apply = [](Model&) {};
  std::function<Tensor(const Tensor&)> place = [](const Tensor& t) { return t; };
  bool shares_batch = false;
};

template <class Model>
std::function<Tensor(const Tensor&, const Tensor&)> training(const Strategy<Model>& strategy) {
  const auto model = std::make_shared<Model>();
  strategy.apply(*model);
  const auto optimizer = std::make_shared<AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-3));
  return [=, place = strategy.place](const Tensor& x, const Tensor& y) {
    optimizer->zero_grad();
    Tensor loss = Model::loss(model->forward(place(x)), place(y));
    loss.backward();
    optimizer->step();
    return loss;
  };
}

template <class Model>
Batch batch_of(const Strategy<Model>& strategy, const Group& group) {
  torch::manual_seed(strategy.shares_batch ? 0 : group->getRank());
  return Model::batch();
}

template <class Model>
Contender eager(const std::string& name, const Strategy<Model>& strategy, const Group& group) {
  return {name, [step = training(strategy), batch = batch_of(strategy, group)] { step(batch.input, batch.target); }};
}

template <class Model>
Contender captured(const std::string& name, const Strategy<Model>& strategy, const Group& group) {
  const auto step = std::make_shared<decltype(capture(training(strategy)))>(capture(training(strategy)));
  return {name + ", captured", [=, batch = batch_of(strategy, group)] { (*step)(batch.input, batch.target); }};
}

/// Tensor parallel over `mesh`: every rank has the whole batch.
template <class Model>
Strategy<Model> tensor_parallel(const DeviceMesh& mesh, std::function<void(Model&)> apply) {
  return {std::move(apply), [mesh](const Tensor& t) { return DTensor::from_local(t, mesh, {Replicate()}); }, true};
}

Strategy<Deep> by_hand(const DeviceMesh& mesh) {
  return tensor_parallel<Deep>(mesh, [mesh](Deep& model) {
    for (size_t i = 0; i < model.layers->size(); ++i) {
      const auto& linear = *model.layers[i]->as<nn::Linear>();
      distribute_parameter(linear.weight, mesh, {Shard(i % 2)});
      distribute_parameter(linear.bias, mesh, {i % 2 == 0 ? Placement(Shard(0)) : Placement(Replicate())});
    }
  });
}

Strategy<Deep> by_styles(const DeviceMesh& mesh) {
  return tensor_parallel<Deep>(mesh, [mesh](Deep& model) {
    parallelize_module(model, mesh, {{"layers.*[02468]", ColwiseParallel()}, {"layers.*[13579]", RowwiseParallel()}});
  });
}

Strategy<Gpt> gpt_by_styles(const DeviceMesh& mesh) {
  return tensor_parallel<Gpt>(mesh, [mesh](Gpt& model) {
    parallelize_module(model, mesh,
                       {{"tokens", RowwiseParallel()},
                        {"places", RowwiseParallel()},
                        {"blocks.*.projections.*", ColwiseParallel()},
                        {"blocks.*.out", RowwiseParallel()},
                        {"blocks.*.up", ColwiseParallel()},
                        {"blocks.*.down", RowwiseParallel()},
                        {"head", ColwiseParallel()}});
  });
}

template <class Model>
Strategy<Model> sharded(const DeviceMesh& mesh, nn::ModuleList Model::*layers) {
  return {[=](Model& model) {
    for (const auto& layer : *(model.*layers)) fully_shard(*layer, {.mesh = mesh});
    fully_shard(model, {.mesh = mesh});
  }};
}

/// What a contender is compared with, and how much longer it may take.
struct Comparison {
  std::string ours;
  std::string reference;
  double goal;
};

class Report {
 public:
  Report(std::string model, std::vector<Contender> contenders, const char* theirs)
      : model_(std::move(model)), contenders_(std::move(contenders)), theirs_(theirs) {}

  void add(const Comparison& one) {
    rows_.push_back(row(one.ours, us_of_contender(one.reference), one.reference, one.goal));
  }
  void add_budget(const std::string& ours, double us) { rows_.push_back(row(ours, us, "budget", 1)); }

  /// Beside a case of PyTorch's, where it was measured.
  void add_pytorch(const std::string& ours, const std::string& name) {
    for (const auto& [suffix, what, text] :
         {std::tuple("", "eager_us", "PyTorch"), std::tuple(", captured", "compiled_us", "PyTorch, compiled")}) {
      const double us = theirs_ == nullptr ? 0 : number_in_lines(theirs_, name, what);
      if (us > 0) rows_.push_back(row(ours + suffix, us, text, 1));
    }
  }

  void write(const char* results) const {
    print_table(rows_);
    append_json(rows_, results);
  }

 private:
  double us_of_contender(const std::string& name) const {
    for (const Contender& contender : contenders_) {
      if (contender.name == name) return lower_quartile(contender.times);
    }
    return 0;
  }
  Row row(const std::string& ours, double reference, const std::string& reference_name, double goal) const {
    return {"sharded", model_ + ", " + ours, us_of_contender(ours), reference, reference_name, goal, "us"};
  }

  std::string model_;
  std::vector<Contender> contenders_;
  const char* theirs_;
  std::vector<Row> rows_;
};

constexpr TurnOptions kTurns = {.warm_up = 8, .rounds = 12, .block_us = 60e3};

Report run_deep(const Group& group, const char* theirs) {
  const DeviceMesh tp = line_of(group, "tp");
  const Strategy<Deep> whole = sharded(line_of(group, "dp"), &Deep::layers);
  std::vector<Contender> all = {
      eager<Deep>("plain", {}, group),
      eager("placed by hand", by_hand(tp), group),
      captured("placed by hand", by_hand(tp), group),
      eager("styles", by_styles(tp), group),
      captured("styles", by_styles(tp), group),
      eager("fully_shard", whole, group),
      captured("fully_shard", whole, group),
  };
  take_turns(all, group, kTurns);
  Report report("20 x 64", std::move(all), theirs);
  report.add({"styles", "placed by hand", 1.15});
  report.add({"styles, captured", "placed by hand, captured", 1.15});
  report.add_pytorch("styles", "deep_tp");
  report.add({"fully_shard", "plain", 0});
  report.add_budget("fully_shard", kDeepBudgetUs);
  report.add({"fully_shard, captured", "fully_shard", 0.6});
  report.add_pytorch("fully_shard", "deep_fsdp");
  return report;
}

Report run_gpt(const Group& group, const char* theirs) {
  const Strategy<Gpt> styles = gpt_by_styles(line_of(group, "tp"));
  const Strategy<Gpt> whole = sharded(line_of(group, "dp"), &Gpt::blocks);
  std::vector<Contender> all = {
      eager<Gpt>("plain", {}, group),     eager("styles", styles, group),        captured("styles", styles, group),
      eager("fully_shard", whole, group), captured("fully_shard", whole, group),
  };
  take_turns(all, group, kTurns);
  Report report("GPT", std::move(all), theirs);
  report.add({"styles", "plain", 0.65});
  report.add({"styles, captured", "plain", 0.60});
  report.add_pytorch("styles", "gpt_tp");
  report.add({"fully_shard", "plain", 1.10});
  report.add({"fully_shard, captured", "plain", 1.05});
  report.add_pytorch("fully_shard", "gpt_fsdp");
  return report;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::string name = argc >= 3 ? argv[1] : "";
  if (name != "deep" && name != "gpt") {
    std::fprintf(stderr, "usage: bench_sharded deep|gpt <results.json> [pytorch.jsonl]\n");
    return 2;
  }
  const Group group = new_group();
  const char* theirs = argc > 3 ? argv[3] : nullptr;
  const Report report = name == "deep" ? run_deep(group, theirs) : run_gpt(group, theirs);
  if (group->getRank() == 0) report.write(argv[2]);
}
