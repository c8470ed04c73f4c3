// Makes tables of what step.cpp and pytorch.py have measured in turn: `bench_ddp_report <lines> [results.json]`.
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "benchmarks/support/results.h"

namespace {

using namespace serried::bench;

struct Model {
  const char* name;
  const char* text;
  double compute_goal;  // of our step on shm beside compute only
  double pytorch_goal;  // of the same beside PyTorch's
  double parameters;
};

constexpr double kParameterKib = 4 / 1024.0;
constexpr double kHostBudget = 600;     // microseconds a step
constexpr double kStartBudget = 0.6e6;  // microseconds
const std::vector<Model> kModels = {
    {"mlp", "MLP 10.5 M", 1.15, 0.60, 10524688},       {"transformer", "transformer 11 M", 1.04, 1.0, 11040512},
    {"resnet", "ResNet-18 11 M", 1.04, 1.0, 11172170}, {"gpt", "GPT 3.5 M", 1.05, 1.0, 3454464},
    {"deep", "20 layers of 64", 0, 1.0, 83200},
};

/// Medians over the runs by model, contender and quantity; 0 where there is none.
class Numbers {
 public:
  explicit Numbers(std::istream& lines) {
    for (std::string line; std::getline(lines, line);) {
      const auto object = nlohmann::json::parse(line);
      for (const auto& [what, value] : object.items()) {
        if (value.is_number()) values_[key(object["model"], object["contender"], what)].push_back(value);
      }
    }
  }

  double get(const std::string& model, const std::string& contender, const std::string& what) {
    std::vector<double>& values = values_[key(model, contender, what)];
    return values.empty() ? 0 : median(values);
  }

 private:
  static std::string key(const std::string& model, const std::string& contender, const std::string& what) {
    return model + "/" + contender + "/" + what;
  }
  std::map<std::string, std::vector<double>> values_;
};

class Table {
 public:
  Table(std::string name, std::string unit) : name_(std::move(name)), unit_(std::move(unit)) {}

  /// Leaves out what was not measured.
  void add(const std::string& text, double ours, double reference, const std::string& reference_name, double goal) {
    if (ours != 0 && reference != 0) rows_.push_back({name_, text, ours, reference, reference_name, goal, unit_});
  }
  const std::vector<Row>& rows() const { return rows_; }

 private:
  std::string name_, unit_;
  std::vector<Row> rows_;
};

Table steps(Numbers& numbers) {
  Table table("ddp: step on 2 ranks", "us");
  for (const Model& model : kModels) {
    const auto step = [&](const char* contender) { return numbers.get(model.name, contender, "step"); };
    const std::string shm = std::string(model.text) + ", shm", gloo = std::string(model.text) + ", gloo";
    table.add(shm, step("ours on shm"), step("compute only"), "compute only", model.compute_goal);
    table.add(shm, step("ours on shm"), step("PyTorch"), "PyTorch on gloo", model.pytorch_goal);
    table.add(gloo, step("ours on gloo"), step("PyTorch"), "PyTorch on gloo", 1.0);
    table.add(gloo, step("ours on gloo"), step("c10d::Reducer on gloo"), "c10d::Reducer on gloo", 0);
    table.add(std::string(model.text) + ", without ranks", step("compute only"), step("PyTorch, compute only"),
              "PyTorch", 0);
  }
  return table;
}

/// What DistributedDataParallel adds to a step that has next to no compute.
Table host_cost(Numbers& numbers) {
  Table table("ddp: added to a step", "us");
  const auto step = [&](const char* contender) { return numbers.get("deep", contender, "step"); };
  const double ours = step("ours on shm") - step("compute only");
  table.add("20 layers of 64, shm", ours, kHostBudget, "0.6 ms budget", 1.0);
  table.add("20 layers of 64, shm", ours, step("PyTorch") - step("PyTorch, compute only"), "PyTorch on gloo", 0);
  return table;
}

Table start(Numbers& numbers) {
  Table table("ddp: launch to end of first step", "us");
  for (const Model& model : kModels) {
    const double ours = numbers.get(model.name, "ours on shm", "first step");
    table.add(model.text, ours, kStartBudget, "0.6 s budget", 1.0);
    table.add(model.text, ours, numbers.get(model.name, "PyTorch", "first step"), "PyTorch on gloo", 0);
  }
  return table;
}

/// What lies in shared memory counts for every rank that has touched it.
Table memory(Numbers& numbers) {
  Table table("ddp: peak memory per rank", "KiB");
  for (const Model& model : kModels) {
    const auto add = [&](const std::string& what, double goal) {
      const double theirs = numbers.get(model.name, "PyTorch", what);
      const double without_gradients = theirs == 0 ? 0 : theirs - model.parameters * kParameterKib;
      table.add(std::string(model.text) + ", " + what, numbers.get(model.name, "ours on shm", what), without_gradients,
                "PyTorch - gradients", goal);
    };
    add("peak memory", 1.0);
    add("memory for training", 0);
  }
  return table;
}

}  // namespace

int main(int argc, char** argv) {
  std::ifstream lines(argc > 1 ? argv[1] : "");
  if (!lines) {
    std::fprintf(stderr, "usage: bench_ddp_report <lines> [results.json]\n");
    return 2;
  }
  Numbers numbers(lines);
  for (const Table& table : {steps(numbers), host_cost(numbers), start(numbers), memory(numbers)}) {
    print_table(table.rows());
    if (argc > 2) append_json(table.rows(), argv[2]);
  }
  return 0;
}
