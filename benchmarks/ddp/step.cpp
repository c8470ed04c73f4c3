// Training steps under DistributedDataParallel beside compute alone and LibTorch's own reducer, taking turns.
//
// `serried run -n 2 bench_ddp step <model> <out>` measures steps, `... first <model> <out>` the time from the start to
// the end of the first step and the peak of memory. Both add lines of JSON to <out>; report.cpp makes the tables.
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "benchmarks/ddp/models.h"
#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/ddp.h"

namespace {

using namespace serried;
using namespace serried::bench;

struct Measured {
  std::string contender;
  std::string what;
  double value;
};

template <class Model>
std::shared_ptr<torch::optim::Optimizer> make_optimizer(Model& model) {
  if (Model::optimizer == Optimizer::adamw) return std::make_shared<torch::optim::AdamW>(model.parameters(), 1e-3);
  return std::make_shared<torch::optim::SGD>(model.parameters(), 1e-4);
}

/// Adding to zeros is what the SGD programs do, starting from nothing what the AdamW ones do. Not the optimizer's
/// zero_grad: it cannot take gradients that lie in the buckets of c10d's reducer.
template <class Model>
void zero_gradients(Model& model) {
  at::NoGradGuard no_grad;
  for (Tensor& parameter : model.parameters()) {
    if (!parameter.grad().defined()) continue;
    if (Model::optimizer == Optimizer::adamw) {
      parameter.mutable_grad().reset();
    } else {
      parameter.mutable_grad().zero_();
    }
  }
}

/// One step of `model`, whose forward is `net`.
template <class Model, class Net>
Step make_step(const std::shared_ptr<Model>& model, Net net) {
  return [=, optimizer = make_optimizer(*model), batch = Model::batch()] {
    zero_gradients(*model);
    Model::loss(net(batch.input), batch.target).backward();
    optimizer->step();
  };
}

template <class Model>
Step compute_only() {
  const auto model = std::make_shared<Model>();
  return make_step(model, [model](const Tensor& x) { return model->forward(x); });
}

template <class Model>
Step ours(const Group& group) {
  const auto model = std::make_shared<Model>();
  const auto ddp = std::make_shared<DistributedDataParallel<std::shared_ptr<Model>>>(
      model, DistributedDataParallelOptions{.process_group = group});
  return make_step(model, [ddp](const Tensor& x) { return (*ddp)(x); });
}

/// What a C++ program can do without serried: c10d's reducer, driven as Python's DistributedDataParallel drives it.
template <class Model>
Step stock_reducer(const Group& group) {
  const auto model = std::make_shared<Model>();
  const std::vector<Tensor> parameters = model->parameters();
  const std::vector<bool> sparse(parameters.size(), false);
  const int64_t first = c10d::kDefaultFirstBucketBytes, cap = c10d::kDefaultBucketBytesCap;
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, {size_t(first), size_t(cap)}, sparse));
  std::reverse(buckets.begin(), buckets.end());
  const auto reducer = std::make_shared<c10d::Reducer>(
      parameters, buckets, group, sparse, cap, /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/true,
      std::unordered_map<size_t, std::string>(), first, /*skip_all_reduce_unused_params=*/false,
      /*use_python_reducer=*/false, std::vector<int64_t>());
  const auto logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  return make_step(model, [=](const Tensor& x) {
    reducer->prepare_for_forward();
    reducer->rebuild_buckets();
    const Tensor y = model->forward(x);
    reducer->prepare_for_backward({});
    (void)logger;  // the reducer holds it weakly
    return y;
  });
}

template <class Model>
std::vector<Measured> measure_steps(const Group& shm) {
  const Group gloo = new_group("gloo");
  std::vector<Contender> contenders = {
      {"compute only", compute_only<Model>()},
      {"ours on shm", ours<Model>(shm)},
      {"ours on gloo", ours<Model>(gloo)},
      {"c10d::Reducer on gloo", stock_reducer<Model>(gloo)},
  };
  take_turns(contenders, shm);
  std::vector<Measured> all;
  for (Contender& contender : contenders) all.push_back({contender.name, "step", median(contender.times)});
  return all;
}

/// A line of /proc/self/status, in KiB.
double memory(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field + ":")) return std::atof(line.c_str() + field.size() + 1);
  }
  return 0;
}

/// Since the launcher was started; SERRIED_BENCH_START holds when, in nanoseconds since 1970.
double us_since_start() {
  const char* start = std::getenv("SERRIED_BENCH_START");
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return start == nullptr ? 0 : std::chrono::duration<double, std::micro>(now).count() - std::atof(start) / 1e3;
}

template <class Model>
std::vector<Measured> measure_first_step(const Group& shm) {
  const double before = memory("VmRSS");
  const Step step = ours<Model>(shm);
  step();
  const double first = us_since_start();
  for (int i = 0; i < 5; ++i) step();
  const double peak = memory("VmHWM");
  const std::vector<double> values = slowest({first, peak, peak - before}, shm);
  return {{"ours on shm", "first step", values[0]},
          {"ours on shm", "peak memory", values[1]},
          {"ours on shm", "memory for training", values[2]}};
}

template <class Model>
int run(const std::string& mode, const char* path) {
  const Group shm = new_group("shm");
  torch::manual_seed(shm->getRank());
  const std::vector<Measured> all = mode == "step" ? measure_steps<Model>(shm) : measure_first_step<Model>(shm);
  if (shm->getRank() != 0) return 0;
  std::ofstream out(path, std::ios::app);
  for (const Measured& one : all) {
    out << nlohmann::json{{"model", Model::name}, {"contender", one.contender}, {one.what, one.value}} << "\n";
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::string mode = argc == 4 ? argv[1] : "", model = argc == 4 ? argv[2] : "";
  if (mode == "step" || mode == "first") {
    if (model == Mlp::name) return run<Mlp>(mode, argv[3]);
    if (model == Transformer::name) return run<Transformer>(mode, argv[3]);
    if (model == ResNet::name) return run<ResNet>(mode, argv[3]);
    if (model == Deep::name) return run<Deep>(mode, argv[3]);
    if (model == Gpt::name) return run<Gpt>(mode, argv[3]);
  }
  std::fprintf(stderr, "usage: bench_ddp step|first mlp|transformer|resnet|deep|gpt <out>\n");
  return 2;
}
