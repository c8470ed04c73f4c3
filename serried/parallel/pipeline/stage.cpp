// How a stage holds its module.
#include "serried/parallel/pipeline/stage.h"

#include "serried/base/error.h"

namespace serried {

PipelineStage::PipelineStage(torch::nn::AnyModule module) {
  if (module.is_empty()) take(nullptr, {});
  const auto shared = std::make_shared<torch::nn::AnyModule>(std::move(module));
  take(shared->ptr(), [shared](at::Tensor x) { return shared->forward(std::move(x)); });
}

void PipelineStage::take(std::shared_ptr<torch::nn::Module> module, Forward forward) {
  if (module == nullptr) {
    raise<c10::ValueError>({"Pipeline", "a stage has no module: it is empty", "pass a module that was constructed"});
  }
  module_ = std::move(module);
  forward_ = std::move(forward);
}

}  // namespace serried
