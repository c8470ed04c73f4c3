// Reductions of Partial placements and their neutral elements, for every dtype.
#include "serried/tensor/redistribute/reduce.h"

#include <limits>

#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

RedOpType op_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum: return RedOpType::SUM;
    case ReduceKind::avg: return RedOpType::AVG;
    case ReduceKind::min: return RedOpType::MIN;
    case ReduceKind::max: return RedOpType::MAX;
    case ReduceKind::product: return RedOpType::PRODUCT;
    case ReduceKind::band: return RedOpType::BAND;
    case ReduceKind::bor: return RedOpType::BOR;
    case ReduceKind::bxor: return RedOpType::BXOR;
  }
  return RedOpType::UNUSED;
}

// Of 0 and 1: sum and or are the larger, product and and the smaller.
RedOpType bool_op_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
    case ReduceKind::max:
    case ReduceKind::bor: return RedOpType::MAX;
    case ReduceKind::min:
    case ReduceKind::product:
    case ReduceKind::band: return RedOpType::MIN;
    default: return RedOpType::BXOR;
  }
}

[[noreturn]] void refuse(ReduceKind kind, at::ScalarType dtype, const char* why, const char* fix) {
  raise<c10::ValueError>(
      {"redistribute", c10::str("Partial(", to_string(kind), ") of dtype ", dtype, " has no value: ", why), fix});
}

void check(ReduceKind kind, at::ScalarType dtype) {
  if (kind == ReduceKind::avg && at::isIntegralType(dtype, /*includeBool=*/true)) {
    refuse(kind, dtype, "the average of integers is not an integer", "use Partial(\"sum\"), or a floating dtype");
  }
  const bool bitwise = kind == ReduceKind::band || kind == ReduceKind::bor || kind == ReduceKind::bxor;
  if (bitwise && !at::isIntegralType(dtype, /*includeBool=*/true)) {
    refuse(kind, dtype, "only integers and bool have bits to combine", "use an integer dtype");
  }
  if ((kind == ReduceKind::min || kind == ReduceKind::max) && at::isComplexType(dtype)) {
    refuse(kind, dtype, "complex numbers have no order", "reduce real and imaginary parts apart");
  }
}

at::Scalar extreme(at::ScalarType dtype, bool highest) {
  if (at::isFloatingType(dtype)) {
    const double infinity = std::numeric_limits<double>::infinity();
    return highest ? infinity : -infinity;
  }
  switch (dtype) {
    case at::kBool: return highest;
    case at::kByte: return highest ? 255 : 0;
    case at::kChar: return highest ? 127 : -128;
    case at::kShort: return highest ? 32767 : -32768;
    case at::kInt: return highest ? std::numeric_limits<int32_t>::max() : std::numeric_limits<int32_t>::min();
    case at::kUInt16: return highest ? 65535 : 0;
    case at::kUInt32: return highest ? int64_t(std::numeric_limits<uint32_t>::max()) : int64_t(0);
    case at::kUInt64: return highest ? at::Scalar(std::numeric_limits<uint64_t>::max()) : at::Scalar(0);
    default: return highest ? std::numeric_limits<int64_t>::max() : std::numeric_limits<int64_t>::min();
  }
}

at::Scalar all_bits(at::ScalarType dtype) {
  const bool is_signed = at::isSignedType(dtype);
  return dtype != at::kBool && is_signed ? at::Scalar(int64_t(-1)) : extreme(dtype, /*highest=*/true);
}

at::Scalar identity_of(ReduceKind kind, at::ScalarType dtype) {
  switch (kind) {
    case ReduceKind::product: return dtype == at::kBool ? at::Scalar(true) : at::Scalar(1);
    case ReduceKind::min: return extreme(dtype, /*highest=*/true);
    case ReduceKind::max: return extreme(dtype, /*highest=*/false);
    case ReduceKind::band: return all_bits(dtype);
    default: return 0;
  }
}

}  // namespace

namespace detail {

Reduction reduction_of(const spmd::Step& step, c10::IntArrayRef mesh_shape, at::ScalarType dtype) {
  int64_t averaged = 1;
  bool all_averaged = true;
  for (int64_t axis : step.axes) {
    const ReduceKind kind = step.before[axis].reduce();
    check(kind, dtype);
    if (kind == ReduceKind::avg) {
      averaged *= mesh_shape[axis];
    } else {
      all_averaged = false;
    }
  }
  const ReduceKind kind = step.before[step.axes.front()].reduce();
  if (dtype == at::kBool) return {share(bool_op_of(kind)), true, 1};
  if (all_averaged || averaged == 1) return {share(op_of(kind)), false, 1};
  return {share(RedOpType::SUM), false, averaged};
}

bool is_idempotent(ReduceKind kind) {
  return kind != ReduceKind::sum && kind != ReduceKind::product && kind != ReduceKind::bxor;
}

}  // namespace detail

void fill_identity_(const at::Tensor& t, ReduceKind kind) {
  const at::ScalarType dtype = t.scalar_type();
  if (kind == ReduceKind::avg) refuse(kind, dtype, "an average has no neutral element", "use Partial(\"sum\")");
  check(kind, dtype);
  t.fill_(identity_of(kind, dtype));
}

at::Tensor identity_like(const at::Tensor& t, ReduceKind kind) {
  at::Tensor made = at::empty_like(t, at::MemoryFormat::Contiguous);
  fill_identity_(made, kind);
  return made;
}

}  // namespace serried
