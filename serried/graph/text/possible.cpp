// Overflow is asked for before it happens; types are compared by what LibTorch takes for them.
#include "serried/graph/text/possible.h"

#include <algorithm>

namespace serried::graph {
namespace {

using c10::TypeKind;

// Adds (size - 1) * stride to `last`; false where that is no number.
bool add_reach(int64_t size, int64_t stride, int64_t& last) {
  int64_t reach = 0;
  return stride >= 0 && !__builtin_mul_overflow(size - 1, stride, &reach) &&
         !__builtin_add_overflow(last, reach, &last);
}

}  // namespace

bool is_possible_shape(c10::IntArrayRef sizes, int64_t each) {
  for (int64_t size : sizes) {
    // An empty dim does not make the others small: strides count past it.
    if (size < 0 || __builtin_mul_overflow(each, std::max<int64_t>(size, 1), &each)) return false;
  }
  return true;
}

bool is_possible(const TensorMeta& meta) {
  const int64_t each = int64_t(c10::elementSize(meta.dtype));
  if (meta.offset < 0 || !is_possible_shape(meta.sizes, each)) return false;
  if (meta.strides.empty()) return true;
  if (meta.strides.size() != meta.sizes.size()) return false;
  int64_t last = meta.offset;
  for (size_t d = 0; d < meta.sizes.size(); ++d) {
    if (!add_reach(std::max<int64_t>(meta.sizes[d], 1), meta.strides[d], last)) return false;
  }
  int64_t bytes = 0;
  return !__builtin_add_overflow(last, 1, &last) && !__builtin_mul_overflow(last, each, &bytes);
}

bool can_be(const c10::TypePtr& type, const c10::IValue& constant) {
  switch (type->kind()) {
    case TypeKind::OptionalType:
      return constant.isNone() || can_be(type->castRaw<c10::OptionalType>()->getElementType(), constant);
    case TypeKind::ListType: {
      if (!constant.isList()) return false;
      const c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      const auto elements = constant.toListRef();
      return std::all_of(elements.begin(), elements.end(), [&](const c10::IValue& e) { return can_be(element, e); });
    }
    case TypeKind::NumberType: return constant.isScalar();
    case TypeKind::IntType:
    case TypeKind::ScalarTypeType:
    case TypeKind::LayoutType:
    case TypeKind::MemoryFormatType: return constant.isInt();
    case TypeKind::FloatType: return constant.isDouble();
    case TypeKind::BoolType: return constant.isBool();
    case TypeKind::ComplexType: return constant.isComplexDouble();
    case TypeKind::StringType: return constant.isString();
    case TypeKind::DeviceObjType: return constant.isDevice();
    case TypeKind::GeneratorType: return constant.isGenerator();
    case TypeKind::ClassType: return constant.isCustomClass() && *constant.type() == *type;
    default: return false;
  }
}

}  // namespace serried::graph
