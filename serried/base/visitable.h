// What containers and structs offer to those who look for what is in them.
#pragma once

#include <tuple>

namespace serried::detail {

template <class T, class Fn>
concept HasVisitor = requires(T& value, Fn& fn) {
  value.visit_tensors(fn);
};

// Found in the namespace of T only.
template <class T, class Fn>
concept HasFreeVisitor = requires(T& value, Fn& fn) {
  visit_tensors(value, fn);
};

template <class T>
concept IsMap = requires {
  typename T::mapped_type;
};

template <class T>
concept IsTuple = requires {
  std::tuple_size<T>::value;
};

template <class T>
concept IsRange = requires(T& value) {
  value.begin();
  value.end();
};

template <class T>
concept IsOptional = requires(T& value) {
  value.has_value();
  *value;
};

}  // namespace serried::detail
