// Arguments of forward on their way into the module: copies whose tensors are moved and cast.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "serried/tensor/visit.h"

namespace serried::detail {

/// Whether for_each_tensor finds the tensors of a T and may replace them.
template <class T>
constexpr bool can_visit() {
  using Fn = void (*)(at::Tensor&);
  if constexpr (std::is_const_v<T> || std::is_reference_v<T>) {
    return false;
  } else if constexpr (std::is_base_of_v<at::Tensor, T> || is_tensor_free<T> || HasVisitor<T, Fn> ||
                       HasFreeVisitor<T, Fn>) {
    return true;
  } else if constexpr (IsMap<T>) {
    return can_visit<typename T::mapped_type>();
  } else if constexpr (IsOptional<T>) {
    return can_visit<typename T::value_type>();
  } else if constexpr (IsRange<T>) {
    using Element = decltype(*std::declval<T&>().begin());
    return std::is_lvalue_reference_v<Element> && can_visit<std::remove_reference_t<Element>>();
  } else if constexpr (IsTuple<T>) {
    return []<size_t... i>(std::index_sequence<i...>) {
      return (can_visit<std::tuple_element_t<i, T>>() && ...);
    }
    (std::make_index_sequence<std::tuple_size_v<T>>());
  } else {
    return false;
  }
}

template <class Arg>
inline constexpr bool is_prepared =
    can_visit<std::remove_cvref_t<Arg>>() && std::is_constructible_v<std::remove_cvref_t<Arg>, Arg>;

/// Calls `run` with copies of `args`, after `prepare(at::Tensor&)` for each of their tensors. Arguments of types that
/// have no visitor are passed as they are.
template <class Prepare, class Run, class... Args>
decltype(auto) with_prepared(Prepare prepare, Run run, Args&&... args) {
  std::tuple<std::conditional_t<is_prepared<Args>, std::remove_cvref_t<Args>, Args&&>...> copies(
      std::forward<Args>(args)...);
  return std::apply(
      [&](auto&... copy) -> decltype(auto) {
        const auto visit = [&]<class Arg>(std::type_identity<Arg>, auto& value) {
          if constexpr (is_prepared<Arg>) for_each_tensor(value, prepare);
        };
        (visit(std::type_identity<Args>(), copy), ...);
        return run(std::forward<Args>(copy)...);
      },
      copies);
}

}  // namespace serried::detail
