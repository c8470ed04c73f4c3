// Reads an op's schema once per thread.
#include "serried/tensor/dispatch/op_info.h"

#include <ATen/core/enum_tag.h>

#include <array>
#include <memory>
#include <unordered_map>

#include "serried/spmd/registry.h"

namespace serried::detail {
namespace {

using Kind = OpInfo::ArgumentKind;

bool is_tensor_type(const c10::Type& type) {
  if (type.kind() == c10::TypeKind::TensorType) return true;
  if (type.kind() != c10::TypeKind::OptionalType) return false;
  return type.expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::TensorType;
}

const c10::Type& without_optional(const c10::Type& type) {
  if (type.kind() != c10::TypeKind::OptionalType) return type;
  return *type.expectRef<c10::OptionalType>().getElementType();
}

Kind kind_of(const c10::Type& type, bool numbers_decide) {
  if (is_tensor_type(type)) return Kind::tensor;
  const c10::Type& bare = without_optional(type);
  if (bare.kind() == c10::TypeKind::ListType) {
    const c10::Type& element = *bare.expectRef<c10::ListType>().getElementType();
    if (element.kind() == c10::TypeKind::TensorType) return Kind::tensor_list;
    if (is_tensor_type(element)) return Kind::optional_tensor_list;
    const bool numbers = element.kind() == c10::TypeKind::FloatType || element.kind() == c10::TypeKind::NumberType;
    return numbers && !numbers_decide ? Kind::value_only : Kind::other;
  }
  if (bare.kind() == c10::TypeKind::GeneratorType) return Kind::value_only;
  // A learning rate that changes every step must not make a new plan every step.
  const bool number = bare.kind() == c10::TypeKind::FloatType || bare.kind() == c10::TypeKind::NumberType;
  return number && !numbers_decide ? Kind::value_only : Kind::other;
}

bool starts_with(const std::string& text, const char* head) {
  return text.rfind(head, 0) == 0;
}

using Infos = std::unordered_map<const void*, std::unique_ptr<OpInfo>>;
Infos& infos() {
  static thread_local Infos map;
  return map;
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& op) : schema(&op.schema()) {
  const c10::FunctionSchema& s = *schema;
  name = s.overload_name().empty() ? s.name() : s.name() + "." + s.overload_name();
  num_arguments = int(s.arguments().size());
  num_returns = int(s.returns().size());
  const bool numbers_decide = spmd::is_dynamic(s);
  for (const c10::Argument& argument : s.arguments()) {
    kinds.push_back(kind_of(*argument.type(), numbers_decide));
    const c10::AliasInfo* alias = argument.alias_info();
    const bool written = alias != nullptr && alias->isWrite();
    is_written.push_back(written);
    is_out.push_back(written && argument.is_out());
    has_out |= is_out.back();
    has_written |= written && !is_out.back();
    has_lists |= kinds.back() == Kind::tensor_list || kinds.back() == Kind::optional_tensor_list;
    takes_generator |= without_optional(*argument.type()).kind() == c10::TypeKind::GeneratorType;
    is_view |= alias != nullptr && !alias->isWrite();
  }
  for (const c10::Argument& result : s.returns()) {
    int alias = -1;
    for (int i = 0; result.alias_info() != nullptr && result.alias_info()->isWrite() && i < num_arguments; ++i) {
      const c10::AliasInfo* from = s.arguments()[i].alias_info();
      if (from != nullptr && from->isWrite() && from->beforeSets() == result.alias_info()->beforeSets()) alias = i;
    }
    return_alias.push_back(alias);
  }
  is_metadata_change = op.hasTag(at::Tag::inplace_view);
  is_composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
                 !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  is_foreach = starts_with(s.name(), "aten::_foreach_") || starts_with(s.name(), "aten::_fused_") ||
               starts_with(s.name(), "aten::_amp_foreach_");
  handler = find_handler(s);
  goes_by_rules = handler == nullptr && !is_composite && !has_out;
}

OpInfo& op_info(const c10::OperatorHandle& op) {
  // Of a handle only its schema's address is cheap to ask for, and it is the op's for ever.
  const c10::FunctionSchema* schema = &op.schema();
  // A small table in front of the map: programs use few ops, over and over.
  static thread_local std::array<OpInfo*, 512> recent{};
  OpInfo*& slot = recent[(reinterpret_cast<uintptr_t>(schema) >> 4) % recent.size()];
  if (C10_LIKELY(slot != nullptr && slot->schema == schema)) return *slot;
  std::unique_ptr<OpInfo>& info = infos()[schema];
  if (!info) info = std::make_unique<OpInfo>(op);
  slot = info.get();
  return *info;
}

void forget_last_plans() {
  for (auto& [op, info] : infos()) info->last_plan = nullptr;
}

}  // namespace serried::detail
