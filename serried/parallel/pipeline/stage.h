// A stage of a pipeline: a module that takes one tensor and gives one, whatever its type.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>

namespace serried {

namespace detail {

template <class T>
inline constexpr bool is_shared_module = false;
template <class T>
inline constexpr bool is_shared_module<std::shared_ptr<T>> = std::is_base_of_v<torch::nn::Module, T>;

/// A torch::nn::ModuleHolder, or a shared pointer to a module, among them one to a DistributedDataParallel.
template <class T>
concept StageModule = is_shared_module<T> || requires(const T& holder) {
  requires is_shared_module<std::remove_cvref_t<decltype(holder.ptr())>>;
};

template <class T>
std::shared_ptr<T> shared_module(const std::shared_ptr<T>& module) {
  return module;
}
template <class Holder>
auto shared_module(const Holder& holder) -> std::remove_cvref_t<decltype(holder.ptr())> {
  return holder.ptr();
}

}  // namespace detail

/// Made of whatever Pipeline takes: nobody has to name it, but where stages of several kinds are on one rank.
///     Pipeline pipe(std::vector<PipelineStage>{ddp_of_first, second}, {...});
class PipelineStage {
 public:
  PipelineStage(torch::nn::AnyModule module);

  template <class Module>
  requires(detail::StageModule<Module> && !std::is_same_v<Module, torch::nn::AnyModule>) PipelineStage(Module module) {
    auto shared = detail::shared_module(module);
    static_assert(
        requires(at::Tensor x) { at::Tensor(shared->forward(x)); },
        "a stage of a pipeline has a forward that takes one tensor and gives one");
    take(shared, [shared](at::Tensor x) -> at::Tensor { return shared->forward(x); });
  }

  at::Tensor forward(const at::Tensor& x) const { return forward_(x); }
  const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  using Forward = std::function<at::Tensor(at::Tensor)>;
  void take(std::shared_ptr<torch::nn::Module> module, Forward forward);

  std::shared_ptr<torch::nn::Module> module_;
  Forward forward_;
};

}  // namespace serried
