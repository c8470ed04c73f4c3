// capture(fn): runs a function eagerly, records it, and from then on replays what it did while the guards hold.
#pragma once

#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "serried/graph/error.h"
#include "serried/graph/graph.h"
#include "serried/graph/passes/passes.h"
#include "serried/graph/record/call.h"
#include "serried/graph/text/plain_value.h"
#include "serried/tensor/visit.h"

namespace serried {

enum class WhenRefused : uint8_t {
  raise,      // CaptureError
  run_eager,  // warn once, and never try again
};

struct CaptureOptions {
  /// Run in this order.
  std::vector<Pass> passes = serried::passes::defaults();
  /// Shapes may vary without a new graph. Not built: true is a NotImplementedError.
  bool dynamic = false;
  WhenRefused when_refused = WhenRefused::raise;
  /// Graphs kept per function; the one unused for longest goes first.
  int max_graphs = 8;
  /// After so many recaptures the function runs eagerly, with a warning.
  int max_recaptures = 64;
  /// Whose train() and eval() the function depends on, and whose tensors and submodules: nothing else shows them.
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};
  /// Numbers, groups, meshes and the like that the function reads from its surroundings: another value counts as
  /// another argument.
  std::vector<Watched> watch = {};
  /// Optimizers of torch::optim that the function steps: another parameter, group or option counts as another argument,
  /// and step counts in their state go on in replays. They have to live as long as the captured function is called.
  /// serried's own need not be listed.
  std::vector<torch::optim::Optimizer*> optimizers = {};
};

namespace graph {

/// The part of a captured function that knows nothing of its types.
class CaptureState {
 public:
  explicit CaptureState(CaptureOptions options);
  ~CaptureState();

  /// Runs the function and returns what is in its result.
  using Run = c10::function_ref<FlatValues()>;
  /// Copies the result of the last `Run`, as a form for replays.
  using MakeForm = c10::function_ref<std::shared_ptr<void>()>;
  /// Takes the arguments apart, as they are now.
  using Flatten = c10::function_ref<FlatValues()>;
  /// Puts others in the place of the tensors in the result of the last `Run`.
  using Refill = c10::function_ref<void(const std::vector<at::Tensor>&)>;
  /// What the types of a function give.
  struct Typed {
    Run run;
    MakeForm make_form;
    Refill refill;
    Flatten flatten;
    bool returns_plain_values = false;
  };
  struct Outcome {
    bool is_replay = false;
    std::vector<at::Tensor> outputs;   // of a replay
    std::shared_ptr<const void> form;  // of a replay
  };
  /// What is watched, and no arguments yet.
  CallArguments new_call() const;
  Outcome call(const CallArguments& arguments, const Typed& typed);

  int64_t captures() const;
  int64_t replays() const;
  const std::string& last_recapture_reason() const;
  const Graph& graph() const;
  std::vector<Guard> guards() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Whether there are numbers, text and the like in a `T`, besides how many tensors it holds.
template <class T>
constexpr bool has_plain_values() {
  using Plain = std::remove_cvref_t<T>;
  if constexpr (detail::is_tensor_free<Plain>) {
    return true;
  } else if constexpr (detail::IsMap<Plain>) {
    return has_plain_values<typename Plain::mapped_type>();
  } else if constexpr (detail::IsOptional<Plain>) {
    return has_plain_values<decltype(*std::declval<Plain&>())>();
  } else if constexpr (detail::IsRange<Plain>) {
    return has_plain_values<decltype(*std::declval<Plain&>().begin())>();
  } else if constexpr (detail::IsTuple<Plain>) {
    return []<class... Elements>(const std::tuple<Elements...>*) {
      return (has_plain_values<Elements>() || ...);
    }(static_cast<decltype(std::tuple_cat(std::declval<Plain>()))*>(nullptr));
  } else {
    return false;
  }
}

/// One address per list of types.
template <class... Types>
inline char types_tag = 0;

/// Takes arguments and results apart.
struct Flattener {
  FlatValues& values;

  void operator()(const at::Tensor& t) { values.tensors.push_back(t); }
  template <class T>
  void plain(const T& value) {
    values.constants.push_back(plain_text(value));
  }
};

}  // namespace graph

/// A function that replays. Belongs to the thread that calls it first.
template <class Fn>
class Captured {
 public:
  Captured(Fn fn, CaptureOptions options)
      : fn_(std::move(fn)), state_(std::make_unique<graph::CaptureState>(std::move(options))) {}

  template <class... Args>
  std::invoke_result_t<Fn&, Args&...> operator()(Args&&... args) {
    using Result = std::invoke_result_t<Fn&, Args&...>;
    graph::CallArguments arguments = state_->new_call();
    arguments.types = &graph::types_tag<std::remove_cvref_t<Args>...>;
    const auto flatten = [&] {
      graph::FlatValues values;
      graph::Flattener flattener{values};
      (detail::for_each_tensor(args, flattener), ...);
      return values;
    };
    static_cast<graph::FlatValues&>(arguments) = flatten();
    if constexpr (std::is_void_v<Result>) {
      const auto run = [&] {
        fn_(args...);
        return graph::FlatValues();
      };
      const auto no_form = [] { return std::shared_ptr<void>(); };
      const auto no_refill = [](const std::vector<at::Tensor>&) {};
      state_->call(arguments, {run, no_form, no_refill, flatten});
    } else {
      return call_for<std::remove_cvref_t<Result>>(
          arguments, [&] { return fn_(args...); }, flatten);
    }
  }

  /// How often the function was recorded to the end, and how often replayed.
  int64_t captures() const { return state_->captures(); }
  int64_t replays() const { return state_->replays(); }
  /// Which guard failed, with both values; empty before the first recapture.
  const std::string& last_recapture_reason() const { return state_->last_recapture_reason(); }
  /// As the last replay ran it; ValueError before there is one.
  const graph::Graph& graph() const { return state_->graph(); }
  std::vector<graph::Guard> guards() const { return state_->guards(); }

 private:
  template <class Result, class Run, class Flatten>
  Result call_for(const graph::CallArguments& arguments, Run run_function, Flatten flatten) {
    std::optional<Result> result;
    const auto run = [&] {
      result.emplace(run_function());
      graph::FlatValues values;
      graph::Flattener flattener{values};
      detail::for_each_tensor(*result, flattener);
      return values;
    };
    const auto make_form = [&]() -> std::shared_ptr<void> {
      auto form = std::make_shared<Result>(*result);
      auto drop = [](at::Tensor& t) { t.reset(); };
      detail::for_each_tensor(*form, drop);
      return form;
    };
    const auto fill = [](Result& with, const std::vector<at::Tensor>& tensors) {
      size_t next = 0;
      auto fill_one = [&](at::Tensor& t) { t = tensors[next++]; };
      detail::for_each_tensor(with, fill_one);
    };
    const auto refill = [&](const std::vector<at::Tensor>& tensors) { fill(*result, tensors); };
    const auto outcome = state_->call(arguments, {run, make_form, refill, flatten, graph::has_plain_values<Result>()});
    if (!outcome.is_replay) return std::move(*result);
    Result replayed = *static_cast<const Result*>(outcome.form.get());
    fill(replayed, outcome.outputs);
    return replayed;
  }

  Fn fn_;
  std::unique_ptr<graph::CaptureState> state_;
};

///     auto step = capture([&](const at::Tensor& x, const at::Tensor& y) {
///       opt.zero_grad(); auto loss = loss_fn(net->forward(x), y); loss.backward(); opt.step(); return loss; });
///     at::Tensor loss = step(x, y);
/// The first call runs as it is (optimizer state comes to life), the next two are recorded and compared, later ones
/// replay. Results of recorded calls and of replays carry no autograd graph.
template <class Fn>
Captured<std::decay_t<Fn>> capture(Fn&& fn, CaptureOptions options = {}) {
  return {std::forward<Fn>(fn), std::move(options)};
}

}  // namespace serried
