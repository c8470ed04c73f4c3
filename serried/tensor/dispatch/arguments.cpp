// Flattens a boxed call and builds the key of its plan.
#include "serried/tensor/dispatch/arguments.h"

#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/spec.h"

namespace serried::detail {
namespace {

using c10::IValue;
using Kind = OpInfo::ArgumentKind;

// Words that say what follows in the key; specs are marked so that no number looks like one.
enum Mark : uint64_t {
  kSpec = 1,
  kPlain,
  kAbsent,
  kList,
  kInt,
  kDouble,
  kBool,
  kNone,
  kInts,
  kBools,
  kDoubles,
  kOther
};

uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

void add_value(Arguments& out, const IValue& value) {
  if (value.isInt()) return add_integer(out, value.toInt());
  if (value.isNone()) return add_none(out);
  if (value.isBool()) return add_flag(out, value.toBool());
  if (value.isDouble()) return add_number(out, value.toDouble());
  auto& key = out.key;
  if (value.isIntList()) {
    const auto list = value.toListRef();
    key.push_back(kInts | list.size() << 8);
    for (const IValue& item : list) key.push_back(uint64_t(item.toInt()));
  } else if (value.isBoolList()) {
    const auto list = value.toListRef();
    key.push_back(kBools | list.size() << 8);
    for (const IValue& item : list) key.push_back(item.toBool());
  } else if (value.isDoubleList()) {
    const auto list = value.toListRef();
    key.push_back(kDoubles | list.size() << 8);
    for (const IValue& item : list) key.push_back(bits_of(item.toDouble()));
  } else if (value.isString()) {
    add_text(out, value.toStringRef());
  } else if (value.isDevice()) {
    key.push_back(kOther | 1 << 8);
  } else {
    out.cacheable = false;
  }
}

void add_tensor(Arguments& out, const IValue& value, int argument, int list_index) {
  const bool present = value.isTensor() && value.toTensor().defined();
  add_tensor(out, present ? value.unsafeToTensorImpl() : nullptr, argument, list_index);
}

void add_list(Arguments& out, const IValue& value, int argument) {
  if (value.isNone()) {
    out.key.push_back(kNone);
    return;
  }
  const auto list = value.toListRef();
  out.key.push_back(kList | list.size() << 8);
  for (size_t i = 0; i < list.size(); ++i) add_tensor(out, list[i], argument, int(i));
}

void note_gather(Arguments& out, const DTensorMeta& meta) {
  const GatherOnUse* gather = gather_of(meta);
  if (gather == nullptr) return;
  (gather->is_parameter() ? out.has_other_kind : out.has_like_parameter) = true;
}

// As optimizers write gradients into what they have kept from a step before.
bool may_be_state(const OpInfo& info, const Arguments& arguments, const TensorSlot& slot) {
  return info.is_written[slot.argument] && !at::GradMode::is_enabled() &&
         slot.impl->sizes() == c10::IntArrayRef(arguments.first->sizes);
}

[[noreturn]] void raise_plain(const OpInfo& info, const Arguments& arguments, const TensorSlot& slot) {
  const std::string argument = info.schema->arguments()[slot.argument].name();
  const char* const place_state =
      "call place_like_parameters(optimizer) where it is state that an optimizer made before its parameters were "
      "distributed; else ";
  raise<c10::TypeError>(
      {info.name,
       c10::str("argument ", slot.argument, " \"", argument, "\"",
                slot.list_index < 0 ? "" : c10::str("[", slot.list_index, "]"), " is a plain tensor of sizes ",
                sizes_text(slot.impl->sizes()), " beside a DTensor ", arguments.first->to_string()),
       c10::str(may_be_state(info, arguments, slot) ? place_state : "", "wrap it: distribute_tensor(", argument,
                ", mesh, {Replicate(), ...}) or DTensor::from_local(...), or open an ImplicitReplication scope")});
}

[[noreturn]] void raise_meshes(const OpInfo& info, const Arguments& arguments, const TensorSlot& slot) {
  raise<c10::ValueError>(
      {info.name,
       c10::str("argument ", slot.argument, " \"", info.schema->arguments()[slot.argument].name(), "\" is on ",
                slot.meta->spec->mesh.to_string(), " and another on ", arguments.first->mesh.to_string()),
       "bring both to one mesh: x.redistribute(mesh, placements)"});
}

// One-element tensors count as numbers: the same on every rank by the caller's word. So do tensors that autograd's own
// formulas make up in backward, zeros for a gradient that did not come.
bool counts_as_replicated(const TensorSlot& slot) {
  return slot.impl->numel() == 1 || ImplicitReplication::is_enabled() || torch::autograd::get_current_node() != nullptr;
}

void check_companions(const OpInfo& info, const Arguments& arguments) {
  for (const TensorSlot& slot : arguments.tensors) {
    if (slot.meta == nullptr) {
      if (!counts_as_replicated(slot)) raise_plain(info, arguments, slot);
    } else if (slot.meta->spec->mesh.id() != arguments.first->mesh.id() &&
               !(slot.meta->spec->mesh == arguments.first->mesh)) {
      raise_meshes(info, arguments, slot);
    }
  }
}

void check_copied_views(const OpInfo& info, const Arguments& arguments) {
  for (const TensorSlot& slot : arguments.tensors) {
    if (slot.meta != nullptr) check_fresh(info.name, info.schema->arguments()[slot.argument].name(), *slot.meta);
  }
}

// The first tensor of its kind in a call.
struct Met {
  const TensorKind* kind;
  int argument;
  int list_index;  // -1: not in a list
};

const TensorKind* kind_of(const IValue& value) {
  const DistMeta* meta = value.isTensor() ? dist_meta(value.unsafeToTensorImpl()) : nullptr;
  if (meta == nullptr) return nullptr;
  if (meta->kind != &kDTensor) return meta->kind;
  return C10_UNLIKELY(gather_of(*static_cast<const DTensorMeta*>(meta)) != nullptr) ? &kGathered : &kDTensor;
}

// Calls `fn(kind, argument, list_index)` for every tensor of ours.
template <class Fn>
void for_each_kind(const OpInfo& info, const torch::jit::Stack& stack, const Fn& fn) {
  const IValue* arguments = stack.data() + stack.size() - info.num_arguments;
  for (int i = 0; i < info.num_arguments; ++i) {
    if (info.kinds[i] == Kind::tensor) {
      if (const TensorKind* kind = kind_of(arguments[i])) fn(kind, i, -1);
    } else if ((info.kinds[i] == Kind::tensor_list || info.kinds[i] == Kind::optional_tensor_list) &&
               arguments[i].isList()) {
      int k = 0;
      for (const IValue& item : arguments[i].toListRef()) {
        if (const TensorKind* kind = kind_of(item)) fn(kind, i, k);
        ++k;
      }
    }
  }
}

std::string argument_text(const OpInfo& info, const Met& met) {
  const std::string element = met.list_index < 0 ? "" : c10::str("[", met.list_index, "]");
  return c10::str("argument ", met.argument, " \"", info.schema->arguments()[met.argument].name(), "\"", element);
}

[[noreturn]] void raise_mixed(const OpInfo& info, const Met& a, const Met& b) {
  raise<c10::TypeError>({info.name,
                         c10::str(argument_text(info, a), " is a ", a.kind->name, " and ", argument_text(info, b),
                                  " a ", b.kind->name, ", and no kind in this call takes the others"),
                         c10::str("make one of them a plain tensor, the ", a.kind->name, " by ", a.kind->to_plain,
                                  ", the ", b.kind->name, " by ", b.kind->to_plain)});
}

bool takes(const TensorKind& kind, const TensorKind& other) {
  return &kind == &other || (kind.takes != nullptr && kind.takes(other));
}

const TensorKind* kind_of_mixed(const OpInfo& info, const torch::jit::Stack& stack) {
  std::vector<Met> all;
  for_each_kind(info, stack, [&](const TensorKind* kind, int argument, int list_index) {
    const bool known = std::any_of(all.begin(), all.end(), [&](const Met& met) { return met.kind == kind; });
    if (!known) all.push_back({kind, argument, list_index});
  });
  for (const Met& taker : all) {
    if (std::all_of(all.begin(), all.end(), [&](const Met& met) { return takes(*taker.kind, *met.kind); })) {
      return taker.kind;
    }
  }
  raise_mixed(info, all[0], all[1]);
}

}  // namespace

void add_tensor(Arguments& out, c10::TensorImpl* impl, int argument, int list_index) {
  if (impl == nullptr) {
    out.key.push_back(kAbsent);
    return;
  }
  const DTensorMeta* meta = dtensor_meta(impl);
  if (meta != nullptr) {
    out.key.push_back(kSpec | meta->spec->id << 8);
    if (out.first == nullptr) out.first = meta->spec.get();
    out.has_copied_view |= meta->copied_from != nullptr;
    if (C10_UNLIKELY(meta->use != nullptr)) note_gather(out, *meta);
  } else {
    out.key.push_back(kPlain | uint64_t(impl->dim()) << 8 | uint64_t(c10::typeMetaToScalarType(impl->dtype())) << 16);
    // A nested tensor has no sizes to tell.
    for (int64_t size : impl->is_nested() ? c10::IntArrayRef() : impl->sizes()) out.key.push_back(uint64_t(size));
    out.has_other_kind |= impl->key_set().has(kHomeKey);
    out.has_plain |= impl->is_nested() || impl->numel() != 1;
  }
  out.tensors.push_back({argument, list_index, impl, meta});
}

void add_integer(Arguments& out, int64_t value) {
  out.key.push_back(kInt);
  out.key.push_back(uint64_t(value));
}

void add_integers(Arguments& out, c10::IntArrayRef values) {
  out.key.push_back(kInts | values.size() << 8);
  for (int64_t value : values) out.key.push_back(uint64_t(value));
}

void add_flag(Arguments& out, bool value) {
  out.key.push_back(kBool | uint64_t(value) << 8);
}

void add_number(Arguments& out, double value) {
  out.key.push_back(kDouble);
  out.key.push_back(bits_of(value));
}

void add_text(Arguments& out, std::string_view value) {
  out.key.push_back(kOther);
  out.key.push_back(std::hash<std::string_view>()(value));
}

void add_none(Arguments& out) {
  out.key.push_back(kNone);
}

void add_any_number(Arguments& out) {
  out.key.push_back(kDouble);
}

// scatter_ in the backward of max and sort is such a formula.
void adopt_written(const OpInfo& info, Arguments& arguments) {
  if (torch::autograd::get_current_node() == nullptr) return;
  for (TensorSlot& slot : arguments.tensors) {
    if (slot.meta != nullptr || !info.is_written[slot.argument]) continue;
    const at::Tensor plain(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(slot.impl));
    at::Tensor local(slot.impl->shallow_copy_and_detach(c10::VariableVersion(0), false));
    convert_in_place(plain, std::move(local), spec_of(slot, arguments.first->mesh));
    slot.meta = dtensor_meta(slot.impl);
  }
}

void check_together(const OpInfo& info, const Arguments& arguments) {
  if (C10_UNLIKELY(arguments.has_copied_view)) check_copied_views(info, arguments);
  const uint64_t mesh = arguments.first->mesh.id();
  for (const TensorSlot& slot : arguments.tensors) {
    if (slot.meta != nullptr ? slot.meta->spec->mesh.id() == mesh : slot.impl->numel() == 1) continue;
    return check_companions(info, arguments);
  }
}

void collect(const OpInfo& info, const torch::jit::Stack& stack, Arguments& arguments) {
  const size_t base = stack.size() - info.num_arguments;
  for (int i = 0; i < info.num_arguments; ++i) {
    const IValue& value = stack[base + i];
    if (info.is_out[i]) continue;
    switch (info.kinds[i]) {
      case Kind::tensor: add_tensor(arguments, value, i, -1); break;
      case Kind::tensor_list:
      case Kind::optional_tensor_list: add_list(arguments, value, i); break;
      case Kind::value_only: value.isNone() ? add_none(arguments) : add_any_number(arguments); break;
      case Kind::other: add_value(arguments, value);
    }
  }
  if (arguments.first == nullptr) return;
  seal(info, arguments);
  if (info.has_written) adopt_written(info, arguments);
  check_together(info, arguments);
}

spmd::Call describe(const OpInfo& info, const Arguments& arguments, c10::ArrayRef<IValue> values) {
  std::vector<spmd::TensorArg> tensors;
  tensors.reserve(arguments.tensors.size());
  for (const TensorSlot& slot : arguments.tensors) {
    tensors.push_back({.argument = slot.argument,
                       .list_index = slot.list_index,
                       .sizes = c10::DimVector(slot.impl->sizes()),
                       .strides = c10::DimVector(slot.impl->strides()),
                       .dtype = c10::typeMetaToScalarType(slot.impl->dtype())});
  }
  return spmd::Call(*info.schema, values, std::move(tensors));
}

std::vector<Placements> current_placements(const Arguments& arguments) {
  std::vector<Placements> placements;
  const size_t ndim = size_t(arguments.first->mesh.ndim());
  for (const TensorSlot& slot : arguments.tensors) {
    placements.push_back(slot.meta != nullptr ? slot.meta->spec->placements : Placements(ndim));
  }
  return placements;
}

SpecPtr spec_of(const TensorSlot& slot, const DeviceMesh& mesh) {
  if (slot.meta != nullptr) return slot.meta->spec;
  return intern_spec(mesh, Placements(size_t(mesh.ndim())), slot.impl->sizes(), slot.impl->strides(),
                     c10::typeMetaToScalarType(slot.impl->dtype()));
}

at::Tensor local_of(const TensorSlot& slot) {
  if (slot.meta != nullptr) return slot.meta->local;
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(slot.impl));
}

const TensorKind* kind_of_call(const OpInfo& info, const torch::jit::Stack& stack) {
  const TensorKind* first = nullptr;
  bool is_mixed = false;
  for_each_kind(info, stack, [&](const TensorKind* kind, int, int) {
    if (first == nullptr) first = kind;
    is_mixed |= kind != first;
  });
  return C10_UNLIKELY(is_mixed) ? kind_of_mixed(info, stack) : first;
}

}  // namespace serried::detail
