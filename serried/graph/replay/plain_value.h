// Values that are no tensors, as text: what a captured function was called with or reads.
#pragma once

#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"

namespace serried {
namespace graph {

/// Equal texts stand for equal values. Floating-point numbers in full.
std::string plain_text(double value);
std::string plain_text(float value);
std::string plain_text(const at::Scalar& value);
std::string plain_text(const at::Tensor& t);  // which tensor it is, not its data
std::string plain_text(const Group& group);   // its name, which no other group has
std::string plain_text(const DeviceMesh& mesh);
std::string plain_text(const Placement& placement);

template <std::integral T>
std::string plain_text(T value) {
  return std::to_string(value);
}

template <class T>
requires std::is_enum_v<T> std::string plain_text(T value) {
  if constexpr (std::is_same_v<T, at::ScalarType>) {
    return c10::toString(value);
  } else {
    return std::to_string(int64_t(value));
  }
}

template <class T>
requires std::convertible_to<const T&, std::string_view> std::string plain_text(const T& value) {
  return std::string(std::string_view(value));
}

inline std::string plain_text(std::nullopt_t) {
  return "none";
}

/// Which object it is: a module, an optimizer.
template <class T>
std::string plain_text(const std::shared_ptr<T>& object) {
  return c10::str("object ", static_cast<const void*>(object.get()));
}

template <class T>
requires std::is_base_of_v<torch::nn::ModuleHolder<typename T::ContainedType>, T> std::string plain_text(
    const T& holder) {
  return holder.is_empty() ? "none" : plain_text(holder.ptr());
}

template <class T>
std::string plain_text(const std::vector<T>& values) {
  std::string text = "[";
  for (const T& value : values) text += (text.size() > 1 ? ", " : "") + plain_text(value);
  return text + "]";
}

}  // namespace graph

/// A variable that a captured function reads without an op to show it. Kept by reference.
///     capture(step, {.watch = {{"temperature", temperature}, {"group", group}}});
class Watched {
 public:
  template <class T>
  Watched(std::string name, const T& variable)
      : name_(std::move(name)), text_([&variable] { return graph::plain_text(variable); }) {}
  /// A temporary would be gone at the first call.
  template <class T>
  Watched(std::string name, const T&& variable) = delete;

  const std::string& name() const { return name_; }
  std::string text() const { return text_(); }

 private:
  std::string name_;
  std::function<std::string()> text_;
};

}  // namespace serried
