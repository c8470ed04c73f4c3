// Unboxed kernels for the ops that programs call most: the fallback's plans, without packing arguments into a stack.
#include <ATen/Operators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <tuple>
#include <utility>

#include "serried/tape/recorder.h"
#include "serried/tensor/dispatch/cached_plan.h"
#include "serried/tensor/dispatch/dispatch.h"
#include "serried/tensor/dispatch/whole_values.h"

namespace serried {
namespace {

using detail::Arguments;
using detail::CachedPlan;
using detail::kNeedsMore;
using detail::OpInfo;

// What decides a plan, from typed arguments; the words are those of the boxed way.
struct KeyMaker {
  Arguments& arguments;
  const OpInfo& info;
  int index = 0;

  bool decides() const { return info.kinds[index] != OpInfo::ArgumentKind::value_only; }
  void add(const at::Tensor& t) {
    detail::add_tensor(arguments, t.defined() ? t.unsafeGetTensorImpl() : nullptr, index, -1);
  }
  void add(const std::optional<at::Tensor>& t) {
    const bool present = t.has_value() && t->defined();
    detail::add_tensor(arguments, present ? t->unsafeGetTensorImpl() : nullptr, index, -1);
  }
  void add(c10::SymIntArrayRef values) { detail::add_integers(arguments, C10_AS_INTARRAYREF_SLOW(values)); }
  void add(at::IntArrayRef values) { detail::add_integers(arguments, values); }
  void add(at::OptionalIntArrayRef values) {
    values.has_value() ? detail::add_integers(arguments, *values) : detail::add_none(arguments);
  }
  void add(int64_t value) { detail::add_integer(arguments, value); }
  void add(c10::string_view value) { detail::add_text(arguments, value); }
  void add(bool value) { detail::add_flag(arguments, value); }
  void add(double value) { decides() ? detail::add_number(arguments, value) : detail::add_any_number(arguments); }
  void add(std::optional<at::ScalarType> type) {
    type.has_value() ? detail::add_integer(arguments, int64_t(*type)) : detail::add_none(arguments);
  }
  void add(const at::Scalar& value) {
    if (!decides()) return detail::add_any_number(arguments);
    arguments.cacheable = false;
  }
  template <class T>
  void operator()(const T& value) {
    add(value);
    ++index;
  }
};

// The same argument for the local call.
struct Localiser {
  const CachedPlan& plan;

  static const at::Tensor& part(const at::Tensor& t) {
    const DTensorMeta* meta = t.defined() ? dtensor_meta(t) : nullptr;
    return meta != nullptr ? meta->local : t;
  }
  const at::Tensor& operator()(int, const at::Tensor& t) const { return part(t); }
  at::Tensor& operator()(int, at::Tensor& t) const { return const_cast<at::Tensor&>(part(t)); }
  std::optional<at::Tensor> operator()(int, const std::optional<at::Tensor>& t) const {
    return t.has_value() ? std::optional(part(*t)) : std::nullopt;
  }
  c10::SymIntArrayRef operator()(int index, c10::SymIntArrayRef values) const {
    for (const auto& [argument, integers] : plan.replaced_integers) {
      if (argument == index) return c10::fromIntArrayRefSlow(integers);
    }
    return values;
  }
  template <class T>
  const T& operator()(int, const T& value) const {
    return value;
  }
};

template <class Op>
const c10::OperatorHandle& handle() {
  static const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(Op::name, Op::overload_name);
  return op;
}

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
// What the kernel itself calls is nobody's business, as in tape::run_unrecorded.
const c10::DispatchKeySet kPassed = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(kHomeKey);

template <class Op, class Signature>
struct HotOp;

template <class Op, class Result, class... Args>
struct HotOp<Op, Result(Args...)> {
  static Result run(c10::DispatchKeySet, Args... args) {
    static thread_local OpInfo& info = detail::op_info(handle<Op>());
    Arguments arguments;
    KeyMaker make_key{arguments, info};
    (make_key(args), ...);
    if (arguments.first == nullptr && !arguments.has_other_kind && can_skip_boxing(arguments)) {
      return run_plain(info, arguments, args...);
    }
    if constexpr (!kWrites) {
      if (arguments.has_other_kind && !info.is_view) {
        if (std::optional<Result> result = run_whole(arguments, args...)) return std::move(*result);
      }
    }
    if (C10_LIKELY(arguments.first != nullptr && !arguments.has_other_kind && goes_by_rules(arguments))) {
      detail::seal(info, arguments);
      detail::check_together(info, arguments);
      const CachedPlan* plan = detail::find_fast_plan(info, arguments);
      if (C10_LIKELY(plan != nullptr && can_skip_boxing(arguments))) {
        return run_local(info, *plan, arguments, std::index_sequence_for<Args...>(), args...);
      }
      if (arguments.cacheable) {
        return run_boxed(
            [&](torch::jit::Stack& stack) {
              if (info.has_written) detail::adopt_written(info, arguments);
              detail::run_collected(handle<Op>(), info, arguments, stack);
            },
            args...);
      }
    }
    return run_boxed([](torch::jit::Stack& stack) { detail::run_boxed(handle<Op>(), stack); }, args...);
  }

 private:
  static constexpr bool kWrites = std::is_reference_v<Result>;

  // Results made of what is like a parameter are so, too, and beside plain tensors it is gathered.
  static bool goes_by_rules(const Arguments& arguments) {
    if (!arguments.has_like_parameter) return true;
    return kWrites && !arguments.has_plain && arguments.tensors[0].meta != nullptr;
  }

  // Only dense CPU tensors, nothing to write but DTensors, and nobody who has to see the call itself.
  static bool can_skip_boxing(const Arguments& arguments) {
    if (C10_UNLIKELY(tape::is_recording()) && (kWrites || tape::detail::current->notes() == nullptr)) return false;
    if (kWrites && arguments.tensors[0].meta == nullptr) return false;
    for (const detail::TensorSlot& slot : arguments.tensors) {
      const c10::TensorImpl* impl = slot.meta != nullptr ? slot.meta->local.unsafeGetTensorImpl() : slot.impl;
      if (!impl->key_set().has(c10::DispatchKey::CPU) || impl->key_set().has_any(kNeedsMore)) return false;
    }
    return true;
  }

  // Parameters that are whole only while an op needs them.
  static std::optional<Result> run_whole(const Arguments& arguments, Args... args) {
    c10::impl::ExcludeDispatchKeyGuard below(kPassed);
    detail::WholeValues values;
    if (!values.find(arguments)) return std::nullopt;
    return Op::redispatch(kCpu, whole(values, args)...);
  }
  static const at::Tensor& whole(const detail::WholeValues& values, const at::Tensor& t) { return values.of(t); }
  static std::optional<at::Tensor> whole(const detail::WholeValues& values, const std::optional<at::Tensor>& t) {
    return t.has_value() ? std::optional(values.of(*t)) : std::nullopt;
  }
  template <class T>
  static const T& whole(const detail::WholeValues&, const T& value) {
    return value;
  }

  // No tensor of ours, but somebody who looks on.
  static Result run_plain(const OpInfo& info, const Arguments& arguments, Args... args) {
    c10::impl::ExcludeDispatchKeyGuard below(kPassed);
    if constexpr (kWrites) {
      return Op::redispatch(kCpu, args...);
    } else {
      Result result = Op::redispatch(kCpu, args...);
      if (!info.is_view && tape::is_recording()) tell(arguments, result);
      return result;
    }
  }

  static void tell(const Arguments& arguments, const Result& result) {
    tape::Notes& notes = *tape::detail::current->notes();
    for (const detail::TensorSlot& slot : arguments.tensors) {
      const c10::TensorImpl* part = slot.meta != nullptr ? slot.meta->local.unsafeGetTensorImpl() : slot.impl;
      notes.read(*part, slot.impl->version_counter());
    }
    if constexpr (std::is_same_v<Result, at::Tensor>) {
      notes.made(result);
    } else if constexpr (!kWrites) {
      std::apply([&](const auto&... each) { (notes.made(each), ...); }, result);
    }
  }

  // Straight to the CPU kernel: autograd and everything else above it has been passed with the DTensors.
  template <size_t... I>
  static Result run_local(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments,
                          std::index_sequence<I...>, Args... args) {
    const Localiser local{plan};
    c10::impl::ExcludeDispatchKeyGuard below(kPassed);
    if constexpr (kWrites) {
      detail::check_writable(info, arguments);
      Op::redispatch(kCpu, local(int(I), args)...);
      return std::get<0>(std::tie(args...));
    } else {
      Result result = Op::redispatch(kCpu, local(int(I), args)...);
      if (C10_UNLIKELY(tape::is_recording()) && !info.is_view) tell(arguments, result);
      return wrap_results(info, plan, arguments, std::move(result));
    }
  }

  static at::Tensor wrap_results(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments, at::Tensor t) {
    return detail::wrap_fast(info, plan, arguments, 0, std::move(t));
  }
  template <class... T>
  static std::tuple<T...> wrap_results(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments,
                                       std::tuple<T...> results) {
    int r = 0;
    std::apply([&](T&... t) { ((t = detail::wrap_fast(info, plan, arguments, r++, std::move(t))), ...); }, results);
    return results;
  }

  template <class Run>
  static Result run_boxed(const Run& run, Args... args) {
    torch::jit::Stack stack;
    (torch::jit::push_one(stack, c10::IValue(args)), ...);
    run(stack);
    if constexpr (std::is_reference_v<Result>) {
      return std::get<0>(std::tie(args...));
    } else if constexpr (std::is_same_v<Result, at::Tensor>) {
      return std::move(stack.front()).toTensor();
    } else {
      Result results;
      size_t r = 0;
      std::apply([&](auto&... t) { ((t = std::move(stack[r++]).toTensor()), ...); }, results);
      return results;
    }
  }
};

template <class Op>
void add_hot(torch::Library& library) {
  const std::string name = Op::overload_name[0] == '\0' ? Op::name : std::string(Op::name) + "." + Op::overload_name;
  library.impl(name.c_str(), torch::CppFunction::makeFromUnboxedFunction(&HotOp<Op, typename Op::schema>::run));
}

template <class... Ops>
void add_hot_ops(torch::Library& library) {
  (add_hot<Ops>(library), ...);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Fake, m) {
  using namespace at::_ops;
  add_hot_ops<add_Tensor, sub_Tensor, mul_Tensor, div_Tensor, add__Tensor, mul__Tensor, div__Tensor, add_Scalar,
              mul_Scalar, div_Scalar, add__Scalar, mul__Scalar, div__Scalar, addcmul_, addcdiv_, at::_ops::sqrt, mm,
              addmm, bmm, t, view, transpose_int, expand, detach, gelu, gelu_backward, relu, threshold_backward,
              _softmax, _softmax_backward_data, _log_softmax, native_layer_norm, sum_dim_IntList>(m);
}

}  // namespace serried
