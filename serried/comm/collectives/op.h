// How a collective becomes ops of the dispatcher, so that modes and recorders see it: blocking and started, on every
// device, on Meta and under autograd, all from one description.
#pragma once

#include "serried/comm/collectives/door.h"
#include "serried/comm/collectives/ops.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>

namespace serried::detail {

using TimeoutMs = std::optional<int64_t>;  // in milliseconds; none: the group's
using torch::autograd::AutogradContext;

/// As custom classes travel in schemas; a recorder can read the group's name.
inline constexpr const char* kGroupArgument = "__torch__.torch.classes.c10d.ProcessGroup group";

std::string schema_text(const std::string& name, const std::string& arguments, const std::string& results);

inline std::chrono::milliseconds in_milliseconds(TimeoutMs timeout) {
  return timeout ? std::chrono::milliseconds(*timeout) : c10d::kUnsetTimeout;
}

inline bool needs_grad(const at::Tensor& x) {
  return c10::GradMode::is_enabled() && x.requires_grad();
}

/// Runs it, or starts it where somebody wants the Work.
void carry_out(const Group& group, const Collective& collective, WorkPtr* started);
/// The same, with a step that its result needs once it is there.
void carry_out(const Group& group, const Collective& collective, WorkPtr* started, std::function<void()> after);

/// `work`, and a step after it.
WorkPtr chained(WorkPtr work, std::function<void()> after);

/// A lazy conjugate or negative: its memory holds something else than its values.
inline bool is_lazy(const at::Tensor& x) {
  return x.is_conj() || x.is_neg();
}
/// An argument with memory of its values.
inline at::Tensor resolved(const at::Tensor& x) {
  return is_lazy(x) ? x.resolve_conj().resolve_neg() : x;
}
template <class Argument>
const Argument& resolved(const Argument& argument) {
  return argument;
}

/// NotImplementedError for sparse tensors and the like.
void check_strided(const char* where, const at::Tensor& x);

template <class Signature>
c10::TypedOperatorHandle<Signature> find_op(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("serried::" + name).c_str(), "").typed<Signature>();
}

/// A collective that makes its result. `Description` has
///     kName, kArguments      "all_gather", "int dim, int[] sizes": what follows the group in its schema
///     kernel(x, group, args..., timeout, WorkPtr* started)    the result, there or on its way
///     meta(x, group, args...)                                 the result without data
///     save(ctx, args...), backward(ctx, group, grad)          its gradient
template <class Description, class... Args>
struct FunctionalOp {
  using Result = std::tuple<at::Tensor, WorkPtr>;
  using Call = at::Tensor(const at::Tensor&, const Group&, Args..., TimeoutMs);
  using Start = Result(const at::Tensor&, const Group&, Args..., TimeoutMs);

  static at::Tensor call(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout) {
    static const auto handle = find_op<Call>(Description::kName);
    return handle.call(x, group, args..., timeout);
  }
  static Result start(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout) {
    static const auto handle = find_op<Start>(started_name());
    return handle.call(x, group, args..., timeout);
  }
  /// Started where somebody wants the Work.
  static at::Tensor call_or_start(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout,
                                  WorkPtr* started) {
    if (started == nullptr) return call(x, group, args..., timeout);
    at::Tensor result;
    std::tie(result, *started) = start(x, group, args..., timeout);
    return result;
  }

  static void define(torch::Library& m) {
    std::string arguments = std::string("Tensor x, ") + kGroupArgument;
    if (*Description::kArguments != '\0') arguments += std::string(", ") + Description::kArguments;
    m.def(schema_text(Description::kName, arguments, "Tensor").c_str());
    m.def(schema_text(started_name(), arguments, "(Tensor, __torch__.torch.classes.c10d.Work)").c_str());
  }
  static void on_devices(torch::Library& m) { implement(m, run_kernel, start_kernel); }
  static void on_meta(torch::Library& m) { m.impl(Description::kName, run_meta); }
  static void on_autograd(torch::Library& m) { implement(m, run_with_gradient, start_with_gradient); }

 private:
  static std::string started_name() { return std::string("start_") + Description::kName; }

  static void implement(torch::Library& m, Call* run, Start* start) {
    m.impl(Description::kName, run);
    m.impl(started_name().c_str(), start);
  }

  static at::Tensor run_kernel(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout) {
    check_strided(Description::kName, x);
    return Description::kernel(x, group, args..., timeout, nullptr);
  }
  static Result start_kernel(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout) {
    check_strided(Description::kName, x);
    WorkPtr work;
    at::Tensor result = Description::kernel(x, group, args..., timeout, &work);
    return {std::move(result), std::move(work)};
  }
  static at::Tensor run_meta(const at::Tensor& x, const Group& group, Args... args, TimeoutMs) {
    return Description::meta(x, group, args...);
  }

  struct Gradient : torch::autograd::Function<Gradient> {
    static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const Group& group, Args... args,
                              TimeoutMs timeout, WorkPtr* started) {
      ctx->saved_data["group"] = group;
      Description::save(ctx, args...);
      return below_autograd(x, group, args..., timeout, started);
    }
    static torch::autograd::variable_list backward(AutogradContext* ctx, const torch::autograd::variable_list& grads) {
      const Group group = ctx->saved_data["group"].template toCustomClass<c10d::ProcessGroup>();
      torch::autograd::variable_list all(sizeof...(Args) + 4);  // one per argument of forward
      all[0] = Description::backward(ctx, group, grads[0]);
      return all;
    }
  };

  static at::Tensor below_autograd(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout,
                                   WorkPtr* started) {
    at::AutoDispatchBelowADInplaceOrView below;
    return call_or_start(x, group, args..., timeout, started);
  }
  // Where no gradient is needed, straight to the kernel below.
  static at::Tensor run_with_gradient(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout) {
    WorkPtr* const nobody = nullptr;
    return needs_grad(x) ? Gradient::apply(x, group, args..., timeout, nobody)
                         : below_autograd(x, group, args..., timeout, nobody);
  }
  static Result start_with_gradient(const at::Tensor& x, const Group& group, Args... args, TimeoutMs timeout) {
    WorkPtr work;
    WorkPtr* const started = &work;
    at::Tensor result = needs_grad(x) ? Gradient::apply(x, group, args..., timeout, started)
                                      : below_autograd(x, group, args..., timeout, started);
    return {std::move(result), std::move(work)};
  }
};

/// A collective that makes nothing: it writes into its first argument, or (kWrites == false) only reads it. There is no
/// gradient. `Description` has
///     kName, kArguments, kWrites                               "all_reduce_", its schema
///     kernel(x, args..., timeout, WorkPtr* started)
///     refuse_gradient(x, args...)                              raises where one would be needed
template <class Description, class... Args>
struct PlainOp {
  using Call = void(const at::Tensor&, Args..., TimeoutMs);
  using Start = WorkPtr(const at::Tensor&, Args..., TimeoutMs);

  static void call(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    static const auto handle = find_op<Call>(Description::kName);
    handle.call(x, args..., timeout);
  }
  static WorkPtr start(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    static const auto handle = find_op<Start>(started_name());
    return handle.call(x, args..., timeout);
  }
  /// Started where somebody wants the Work.
  static void call_or_start(const at::Tensor& x, Args... args, TimeoutMs timeout, WorkPtr* started) {
    if (started == nullptr) return call(x, args..., timeout);
    *started = start(x, args..., timeout);
  }

  static void define(torch::Library& m) {
    m.def(schema_text(Description::kName, Description::kArguments, "()").c_str());
    m.def(schema_text(started_name(), Description::kArguments, "__torch__.torch.classes.c10d.Work").c_str());
    // LibTorch's own fallback puts a result in place that these ops do not have, and too early where they are started.
    for (const auto key : {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative}) {
      m.impl(Description::kName, torch::dispatch(key, torch::CppFunction::makeFallthrough()));
      m.impl(started_name().c_str(), torch::dispatch(key, torch::CppFunction::makeFallthrough()));
    }
  }
  static void on_devices(torch::Library& m) { implement(m, run_kernel, start_kernel); }
  static void on_meta(torch::Library& m) { m.impl(Description::kName, run_meta); }
  static void on_autograd(torch::Library& m) { implement(m, run_without_gradient, start_without_gradient); }
  /// Where the caller is already below autograd, the version still counts.
  static void on_version_count(torch::Library& m) { implement(m, run_counted, start_counted); }

 private:
  static std::string started_name() { return std::string("start_") + Description::kName; }

  static void implement(torch::Library& m, Call* run, Start* start) {
    m.impl(Description::kName, run);
    m.impl(started_name().c_str(), start);
  }

  static void run_kernel(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    check_strided(Description::kName, x);
    const at::Tensor plain = is_lazy(x) ? resolved(x) : at::Tensor();
    Description::kernel(plain.defined() ? plain : x, resolved(args)..., timeout, nullptr);
    if (Description::kWrites && plain.defined()) x.copy_(plain);
  }
  static WorkPtr start_kernel(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    check_strided(Description::kName, x);
    WorkPtr work;
    const at::Tensor plain = is_lazy(x) ? resolved(x) : at::Tensor();
    Description::kernel(plain.defined() ? plain : x, resolved(args)..., timeout, &work);
    if (!Description::kWrites || !plain.defined()) return work;
    return chained(std::move(work), [x, plain] { x.copy_(plain); });
  }
  static void run_meta(const at::Tensor&, Args..., TimeoutMs) {}

  static void run_counted(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    at::AutoDispatchBelowADInplaceOrView below;
    call(x, args..., timeout);
    if (Description::kWrites) torch::autograd::increment_version(x);
  }
  static WorkPtr start_counted(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    at::AutoDispatchBelowADInplaceOrView below;
    WorkPtr work = start(x, args..., timeout);
    if (Description::kWrites) torch::autograd::increment_version(x);
    return work;
  }
  static void run_without_gradient(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    Description::refuse_gradient(x, args...);
    run_counted(x, args..., timeout);
  }
  static WorkPtr start_without_gradient(const at::Tensor& x, Args... args, TimeoutMs timeout) {
    Description::refuse_gradient(x, args...);
    return start_counted(x, args..., timeout);
  }
};

/// ValueError of the call `where` if `x`, which it writes in place, requires grad.
void raise_gradient_in_place(const at::Tensor& x, const char* where, const char* fix);
inline void refuse_gradient_in_place(const at::Tensor& x, const char* where, const char* fix) {
  if (needs_grad(x)) raise_gradient_in_place(x, where, fix);
}
/// The same for a given output.
void raise_gradient_into(const at::Tensor& output, const at::Tensor& x);
inline void refuse_gradient_into(const at::Tensor& output, const at::Tensor& x) {
  if (needs_grad(output) || needs_grad(x)) raise_gradient_into(output, x);
}

/// What collectives that move equal pieces into a given output have in common; they add kName and a kernel.
struct MovingInto {
  static constexpr bool kWrites = true;
  static constexpr const char* kArguments =
      "Tensor(a!) output, Tensor x, __torch__.torch.classes.c10d.ProcessGroup group";

  static void refuse_gradient(const at::Tensor& output, const at::Tensor& x, const Group&) {
    refuse_gradient_into(output, x);
  }
};
void move_into(watch::Kind kind, const char* where, const at::Tensor& output, const at::Tensor& x, const Group& group,
               TimeoutMs timeout, WorkPtr* started);

/// Which of SUM and AVG was saved as "op"; NotImplementedError for other reductions: they have no gradient.
c10d::ReduceOp::RedOpType differentiable_op(AutogradContext* ctx, std::string_view where);

/// Gives `call` a contiguous tensor to write, and what is then left to do: nothing, or to put the result where it
/// belongs.
template <class Call>
void write_through(const at::Tensor& x, Call call) {
  if (x.is_contiguous()) return call(x, std::function<void()>());
  const at::Tensor dense = x.contiguous();
  call(dense, std::function<void()>([x, dense] { x.copy_(dense); }));
}

}  // namespace serried::detail
