// Activation checkpointing: what a segment of a model computes is not kept for backward, but computed again there.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "serried/tensor/visit.h"

namespace serried {
namespace detail {

/// A function with its arguments, seen without their types.
class Segment {
 public:
  virtual ~Segment() = default;
  /// Runs it with `tensors` in the place of those it was called with, in their order.
  virtual void run(const std::vector<at::Tensor>& tensors) = 0;
};

template <class Fn, class... Args>
class TypedSegment final : public Segment {
 public:
  template <class AnyFn, class... AnyArgs>
  explicit TypedSegment(AnyFn&& fn, const AnyArgs&... arguments)
      : fn_(std::forward<AnyFn>(fn)), arguments_(arguments...) {}

  Fn& fn() { return fn_; }

  /// What it holds on to is decided elsewhere.
  std::vector<at::Tensor> take_tensors() {
    std::vector<at::Tensor> tensors;
    auto take = [&](at::Tensor& t) { tensors.push_back(std::exchange(t, at::Tensor())); };
    for_each_tensor(arguments_, take);
    return tensors;
  }

  void run(const std::vector<at::Tensor>& tensors) override {
    std::tuple<Args...> arguments = arguments_;
    auto next = tensors.begin();
    auto put = [&](at::Tensor& t) { t = *next++; };
    for_each_tensor(arguments, put);
    std::apply(
        [&](Args&... each) {
          if constexpr (std::is_invocable_v<Fn&, Args&...>) {
            std::invoke(fn_, each...);
          } else {
            std::invoke(fn_, std::move(each)...);
          }
        },
        arguments);
  }

 private:
  Fn fn_;
  std::tuple<Args...> arguments_;
};

/// The scope of a segment's first run.
class FirstRun {
 public:
  FirstRun(std::shared_ptr<Segment> segment, std::vector<at::Tensor> tensors);
  ~FirstRun();
  FirstRun(const FirstRun&) = delete;
  FirstRun& operator=(const FirstRun&) = delete;
  /// It came to its end. ValueError where a second run could not do the same.
  void end();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether autograd records what this thread does.
bool saves_activations();

}  // namespace detail

/// What `fn(arguments...)` gives. Of what autograd saves in it nothing is kept but the tensors among `arguments`:
/// backward runs `fn` again. Gradients are those of the plain call, bit for bit; random numbers are drawn again as they
/// were, running statistics and other state that `fn` changes is changed once. Scopes (autocast, ImplicitReplication,
/// ExplicitRedistribution, LossParallel, MeshGuard, ProcessGroupGuard) hold again as at the call. Nests.
///
/// `fn` and what is no tensor among `arguments` are copied; what `fn` refers to must live until backward, numbers
/// unchanged. It may read tensors that it was not given, and parameters of course. ValueError where it changes an
/// argument in place, or reads a tensor and changes it afterwards; RuntimeError in backward where what it read has
/// changed since, or where the second run saves something else than the first.
///     at::Tensor y = recompute(block, x);
///     at::Tensor z = recompute([&](const at::Tensor& x, double p) { return torch::dropout(net(x), p, true); }, x,
///     0.1);
template <class Fn, class... Args>
auto recompute(Fn&& fn, Args&&... arguments) {
  using Typed = detail::TypedSegment<std::decay_t<Fn>, std::decay_t<Args>...>;
  using Result = std::decay_t<std::invoke_result_t<std::decay_t<Fn>&, Args...>>;
  static_assert(!std::is_void_v<Result>, "recompute: the function returns nothing, so backward cannot reach it");
  static_assert(std::is_copy_constructible_v<std::decay_t<Fn>>,
                "recompute keeps a copy of the function for backward. Pass a lambda that refers to it: "
                "recompute([&](const at::Tensor& x) { return net.forward(x); }, x)");
  if (!detail::saves_activations()) return Result(std::invoke(std::forward<Fn>(fn), std::forward<Args>(arguments)...));
  const auto segment = std::make_shared<Typed>(std::forward<Fn>(fn), arguments...);
  detail::FirstRun run(segment, segment->take_tensors());
  Result result = std::invoke(segment->fn(), std::forward<Args>(arguments)...);
  run.end();
  return result;
}

}  // namespace serried
