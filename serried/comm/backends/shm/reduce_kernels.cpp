// The loops. This file is compiled once per instruction set; the compiler vectorises them.
#include "serried/comm/backends/shm/reduce_kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <type_traits>

namespace serried::shm::SERRIED_KERNEL_LEVEL {
namespace {

using Op = c10d::ReduceOp::RedOpType;

template <class T>
constexpr bool is_complex = c10::is_complex<T>::value;

template <class T>
constexpr bool is_reduced_float = std::is_same_v<T, c10::Half> || std::is_same_v<T, c10::BFloat16>;

/// The type sums are kept in. An average lies among its inputs even where their sum does not fit: averages of integers
/// are added up in a type that holds the sum of any number of ranks.
template <class T, bool kAverage>
auto accumulator() {
  if constexpr (is_reduced_float<T>)
    return float();
  else if constexpr (kAverage && std::is_integral_v<T> && sizeof(T) == 8)
    return std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>();
  else if constexpr (kAverage && std::is_integral_v<T>)
    return int64_t();
  else
    return T();
}

// Unsigned arithmetic: overflow of integers wraps instead of being undefined. An average has none.
struct Sum {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_same_v<A, bool>)
      return a || b;
    else if constexpr (std::is_integral_v<A> && sizeof(A) <= 8)
      return A(std::make_unsigned_t<A>(a) + std::make_unsigned_t<A>(b));
    else
      return a + b;
  }
};
struct Product {
  template <class A>
  static A apply(A a, A b) {
    if constexpr (std::is_same_v<A, bool>) return a && b;
    // 64 bits first: short unsigned types promote to int, whose overflow is undefined.
    else if constexpr (std::is_integral_v<A>)
      return A(uint64_t(a) * uint64_t(b));
    else
      return a * b;
  }
};
// A NaN on any rank is the result on every rank: a comparison alone would keep or drop it by rank order.
struct Min {
  template <class A>
  static A apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct Max {
  template <class A>
  static A apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};
struct And {
  template <class A>
  static A apply(A a, A b) {
    return A(a & b);
  }
};
struct Or {
  template <class A>
  static A apply(A a, A b) {
    return A(a | b);
  }
};
struct Xor {
  template <class A>
  static A apply(A a, A b) {
    return A(a ^ b);
  }
};

template <class A>
A divide(A value, int by) {
  if constexpr (is_complex<A>)
    return value / typename A::value_type(by);
  else
    return A(value / A(by));  // integers: towards zero
}

template <class T, class F, bool kAverage>
void reduce(void* out_bytes, const void* const* sources, int num_sources, int64_t count) {
  using A = decltype(accumulator<T, kAverage>());
  T* out = static_cast<T*>(out_bytes);
  const auto finish = [num_sources](A value) {
    if constexpr (kAverage)
      return T(divide(value, num_sources));
    else
      return T(value);
  };
  if (num_sources == 2) {
    const T* a = static_cast<const T*>(sources[0]);
    const T* b = static_cast<const T*>(sources[1]);
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) out[i] = finish(F::apply(A(a[i]), A(b[i])));
    return;
  }
  // The block stays in the first-level cache while the sources stream through.
  constexpr int64_t kBlock = 512;
  A sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(sources[0]) + begin;
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) sums[i] = A(first[i]);
    for (int k = 1; k < num_sources; ++k) {
      const T* source = static_cast<const T*>(sources[k]) + begin;
#pragma GCC ivdep
      for (int64_t i = 0; i < n; ++i) sums[i] = F::apply(sums[i], A(source[i]));
    }
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) out[begin + i] = finish(sums[i]);
  }
}

template <class Source, class T, class F, bool kAverage>
void reduce_part(void* out_bytes, const void* before_bytes, const void* const* sources, int num_sources, int64_t count,
                 int num_ranks) {
  using A = decltype(accumulator<T, kAverage>());
  const A* before = static_cast<const A*>(before_bytes);
  constexpr int64_t kBlock = 512;
  A sums[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const Source* first = static_cast<const Source*>(sources[0]) + begin;
    if (before == nullptr)
      for (int64_t i = 0; i < n; ++i) sums[i] = A(first[i]);
    else
      for (int64_t i = 0; i < n; ++i) sums[i] = F::apply(before[begin + i], A(first[i]));
    for (int k = 1; k < num_sources; ++k) {
      const Source* source = static_cast<const Source*>(sources[k]) + begin;
      for (int64_t i = 0; i < n; ++i) sums[i] = F::apply(sums[i], A(source[i]));
    }
    if (num_ranks == 0) {
      A* out = static_cast<A*>(out_bytes) + begin;
      for (int64_t i = 0; i < n; ++i) out[i] = sums[i];
      continue;
    }
    T* out = static_cast<T*>(out_bytes) + begin;
    for (int64_t i = 0; i < n; ++i) {
      if constexpr (kAverage)
        out[i] = T(divide(sums[i], num_ranks));
      else
        out[i] = T(sums[i]);
    }
  }
}

/// The whole reduction and its parts.
struct Kernels {
  ReduceKernel whole = nullptr;
  PartialReduction part = {};
};

template <class T, class F, bool kAverage>
Kernels kernels() {
  using A = decltype(accumulator<T, kAverage>());
  return {
      reduce<T, F, kAverage>,
      {.kernel = reduce_part<T, T, F, kAverage>, .join = reduce_part<A, T, F, kAverage>, .element_bytes = sizeof(A)}};
}

template <class T>
Kernels find_for(Op op) {
  constexpr bool ordered = !is_complex<T>;
  constexpr bool bits = std::is_integral_v<T>;
  switch (op) {
    case Op::SUM: return kernels<T, Sum, false>();
    case Op::PRODUCT: return kernels<T, Product, false>();
    case Op::AVG:
      if constexpr (!std::is_same_v<T, bool>) return kernels<T, Sum, true>();
      return {};
    case Op::MIN:
      if constexpr (ordered) return kernels<T, Min, false>();
      return {};
    case Op::MAX:
      if constexpr (ordered) return kernels<T, Max, false>();
      return {};
    case Op::BAND:
      if constexpr (bits) return kernels<T, And, false>();
      return {};
    case Op::BOR:
      if constexpr (bits) return kernels<T, Or, false>();
      return {};
    case Op::BXOR:
      if constexpr (bits) return kernels<T, Xor, false>();
      return {};
    default: return {};
  }
}

Kernels find_kernels(c10::ScalarType dtype, Op op) {
  using c10::ScalarType;
  switch (dtype) {
    case ScalarType::Float: return find_for<float>(op);
    case ScalarType::Double: return find_for<double>(op);
    case ScalarType::Half: return find_for<c10::Half>(op);
    case ScalarType::BFloat16: return find_for<c10::BFloat16>(op);
    case ScalarType::ComplexFloat: return find_for<c10::complex<float>>(op);
    case ScalarType::ComplexDouble: return find_for<c10::complex<double>>(op);
    case ScalarType::Bool: return find_for<bool>(op);
    case ScalarType::Byte: return find_for<uint8_t>(op);
    case ScalarType::Char: return find_for<int8_t>(op);
    case ScalarType::Short: return find_for<int16_t>(op);
    case ScalarType::Int: return find_for<int32_t>(op);
    case ScalarType::Long: return find_for<int64_t>(op);
    case ScalarType::UInt16: return find_for<uint16_t>(op);
    case ScalarType::UInt32: return find_for<uint32_t>(op);
    case ScalarType::UInt64: return find_for<uint64_t>(op);
    default: return {};
  }
}

}  // namespace

ReduceKernel find(c10::ScalarType dtype, Op op) {
  return find_kernels(dtype, op).whole;
}

PartialReduction find_partial(c10::ScalarType dtype, Op op) {
  return find_kernels(dtype, op).part;
}

}  // namespace serried::shm::SERRIED_KERNEL_LEVEL
