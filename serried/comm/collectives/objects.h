// Values between ranks: texts, numbers, tensors, containers of them, and your own structs.
#pragma once

#include "serried/base/visitable.h"
#include "serried/comm/collectives/collectives.h"

#include <ATen/core/ivalue.h>
#include <c10/util/Type.h>
#include <torch/serialize/archive.h>

#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace serried {
namespace detail {

template <class T>
concept HasArchive = requires(const T& value, T& result, torch::serialize::OutputArchive& out,
                              torch::serialize::InputArchive& in) {
  out << value;
  in >> result;
};

// Numbers lie side by side in memory, so they travel as bytes.
template <class T>
inline constexpr bool is_vector_of_numbers = false;
template <class T, class A>
inline constexpr bool is_vector_of_numbers<std::vector<T, A>> = std::is_arithmetic_v<T> && !std::is_same_v<T, bool>;

/// Bytes of any number; a pickled text has less than 4 GiB.
c10::IValue pack_bytes(const void* data, size_t size);
std::string_view unpack_bytes(const c10::IValue& packed);

template <class T>
inline constexpr bool cannot_travel = false;

template <class T>
c10::IValue pack(const T& value);

template <class T>
void unpack(const c10::IValue& packed, T& value);

/// Packs what a visitor or a container shows it, in order. A visitor has to take it by reference.
class Packer {
 public:
  Packer() = default;
  Packer(const Packer&) = delete;

  template <class T>
  void operator()(const T& field) {
    fields_.push_back(pack(field));
  }
  c10::IValue packed() && { return c10::ivalue::Tuple::create(std::move(fields_)); }

 private:
  std::vector<c10::IValue> fields_;
};

/// Gives the same fields back.
class Unpacker {
 public:
  explicit Unpacker(const c10::IValue& packed) : fields_(packed.toTupleRef().elements().vec()) {}
  Unpacker(const Unpacker&) = delete;

  size_t size() const { return fields_.size(); }
  template <class T>
  void operator()(T& field) {
    unpack(fields_.at(next_++), field);
  }

 private:
  std::vector<c10::IValue> fields_;
  size_t next_ = 0;
};

template <class T>
c10::IValue pack_fields(const T& value) {
  Packer packer;
  if constexpr (HasVisitor<T, Packer>) {
    T(value).visit_tensors(packer);
  } else if constexpr (HasFreeVisitor<T, Packer>) {
    T copy(value);
    visit_tensors(copy, packer);
  } else if constexpr (IsMap<T>) {
    for (const auto& [key, element] : value) packer(key), packer(element);
  } else if constexpr (IsOptional<T>) {
    if (value.has_value()) packer(*value);
  } else if constexpr (IsRange<T>) {
    for (const auto& element : value) packer(typename T::value_type(element));
  } else if constexpr (IsTuple<T>) {
    std::apply([&](const auto&... element) { (packer(element), ...); }, value);
  } else {
    static_assert(
        cannot_travel<T>,
        "serried cannot send this type to other ranks. Give it operator<< and operator>> for torch::serialize's "
        "archives, or a member `template <class F> void visit_tensors(F& fn) { fn(first); fn(second); }` that "
        "names every field.");
  }
  return std::move(packer).packed();
}

template <class T>
void unpack_fields(const c10::IValue& packed, T& value) {
  Unpacker unpacker(packed);
  if constexpr (HasVisitor<T, Unpacker>) {
    value.visit_tensors(unpacker);
  } else if constexpr (HasFreeVisitor<T, Unpacker>) {
    visit_tensors(value, unpacker);
  } else if constexpr (IsMap<T>) {
    value.clear();
    for (size_t i = 0; i < unpacker.size(); i += 2) {
      std::pair<typename T::key_type, typename T::mapped_type> element;
      unpacker(element.first), unpacker(element.second);
      value.insert(std::move(element));
    }
  } else if constexpr (IsOptional<T>) {
    value.reset();
    if (unpacker.size() > 0) unpacker(value.emplace());
  } else if constexpr (requires(typename T::value_type & element) { value.insert(value.end(), std::move(element)); }) {
    value.clear();
    for (size_t i = 0; i < unpacker.size(); ++i) {
      typename T::value_type element{};
      unpacker(element);
      value.insert(value.end(), std::move(element));
    }
  } else if constexpr (IsRange<T>) {
    static_assert(IsTuple<T>, "serried cannot add elements to what arrives of this type: send a std::vector");
    for (auto& element : value) unpacker(element);
  } else {
    std::apply([&](auto&... element) { (unpacker(element), ...); }, value);
  }
}

template <class T>
c10::IValue pack(const T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    // A copy: of a view the whole storage would travel. What is pickled on a device asks for that device.
    if (!value.defined()) return {};
    return value.detach().to(at::kCPU, value.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    return static_cast<int64_t>(value);
  } else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    return static_cast<double>(value);
  } else if constexpr (std::is_same_v<T, std::string>) {
    return pack_bytes(value.data(), value.size());
  } else if constexpr (is_vector_of_numbers<T>) {
    return pack_bytes(value.data(), value.size() * sizeof(typename T::value_type));
  } else if constexpr (HasArchive<T>) {
    torch::serialize::OutputArchive archive;
    archive << value;
    std::ostringstream text;
    archive.save_to(text);
    return pack(text.str());
  } else {
    return pack_fields(value);
  }
}

template <class T>
void unpack(const c10::IValue& packed, T& value) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    value = packed.isNone() ? at::Tensor() : packed.toTensor();
  } else if constexpr (std::is_integral_v<T> || std::is_enum_v<T>) {
    value = static_cast<T>(packed.toInt());
  } else if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
    value = static_cast<T>(packed.toDouble());
  } else if constexpr (std::is_same_v<T, std::string>) {
    value = unpack_bytes(packed);
  } else if constexpr (is_vector_of_numbers<T>) {
    using Number = typename T::value_type;
    const std::string_view bytes = unpack_bytes(packed);
    value.resize(bytes.size() / sizeof(Number));
    if (!value.empty()) std::memcpy(value.data(), bytes.data(), value.size() * sizeof(Number));
  } else if constexpr (HasArchive<T>) {
    std::istringstream text{std::string(unpack_bytes(packed))};
    torch::serialize::InputArchive archive;
    archive.load_from(text);
    archive >> value;
  } else {
    unpack_fields(packed, value);
  }
}

/// A value on its way: all ranks must name the same type.
struct Parcel {
  std::string type;
  std::function<c10::IValue()> pack;
};

template <class T>
Parcel parcel_of(const T& value) {
  return {c10::demangle_type<T>(), [&value] { return pack(value); }};
}

/// One of each rank, in rank order.
std::vector<c10::IValue> all_gather_packed(const Parcel& mine, const Group& group,
                                           std::optional<std::chrono::milliseconds> timeout);

/// Rank src's; `mine` is packed there only.
c10::IValue broadcast_packed(const Parcel& mine, const Group& group, const BroadcastOptions& options);

}  // namespace detail

struct AllGatherObjectOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Every rank's `value`, in rank order; sizes may differ between ranks. T is a text, a number, a tensor (it comes as a
/// copy on the CPU, without history), a container of the standard library, or a struct with operator<< and operator>>
/// for torch::serialize's archives or with a visitor (docs/data_parallel.md) that names every field. What comes is made
/// by T's default constructor. ValueError where ranks pass different types.
template <class T>
std::vector<T> all_gather_object(const T& value, const Group& group, AllGatherObjectOptions options = {}) {
  const auto packed = detail::all_gather_packed(detail::parcel_of(value), group, options.timeout);
  std::vector<T> values;
  for (const c10::IValue& one : packed) {
    T element{};
    detail::unpack(one, element);
    values.push_back(std::move(element));
  }
  return values;
}

/// Rank src's `value` on every rank; what the others pass is not read.
template <class T>
T broadcast_object(const T& value, const Group& group, BroadcastOptions options = {}) {
  T result{};
  detail::unpack(detail::broadcast_packed(detail::parcel_of(value), group, options), result);
  return result;
}

inline std::vector<std::string> all_gather_object(const char* text, const Group& group,
                                                  AllGatherObjectOptions options = {}) {
  return all_gather_object(std::string(text), group, options);
}

inline std::string broadcast_object(const char* text, const Group& group, BroadcastOptions options = {}) {
  return broadcast_object(std::string(text), group, options);
}

}  // namespace serried
