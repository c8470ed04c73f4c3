// Reads the counts before and after a recorded call, and adds what lies between at each replay.
#include "serried/graph/record/optimizer_steps.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>

#include <memory>

namespace serried::graph {
namespace {

using torch::optim::OptimizerParamState;

template <class... States>
int64_t* step_in(OptimizerParamState& state) {
  int64_t* step = nullptr;
  const auto try_as = [&](auto* known) {
    if (known != nullptr) step = &known->step();
  };
  (try_as(dynamic_cast<States*>(&state)), ...);
  return step;
}

// Null where the optimizer keeps none.
int64_t* step_of(OptimizerParamState& state) {
  using namespace torch::optim;
  return step_in<AdagradParamState, AdamParamState, AdamWParamState, RMSpropParamState>(state);
}

int64_t* step_of(torch::optim::Optimizer& optimizer, const void* parameter) {
  const auto found = optimizer.state().find(const_cast<void*>(parameter));
  return found == optimizer.state().end() ? nullptr : step_of(*found->second);
}

}  // namespace

auto OptimizerSteps::counts_of(const std::vector<torch::optim::Optimizer*>& optimizers) -> Counts {
  Counts counts;
  for (torch::optim::Optimizer* optimizer : optimizers) {
    for (const auto& [parameter, state] : optimizer->state()) {
      const int64_t* step = step_of(*state);
      if (step != nullptr) counts[{optimizer, parameter}] = *step;
    }
  }
  return counts;
}

OptimizerSteps::OptimizerSteps(const std::vector<torch::optim::Optimizer*>& optimizers)
    : optimizers_(optimizers), before_(counts_of(optimizers)) {}

void OptimizerSteps::repeat_at_replays(Recorder& recorder) const {
  struct Advance {
    Parameter parameter;
    int64_t by;
    int64_t before_replay = 0;
  };
  auto advances = std::make_shared<std::vector<Advance>>();
  for (const auto& [parameter, now] : counts_of(optimizers_)) {
    const auto then = before_.find(parameter);
    const int64_t by = now - (then == before_.end() ? 0 : then->second);
    if (by != 0) advances->push_back({parameter, by});
  }
  if (advances->empty()) return;
  recorder.before_replay([advances] {
    for (Advance& advance : *advances) {
      const int64_t* step = step_of(*advance.parameter.first, advance.parameter.second);
      advance.before_replay = step == nullptr ? 0 : *step;
    }
  });
  // From what it was before: serried's own optimizers, which may be listed too, have counted on by themselves.
  recorder.after_replay([advances] {
    for (const Advance& advance : *advances) {
      int64_t* step = step_of(*advance.parameter.first, advance.parameter.second);
      if (step != nullptr) *step = advance.before_replay + advance.by;
    }
  });
}

}  // namespace serried::graph
