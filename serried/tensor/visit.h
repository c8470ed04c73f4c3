// Finds the tensors in what a function takes and returns: containers of the standard library, and your own structs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/adaptive.h>

#include <array>
#include <iterator>
#include <map>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "serried/base/visitable.h"
#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"

namespace serried {
namespace detail {

template <class T>
inline constexpr bool is_tensor_free =
    std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_convertible_v<const T&, std::string_view> ||
    std::is_same_v<T, at::Scalar> || std::is_same_v<T, std::nullopt_t> || std::is_same_v<T, Group> ||
    std::is_same_v<T, DeviceMesh> || std::is_same_v<T, Placement>;

/// Visitors that also want what is no tensor, and how many elements there are, have a member `plain`.
template <class Fn, class T>
void visit_plain(Fn& fn, const T& value) {
  if constexpr (requires { fn.plain(value); }) fn.plain(value);
}

template <class T>
inline constexpr bool no_visitor = false;

/// Calls `fn(at::Tensor&)` for every tensor in `value`, in order.
template <class T, class Fn>
void for_each_tensor(T& value, Fn& fn) {
  using Plain = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<Plain, at::Tensor>) {
    fn(value);
  } else if constexpr (std::is_base_of_v<at::Tensor, Plain>) {
    fn(static_cast<std::conditional_t<std::is_const_v<T>, const at::Tensor&, at::Tensor&>>(value));
  } else if constexpr (is_tensor_free<Plain>) {
    visit_plain(fn, value);
  } else if constexpr (HasVisitor<T, Fn>) {
    value.visit_tensors(fn);
  } else if constexpr (HasFreeVisitor<T, Fn>) {
    visit_tensors(value, fn);
  } else if constexpr (std::is_same_v<Plain, torch::nn::ASMoutput>) {
    fn(value.output);
  } else if constexpr (IsMap<Plain>) {
    visit_plain(fn, value.size());
    for (auto& [key, element] : value) {
      if constexpr (is_tensor_free<std::remove_cvref_t<decltype(key)>>) visit_plain(fn, key);
      for_each_tensor(element, fn);
    }
  } else if constexpr (IsOptional<Plain>) {
    visit_plain(fn, value.has_value());
    if (value.has_value()) for_each_tensor(*value, fn);
  } else if constexpr (IsRange<Plain>) {
    visit_plain(fn, int64_t(std::distance(value.begin(), value.end())));
    for (auto&& element : value) for_each_tensor(element, fn);
  } else if constexpr (IsTuple<Plain>) {
    std::apply([&](auto&... element) { (for_each_tensor(element, fn), ...); }, value);
  } else {
    static_assert(no_visitor<T>,
                  "serried cannot see the tensors of this type. Give it a visitor: a member "
                  "`template <class F> void visit_tensors(F& fn) { fn(first); fn(second); }`, or a free function "
                  "`visit_tensors(T&, F&)` in its namespace; an empty one if it holds no tensors.");
  }
}

}  // namespace detail
}  // namespace serried
