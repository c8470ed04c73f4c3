// A kind of tensor: what happens to an op that has one among its arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/core/TensorImpl.h>

#include "serried/base/home_key.h"

namespace c10 {
class OperatorHandle;
}

namespace serried {

namespace detail {
struct OpInfo;
}

/// A strategy that tensors of ours follow: the fallback's first question. One constant per kind, wherever it is at
/// home; `tensor/` knows none but DTensor. Kinds are compared by address.
///     constinit const TensorKind kLazy{.name = "lazy view", .to_plain = "contiguous()", .no_memory = "...", .run =
///     run};
struct TensorKind {
  const char* name;       // in messages, behind "a"
  const char* to_plain;   // what makes a plain tensor of one, for the fix of messages
  const char* no_memory;  // what data_ptr() says: a whole message
  /// Runs the call on top of `stack`, which has tensors of this kind, and of others only where `takes` says so:
  /// collects its arguments as the kind understands them, and leaves results in their place. Autograd has been passed;
  /// what it runs on plain tensors goes through `tape::run`.
  void (*run)(const c10::OperatorHandle& op, detail::OpInfo& info, torch::jit::Stack& stack);
  /// Whether a call that has tensors of `other` too is this kind's. Null: never. Of two kinds that take each other the
  /// one that comes first among the arguments runs the call; one that nobody takes is refused.
  bool (*takes)(const TensorKind& other) = nullptr;
};

/// What a tensor of ours is apart from sizes and dtype; kinds derive from it. Never changed once a tensor has it: a
/// tensor that changes gets a new one, so copies that autograd makes share it safely.
struct DistMeta : c10::BackendMeta {
  explicit DistMeta(const TensorKind& kind_) : kind(&kind_) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;
  }
  const TensorKind* const kind;
};

/// Null for a plain tensor.
inline const DistMeta* dist_meta(const c10::TensorImpl* impl) {
  if (!impl->key_set().has(kHomeKey)) return nullptr;
  return static_cast<const DistMeta*>(const_cast<c10::TensorImpl*>(impl)->get_backend_meta());
}

struct TensorLooks {
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  c10::ScalarType dtype;
};

/// A new tensor of the kind of `meta`: it has these sizes and no memory. No gradient. `view_of`, one of ours: what it
/// is a view of. Under InferenceMode a view is an inference tensor only where its base is.
at::Tensor make_tensor(c10::intrusive_ptr<DistMeta> meta, const TensorLooks& looks,
                       const c10::TensorImpl* view_of = nullptr);

}  // namespace serried
