// The tables of what gloo carries and reduces.
#include "serried/comm/backends/gloo/checks.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"

namespace serried::gloo {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;

bool is_carried(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kBool:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong: return true;
    default: return false;
  }
}

const char* op_name(RedOpType op) {
  constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return op < std::size(kNames) ? kNames[op] : "unused";
}

// What to do instead of `op` on `dtype`; null where gloo can do it.
const char* instead_of(RedOpType op, at::ScalarType dtype) {
  const bool integral = at::isIntegralType(dtype, /*includeBool=*/true);
  switch (op) {
    case RedOpType::SUM: return nullptr;
    case RedOpType::AVG: return dtype == at::kBool ? "reduce bool with bor, band or bxor" : nullptr;
    case RedOpType::PRODUCT:
    case RedOpType::MIN:
    case RedOpType::MAX: return at::isComplexType(dtype) ? "reduce complex numbers with sum or avg" : nullptr;
    case RedOpType::BAND:
    case RedOpType::BOR:
    case RedOpType::BXOR: return integral ? nullptr : "use bitwise reductions on integers and bool";
    case RedOpType::PREMUL_SUM: return "multiply the tensor first, then reduce with sum";
    default: return "pass a reduction: sum, avg, product, min, max, band, bor or bxor";
  }
}

}  // namespace

void check_memory(std::string_view where, const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& x : tensors) {
    if (!x.defined() || x.layout() != at::kStrided) continue;  // for gloo's own checks
    if (!x.is_contiguous()) {
      raise<c10::ValueError>(
          {where, c10::str(watch::describe_tensor(x), " is not contiguous, and gloo takes memory as it lies"),
           "pass x.contiguous(), and copy back what the call writes into it"});
    }
    if (!x.is_conj() && !x.is_neg()) continue;
    raise<c10::ValueError>({where,
                            c10::str(watch::describe_tensor(x),
                                     " is a lazy conjugate or negative, and gloo takes memory "
                                     "as it lies"),
                            "pass x.resolve_conj().resolve_neg()"});
  }
}

void check_carried(std::string_view where, const std::vector<at::Tensor>& tensors, bool takes_complex) {
  for (const at::Tensor& x : tensors) {
    if (!x.defined() || is_carried(x.scalar_type())) continue;
    if (takes_complex && at::isComplexType(x.scalar_type())) continue;
    raise<c10::ValueError>({where, c10::str("gloo cannot carry ", watch::describe_tensor(x)),
                            x.is_complex() ? "pass at::view_as_real(x)" : "pass x.view(at::kByte), or use \"shm\""});
  }
}

void check_reduction(std::string_view where, const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) {
  for (const at::Tensor& x : tensors) {
    if (!x.defined()) continue;
    const at::ScalarType dtype = x.scalar_type();
    const char* instead = instead_of(op.op_, dtype);
    // Averages of integers travel as i64.
    const bool as_i64 = op.op_ == RedOpType::AVG && at::isIntegralType(dtype, false) && dtype != at::kUInt64;
    if (as_i64 && x.layout() != at::kStrided) instead = "reduce sparse tensors with sum, then divide";
    if (!instead && !as_i64 && !is_carried(dtype) && !at::isComplexType(dtype))
      instead = "convert it to i32 or f32, or use \"shm\"";
    if (!instead) continue;
    raise<c10::ValueError>(
        {where, c10::str("gloo has no ", op_name(op.op_), " of ", watch::describe_tensor(x)), instead});
  }
}

}  // namespace serried::gloo
