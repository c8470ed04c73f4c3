// How long it takes to plan a save of 10,000 tensors and to verify a checkpoint, beside what is allowed.
//
// `serried run -n 2 bench_checkpoint_plan <folder> <results.json>`
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "benchmarks/support/results.h"
#include "benchmarks/support/turns.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/inspect.h"
#include "serried/checkpoint/save_job.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/making/modules.h"

namespace {

using namespace serried;
using namespace serried::bench;
namespace detail = serried::checkpoint::detail;

constexpr int kTensors = 10000, kRounds = 9;
constexpr int64_t kVerifiedBytes = int64_t(512) << 20;
constexpr double kPlanningMs = 50, kVerifiedPerMs = 5e6;  // what is allowed; bytes, at least

struct Parameters : torch::nn::Module {
  explicit Parameters(const at::Tensor& value) {
    for (int i = 0; i < kTensors; ++i) register_parameter("weight" + std::to_string(i), value.clone());
  }
};

double median_of_slowest(const std::function<void()>& fn, const Group& group) {
  std::vector<double> times;
  for (int round = 0; round < kRounds; ++round) {
    barrier(group);
    times.push_back(us_of(fn) / 1e3);
  }
  times = slowest(times, group);
  return median(times);
}

// All that a save does before it makes its folder.
double planning_ms(const Parameters& net, const Group& group) {
  const detail::Ranks ranks(group);
  const checkpoint::Contents contents = {{"model", checkpoint::state_of(net)}};
  return median_of_slowest(
      [&] { (void)detail::order_of(detail::make_plan(contents, ranks), ranks.is_first()).planned_bytes; }, group);
}

double planning_of_shards_ms(const Group& group) {
  Parameters net(torch::zeros({16, 16}));
  const DeviceMesh mesh = init_device_mesh("cpu", {group->getSize()}, {"dp"}, {.group = group});
  for (auto& item : net.named_parameters(false)) distribute_parameter(item.value(), mesh, {Shard(0)});
  return planning_ms(net, group);
}

// By rank 0, while the others sleep.
double verifying_ms(const std::string& path, const Group& group) {
  checkpoint::save(path, {{"x", torch::ones({kVerifiedBytes / 4})}});
  double best = 0;
  for (int round = 0; round < kRounds && group->getRank() == 0; ++round) {
    const double ms = us_of([&] {
                        if (detail::verify(path).empty()) return;
                        std::fprintf(stderr, "%s is damaged\n", path.c_str());
                        std::exit(1);
                      }) /
                      1e3;
    best = best == 0 ? ms : std::min(best, ms);
  }
  barrier(group);
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  if (argc != 3) {
    std::fprintf(stderr, "usage: bench_checkpoint_plan <folder> <results.json>\n");
    return 2;
  }
  const Group group = new_group();
  const ProcessGroupGuard current(group);
  const std::string path = std::string(argv[1]) + "/verified";
  std::filesystem::create_directories(argv[1]);
  std::vector<Row> rows;
  const auto add = [&](const std::string& name, double ms, double allowed) {
    rows.push_back({"checkpoint", name, ms, allowed, "what is allowed", 1, "ms"});
  };
  add("10,000 tensors in shards, planning", planning_of_shards_ms(group), kPlanningMs);
  add("10,000 tensors on each rank, planning", planning_ms(Parameters(torch::zeros({16, 16})), group), kPlanningMs);
  add("512 MiB, verifying", verifying_ms(path, group), double(kVerifiedBytes) / kVerifiedPerMs);
  if (group->getRank() != 0) return 0;
  std::filesystem::remove_all(path);
  print_table(rows);
  append_json(rows, argv[2]);
}
