// The same call for both: as an Action, and on tensors.
#include "tools/serried/check.h"

#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "serried/base/text.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/graph/capture.h"
#include "serried/optim/sgd.h"
#include "serried/parallel/ddp/ddp.h"
#include "tools/serried/graph_job.h"
#include "tools/serried/simulate/fit.h"
#include "tools/serried/simulate/simulate.h"

namespace serried::tools {
namespace {

using simulation::Action;
using simulation::Call;
using simulation::Job;
using simulation::Kind;
using Step = std::function<void()>;

constexpr int kMaxCalls = 10;  // until a step is captured

Step call_of(const Call& call, const Group& world) {
  const int64_t ranks = world->getSize(), count = call.bytes / 4 / ranks * ranks;
  const at::Tensor x = at::zeros({count});
  switch (call.kind) {
    case Kind::all_gather: return [=, all = at::zeros({count * ranks})] { all_gather_into(all, x, world); };
    case Kind::reduce_scatter: return [=, part = at::zeros({count / ranks})] { reduce_scatter_into(part, x, world); };
    case Kind::all_to_all: return [=, other = at::zeros({count})] { all_to_all_into(other, x, world); };
    case Kind::broadcast: return [=] { broadcast_(x, world); };
    default: return [=] { all_reduce_(x, world); };
  }
}

// A net of as many numbers as its layers have, without and with DistributedDataParallel.
struct Training {
  Training(int64_t width, int64_t layers, const Group& group) {
    for (int64_t i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(width, width));
    if (group) ddp.emplace(net, DDPOptions{.process_group = group});
    optimizer.emplace(net->parameters(), torch::optim::SGDOptions(1e-3));
  }

  at::Tensor step(const at::Tensor& x) {
    optimizer->zero_grad();
    at::Tensor loss = (ddp ? (*ddp)(x) : net->forward(x)).square().mean();
    loss.backward();
    optimizer->step();
    return loss;
  }

  torch::nn::Sequential net;
  std::optional<DistributedDataParallel<torch::nn::Sequential>> ddp;
  std::optional<SGD> optimizer;
};

class Checker {
 public:
  Checker(const Group& world, const simulation::Machine& machine, int rounds)
      : world_(world), machine_(machine), rounds_(rounds) {}

  std::vector<CheckRow> run() {
    for (const Kind kind :
         {Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter, Kind::all_to_all, Kind::broadcast}) {
      for (const int64_t bytes : {96 << 10, 768 << 10, 3 << 20}) compare({kind, bytes});
    }
    compare_step(256, 6, 8);
    compare_step(512, 3, 64);
    compare_step(512, 6, 256);
    return std::move(rows_);
  }

 private:
  double median_us(const Step& step) const {
    for (int i = 0; i < 3; ++i) step();
    const int64_t in_a_row = std::clamp(int64_t(20e3 / std::max(slowest_us(step, 1), 1.0)), int64_t(1), int64_t(50));
    std::vector<double> times;
    for (int round = 0; round < rounds_; ++round) times.push_back(slowest_us(step, in_a_row));
    return simulation::median_of(std::move(times));
  }

  /// Of one of `count` calls, on the rank where that takes longest.
  double slowest_us(const Step& step, int64_t count) const {
    barrier(world_);
    const auto begin = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < count; ++i) step();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - begin;
    const at::Tensor slowest = at::full({1}, time.count() / double(count), at::kDouble);
    all_reduce_(slowest, world_, c10d::ReduceOp::MAX);
    return slowest.item<double>();
  }

  Job job_of(simulation::Program program, const std::string& axis) const {
    Job job{.machine = machine_, .axes = {{axis, world_->getSize()}}, .programs = {std::move(program)}};
    // What a rank computes was measured beside its neighbours: cores are shared already.
    job.machine.cores_per_host = 0;
    return job;
  }

  static double simulated_us(const Job& job) { return simulation::to_us(simulate(job).step); }

  void compare(Call call) {
    call.bytes = call.bytes / 4 / world_->getSize() * world_->getSize() * 4;
    const double measured = median_us(call_of(call, world_));
    const double simulated = simulated_us(job_of({Action::issue(0, call), Action::wait(0)}, "world"));
    rows_.push_back({std::string(name_of(call.kind)) + " " + detail::bytes_text(call.bytes), measured, simulated});
  }

  void compare_step(int64_t width, int64_t layers, int64_t samples) {
    torch::manual_seed(1);
    const at::Tensor x = at::randn({samples, width});
    Training alone(width, layers, {}), parallel(width, layers, world_);
    auto alone_step = capture([&](const at::Tensor& input) { return alone.step(input); });
    auto step = capture([&](const at::Tensor& input) { return parallel.step(input); });
    for (int i = 0; i < kMaxCalls; ++i) alone_step(x), step(x);
    const double computing = median_us([&] { alone_step(x); });
    const double measured = median_us([&] { step(x); });
    const simulation::Axis axis{world_->getGroupName(), world_->getSize()};
    simulation::Program program = program_of(step.graph(), {axis}, {.compute = {}, .step_us = computing});
    rows_.push_back({c10::str("DDP step, ", layers, " x Linear(", width, "), ", samples, " samples"), measured,
                     simulated_us(job_of(std::move(program), axis.name))});
  }

  const Group world_;
  const simulation::Machine& machine_;
  const int rounds_;
  std::vector<CheckRow> rows_ = {};
};

}  // namespace

std::vector<CheckRow> check(const Group& world, const simulation::Machine& machine, int rounds) {
  return Checker(world, machine, rounds).run();
}

}  // namespace serried::tools
