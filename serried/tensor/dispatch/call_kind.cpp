// Finds the kind of a call, and refuses kinds that do not go together.
#include "serried/tensor/dispatch/call_kind.h"

#include <algorithm>
#include <vector>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

using c10::IValue;

// The first tensor of its kind in a call.
struct Met {
  const TensorKind* kind;
  int argument;
  int list_index;  // -1: not in a list
};

const TensorKind* kind_of(const IValue& value) {
  const DistMeta* meta = value.isTensor() ? dist_meta(value.unsafeToTensorImpl()) : nullptr;
  return meta != nullptr ? meta->kind : nullptr;
}

// Calls `fn(kind, argument, list_index)` for every tensor of ours.
template <class Fn>
void for_each_kind(const OpInfo& info, const torch::jit::Stack& stack, const Fn& fn) {
  using Kind = OpInfo::ArgumentKind;
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
