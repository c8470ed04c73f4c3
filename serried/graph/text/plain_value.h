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

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include "serried/comm/groups/group.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/weak_tensor.h"

namespace serried {
namespace graph {

/// Equal texts stand for equal values. Floating-point numbers in full.
std::string plain_text(double value);
std::string plain_text(float value);
std::string plain_text(const at::Scalar& value);
std::string plain_text(const at::Tensor& t);             // which tensor it is, not its data
std::string plain_text(const at::Generator& generator);  // which one it is
std::string plain_text(const Group& group);              // its name, which no other group has
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

/// In quotes, so that no text looks like two.
std::string text_in_list(std::string_view text);

template <class T>
std::string plain_text(const std::vector<T>& values) {
  std::string text = "[";
  for (const T& value : values) {
    if (text.size() > 1) text += ", ";
    if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      text += text_in_list(value);
    } else {
      text += plain_text(value);
    }
  }
  return text + "]";
}

/// The objects in a plain value, of which a text has the address only. Held weakly, which keeps the address of a tensor
/// from another one; of what a shared_ptr owns the owner is compared.
struct Identities {
  std::vector<std::weak_ptr<const void>> objects = {};
  std::vector<WeakTensor> tensors = {};
  std::vector<c10::weak_intrusive_ptr<c10::GeneratorImpl>> generators = {};

  template <class T>
  void add(const T& value) {
    if constexpr (std::is_base_of_v<at::Tensor, T>) {
      tensors.emplace_back(value);
    } else if constexpr (std::is_same_v<T, at::Generator>) {
      generators.emplace_back(value.getIntrusivePtr());
    } else if constexpr (requires { value.is_empty(), value.ptr(); }) {
      if (!value.is_empty()) objects.push_back(value.ptr());
    }
  }
  template <class T>
  void add(const std::shared_ptr<T>& object) {
    objects.push_back(object);
  }
  template <class T>
  void add(const std::vector<T>& values) {
    for (const T& value : values) add(value);
  }
  bool operator==(const Identities& other) const;
};

}  // namespace graph

/// A variable that a captured function reads without an op to show it. Kept by reference.
///     capture(step, {.watch = {{"temperature", temperature}, {"group", group}}});
class Watched {
 public:
  template <class T>
  Watched(std::string name, const T& variable)
      : name_(std::move(name)), text_([&variable] { return graph::plain_text(variable); }), identities_([&variable] {
          graph::Identities identities;
          identities.add(variable);
          return identities;
        }) {}
  /// A temporary would be gone at the first call.
  template <class T>
  Watched(std::string name, const T&& variable) = delete;

  const std::string& name() const { return name_; }
  std::string text() const { return text_(); }
  graph::Identities identities() const { return identities_(); }

 private:
  std::string name_;
  std::function<std::string()> text_;
  std::function<graph::Identities()> identities_;
};

}  // namespace serried
