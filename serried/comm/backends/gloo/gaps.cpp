// Tables of what gloo carries and reduces; and values with marks beside them, a mark being what MIN or MAX prefers, so
// that one NaN marks its place on every rank.
#include "serried/comm/backends/gloo/gaps.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/isnan.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <limits>

#include "serried/base/error.h"
#include "serried/comm/collectives/reductions.h"
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

at::Tensor with_marks(const at::Tensor& x, double mark) {
  const at::Tensor flat = x.detach().reshape(-1);
  const at::Tensor is_nan = at::isnan(flat);
  return at::cat({flat.masked_fill(is_nan, 0), is_nan.to(flat.scalar_type()).mul_(mark)});
}

void take_back(const at::Tensor& x, const at::Tensor& buffer) {
  const at::Tensor values = buffer.narrow(0, 0, x.numel());
  const at::Tensor marks = buffer.narrow(0, x.numel(), x.numel());
  values.masked_fill_(marks.ne(0), std::numeric_limits<double>::quiet_NaN());
  x.detach().copy_(values.view(x.sizes()));
}

Reduced with_nans_first(const std::vector<at::Tensor>& tensors, RedOpType op) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& x : tensors) buffers.push_back(with_marks(x, op == RedOpType::MAX ? 1 : -1));
  return {buffers, op, [tensors, buffers] {
            for (size_t i = 0; i < tensors.size(); ++i) take_back(tensors[i], buffers[i]);
          }};
}

Reduced wide_average(const std::vector<at::Tensor>& tensors, int64_t count) {
  std::vector<at::Tensor> buffers;
  for (const at::Tensor& x : tensors) buffers.push_back(detail::average_addends(x.detach(), count));
  return {buffers, RedOpType::SUM, [tensors, buffers, count] {
            for (size_t i = 0; i < tensors.size(); ++i) detail::write_average(tensors[i].detach(), buffers[i], count);
          }};
}

bool is_widened(at::ScalarType dtype) {
  return at::isReducedFloatingType(dtype) || at::isIntegralType(dtype, /*includeBool=*/false);
}

bool all_of(const std::vector<at::Tensor>& tensors, bool (*is_kind)(at::ScalarType)) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& x) {
    return x.defined() && x.layout() == at::kStrided && is_kind(x.scalar_type());
  });
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

Reduced make_reduced(const std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op, int64_t count) {
  const bool ordered = op.op_ == RedOpType::MIN || op.op_ == RedOpType::MAX;
  if (ordered && all_of(tensors, at::isFloatingType)) return with_nans_first(tensors, op.op_);
  if (op.op_ == RedOpType::AVG && all_of(tensors, is_widened)) return wide_average(tensors, count);
  return {tensors, op, {}};
}

}  // namespace serried::gloo
