// local_map: a function of plain tensors applied to every rank's parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "serried/mesh/mesh.h"

namespace serried {

struct LocalMapOptions {
  std::vector<Placements> out_placements = {};  // one per result; {} for one that is no tensor
  std::vector<Placements> in_placements = {};   // one per argument; {} for one that is no DTensor. None: any will do
  std::optional<DeviceMesh> mesh = {};          // none: that of the first DTensor
  bool redistribute_inputs = false;             // an argument placed otherwise is moved instead of refused
  std::vector<Placements> in_grad_placements =
      {};  // of the gradients that the function gives back; none: as the inputs
};

namespace detail {

template <class T>
concept NotATensor = !std::is_base_of_v<at::Tensor, T>;

/// One call of a mapped function: arguments in, results out, counted.
class LocalMapCall {
 public:
  LocalMapCall(const LocalMapOptions& options, size_t num_arguments) : options_(options), count_(num_arguments) {}

  void see(const at::Tensor& t);
  void see(const std::vector<at::Tensor>& tensors);
  template <NotATensor T>
  void see(const T&) {}
  /// Whether there was a DTensor among the arguments; checks the counts if so.
  bool is_distributed();

  at::Tensor input(const at::Tensor& t);
  std::vector<at::Tensor> input(const std::vector<at::Tensor>& tensors);
  template <NotATensor T>
  const T& input(const T& value) {
    no_tensor("argument", options_.in_placements, next_++);
    return value;
  }

  at::Tensor output(const at::Tensor& t) {
    begin_results(1);
    return wrapped(t);
  }
  std::vector<at::Tensor> output(const std::vector<at::Tensor>& tensors);
  template <class... T>
  std::tuple<T...> output(const std::tuple<T...>& values) {
    begin_results(sizeof...(T));
    // In braces: results are wrapped in order.
    return std::apply([&](const auto&... value) { return std::tuple<T...>{wrapped(value)...}; }, values);
  }
  template <NotATensor T>
  T output(const T& value) {
    begin_results(1);
    return wrapped(value);
  }

 private:
  at::Tensor wrapped(const at::Tensor& t);
  template <NotATensor T>
  const T& wrapped(const T& value) {
    no_tensor("result", options_.out_placements, next_++);
    return value;
  }
  at::Tensor local_of(const at::Tensor& t, size_t index) const;
  void begin_results(size_t count);
  static void no_tensor(const char* what, const std::vector<Placements>& placements, size_t index);

  const LocalMapOptions& options_;
  size_t count_;
  size_t next_ = 0;
  std::optional<DeviceMesh> mesh_;
};

/// What a mapped function sees of an argument of type T.
template <class T>
using LocalArgument = std::conditional_t<std::is_base_of_v<at::Tensor, T>, at::Tensor, T>;

}  // namespace detail

/// A callable that takes DTensors where `fn` takes plain tensors, calls `fn` with this rank's parts and gives the
/// results the placements named. Differentiable. Without a DTensor among the arguments it is `fn`. Results may be a
/// tensor, a vector or tuple of them, or anything else with {}. Sizes of cut results are agreed on across the mesh, so
/// uneven parts are exact; all ranks of the mesh call it. ValueError where arguments, results and placements do not
/// fit.
///     auto matmul = local_map([](at::Tensor a, at::Tensor b) { return a.mm(b); },
///                             {.out_placements = {{Shard(0)}}, .in_placements = {{Shard(0)}, {Replicate()}}});
///     at::Tensor c = matmul(a, b);
template <class Fn>
auto local_map(Fn fn, LocalMapOptions options) {
  return [fn = std::move(fn), options = std::move(options)](const auto&... arguments) {
    detail::LocalMapCall call(options, sizeof...(arguments));
    (call.see(arguments), ...);
    if (!call.is_distributed()) return fn(arguments...);
    // In braces: arguments are converted in order.
    std::tuple<detail::LocalArgument<std::decay_t<decltype(arguments)>>...> local{call.input(arguments)...};
    using Result = decltype(fn(arguments...));
    if constexpr (std::is_void_v<Result>) {
      std::apply(fn, local);
    } else {
      return Result(call.output(std::apply(fn, local)));
    }
  };
}

}  // namespace serried
