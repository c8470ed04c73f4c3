// While a step runs, the optimizer knows tensors that share the parameters' memory, under which their state is filed.
#include "serried/parallel/zero/stand_ins.h"

#include <utility>
#include <vector>

namespace serried::detail {
namespace {

class StandIns {
 public:
  StandIns(torch::optim::Optimizer& optimizer, const GradientMap& gradients) : optimizer_(optimizer) {
    for (auto& group : optimizer_.param_groups()) {
      std::vector<at::Tensor> chosen;
      for (const at::Tensor& parameter : group.params()) {
        const auto found = gradients.find(parameter.unsafeGetTensorImpl());
        if (found == gradients.end()) continue;
        // Shares the version too: autograd refuses a backward through values from before the step.
        chosen.push_back(parameter.detach());
        chosen.back().mutable_grad() = found->second;
        pairs_.emplace_back(parameter, chosen.back());
        move_state(parameter, chosen.back());
      }
      parameters_.push_back(std::exchange(group.params(), std::move(chosen)));
    }
  }
  ~StandIns() {
    for (const auto& [parameter, stand_in] : pairs_) move_state(stand_in, parameter);
    for (size_t g = 0; g < parameters_.size(); ++g) optimizer_.param_groups()[g].params() = std::move(parameters_[g]);
  }
  StandIns(const StandIns&) = delete;

 private:
  void move_state(const at::Tensor& from, const at::Tensor& to) {
    const auto found = optimizer_.state().find(from.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) return;
    auto state = std::move(found->second);
    optimizer_.state().erase(found);
    optimizer_.state()[to.unsafeGetTensorImpl()] = std::move(state);
  }

  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> parameters_;       // per group, to be put back
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;  // parameter, stand-in
};

}  // namespace

void step_with_stand_ins(torch::optim::Optimizer& optimizer, const GradientMap& gradients) {
  const StandIns stand_ins(optimizer, gradients);
  optimizer.step();
}

}  // namespace serried::detail
