// What a DTensor op costs the host beside the plain op: cached calls on 4x4 parts, first calls, and large fake meshes.
#include <benchmark/benchmark.h>
#include <serried/serried.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "benchmarks/support/results.h"

namespace {

using namespace serried;
using at::Tensor;

Group fake_group(int world_size) {
  return new_group("fake", {.store = c10::make_intrusive<c10d::HashStore>(), .rank = 0, .world_size = world_size});
}

// The same program on plain tensors and on DTensors whose parts have that size.
struct Subject {
  std::string name;
  std::function<Tensor(const std::vector<Tensor>&)> run;
  std::vector<std::pair<Tensor, Placement>> inputs;
};

std::vector<Subject> subjects() {
  const Tensor x = at::randn({4, 4}), w = at::randn({4, 4}), b = at::randn({4});
  return {
      {"add", [](const auto& t) { return t[0] + t[1]; }, {{x, Shard(0)}, {w, Shard(0)}}},
      {"mm", [](const auto& t) { return at::mm(t[0], t[1]); }, {{x, Shard(0)}, {w, Replicate()}}},
      {"view",
       [](const auto& t) {
         return t[0].view({-1, 2, 2});
       },
       {{x, Shard(0)}}},
      {"layer_norm",
       [](const auto& t) { return at::layer_norm(t[0], {4}, t[1], t[2]); },
       {{x, Shard(0)}, {b, Replicate()}, {b.clone(), Replicate()}}},
      {"softmax", [](const auto& t) { return at::softmax(t[0], -1); }, {{x, Shard(0)}}},
  };
}

std::vector<Tensor> plain_inputs(const Subject& subject) {
  std::vector<Tensor> inputs;
  for (const auto& [tensor, placement] : subject.inputs) inputs.push_back(tensor);
  return inputs;
}

std::vector<Tensor> distributed_inputs(const Subject& subject, const DeviceMesh& mesh) {
  std::vector<Tensor> inputs;
  for (const auto& [tensor, placement] : subject.inputs) {
    inputs.push_back(DTensor::from_local(tensor, mesh, {placement}));
  }
  return inputs;
}

void add_op(const std::string& name, const Subject& subject, std::vector<Tensor> inputs) {
  benchmark::RegisterBenchmark(name.c_str(), [subject, inputs](benchmark::State& state) {
    at::NoGradGuard no_grad;
    for (auto _ : state) benchmark::DoNotOptimize(subject.run(inputs));
  });
}

// Forward, backward and AdamW of a small MLP, its parameters plain or cut by columns and rows.
struct Mlp {
  torch::nn::Sequential net{torch::nn::Linear(16, 32), torch::nn::GELU(), torch::nn::Linear(32, 16)};
  Tensor x = at::randn({8, 16});
  torch::optim::AdamW optimizer{net->parameters(), torch::optim::AdamWOptions(1e-3)};

  void distribute(const DeviceMesh& mesh) {
    auto parameters = net->parameters();
    const Placement cut[] = {Shard(0), Shard(0), Shard(1), Replicate()};
    for (size_t i = 0; i < parameters.size(); ++i) distribute_parameter(parameters[i], mesh, {cut[i]});
    x = distribute_tensor(x, mesh, {Replicate()});
  }
  void step() {
    optimizer.zero_grad();
    net->forward(x).sum().backward();
    optimizer.step();
  }
};

void add_mlp(const std::string& name, std::shared_ptr<Mlp> mlp) {
  benchmark::RegisterBenchmark(name.c_str(), [mlp](benchmark::State& state) {
    for (auto _ : state) mlp->step();
  });
}

// Times by name, nothing printed.
class Collector : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>& runs) override {
    for (const Run& run : runs) {
      if (run.run_type == Run::RT_Iteration) times_[run.run_name.function_name].push_back(run.GetAdjustedRealTime());
    }
  }
  // Microseconds, the lower quartile of many short interleaved runs: a busy neighbour slows whole stretches by half,
  // more than what is measured here.
  double us(const std::string& name) {
    std::vector<double>& times = times_.at(name);
    std::sort(times.begin(), times.end());
    return times[times.size() / 4] / 1e3;
  }

 private:
  std::map<std::string, std::vector<double>> times_;
};

double first_call_us(const Subject& subject, const DeviceMesh& mesh) {
  at::NoGradGuard no_grad;
  std::vector<double> times;
  for (int i = 0; i < 30; ++i) {
    const std::vector<Tensor> inputs = distributed_inputs(subject, mesh);
    clear_dispatch_cache();
    const auto start = std::chrono::steady_clock::now();
    benchmark::DoNotOptimize(subject.run(inputs));
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  return bench::median(times);
}

double mesh_us() {
  const Group group = fake_group(4096);
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    const auto start = std::chrono::steady_clock::now();
    const DeviceMesh mesh = init_device_mesh("cpu", {16, 16, 16}, {"pp", "dp", "tp"}, {.group = group});
    benchmark::DoNotOptimize(mesh["tp"].size());
    times.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  return bench::median(times);
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::string json = argc > 1 ? argv[1] : "";
  const DeviceMesh two = init_device_mesh("cpu", {2}, {}, {.group = fake_group(2)});
  const DeviceMesh many = init_device_mesh("cpu", {4096}, {}, {.group = fake_group(4096)});
  for (const Subject& subject : subjects()) {
    add_op(subject.name + "/plain", subject, plain_inputs(subject));
    add_op(subject.name + "/dtensor", subject, distributed_inputs(subject, two));
    add_op(subject.name + "/dtensor4096", subject, distributed_inputs(subject, many));
  }
  add_mlp("mlp/plain", std::make_shared<Mlp>());
  auto distributed = std::make_shared<Mlp>();
  distributed->distribute(two);
  add_mlp("mlp/dtensor", distributed);

  std::vector<std::string> flags = {argv[0], "--benchmark_repetitions=60", "--benchmark_min_time=0.005",
                                    "--benchmark_enable_random_interleaving=true"};
  std::vector<char*> raw;
  for (std::string& flag : flags) raw.push_back(flag.data());
  int count = int(raw.size());
  benchmark::Initialize(&count, raw.data());
  Collector collector;
  benchmark::RunSpecifiedBenchmarks(&collector);

  std::vector<bench::Row> rows;
  for (const Subject& subject : subjects()) {
    const double plain = collector.us(subject.name + "/plain"), ours = collector.us(subject.name + "/dtensor");
    rows.push_back({"dtensor", subject.name + ", over plain", ours - plain, 0.40, "0.40 us", 1.0});
    rows.push_back({"dtensor", subject.name + ", in all", ours, plain, "plain", 0});
    rows.push_back(
        {"dtensor", subject.name + ", 4096 ranks", collector.us(subject.name + "/dtensor4096"), ours, "2 ranks", 1.2});
    rows.push_back({"dtensor", subject.name + ", first call", first_call_us(subject, two), 100, "100 us", 1.0});
  }
  rows.push_back(
      {"dtensor", "MLP step with AdamW", collector.us("mlp/dtensor"), collector.us("mlp/plain"), "plain", 1.3});
  rows.push_back({"dtensor", "mesh of 16x16x16 ranks", mesh_us(), 20000, "20 ms", 1.0});
  bench::print_table(rows);
  if (!json.empty()) bench::append_json(rows, json);
}
