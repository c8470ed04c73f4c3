// Ops on strides and storage: what has a meaning for a tensor in parts is done, the rest raises.
#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/spec.h"

namespace serried {
namespace {

using detail::LocalOnly;
using detail::OpCall;
using torch::jit::Stack;

// The whole tensor in memory as its strides say, which is what as_strided walks over. Sets `copied` where that is not
// the memory of the tensor itself.
at::Tensor whole_with_strides(const DTensorMeta& meta, bool& copied) {
  const at::Tensor whole = detail::whole_local(meta);
  copied = !whole.is_same(meta.local);
  if (whole.strides() == c10::IntArrayRef(meta.spec->strides) && whole.storage_offset() == 0) return whole;
  copied = true;
  at::Tensor laid_out = at::empty_strided(meta.spec->sizes, meta.spec->strides, whole.options());
  return laid_out.copy_(whole);
}

bool is_identity(const OpCall& call, const Spec& spec) {
  const auto sizes = call.integers("size");
  const auto strides = call.integers("stride");
  return sizes && strides && c10::IntArrayRef(*sizes) == spec.sizes && c10::IntArrayRef(*strides) == spec.strides &&
         call.integer("storage_offset") == 0;
}

SpecPtr replicated(const at::Tensor& local, const DeviceMesh& mesh) {
  return intern_spec(mesh, Placements(size_t(mesh.ndim())), local.sizes(), local.strides(), local.scalar_type());
}

bool strided(const c10::OperatorHandle& op, Stack& stack, bool is_view) {
  const OpCall call(op, stack);
  if (call.has_out()) return false;
  const DTensorMeta& meta = *dtensor_meta(call.argument(0).toTensor());
  if (is_identity(call, *meta.spec)) {
    return detail::finish(op, stack,
                          {is_view ? at::alias(call.argument(0).toTensor()) : at::clone(call.argument(0).toTensor())});
  }
  const Sizes sizes = call.integers("size").value_or(Sizes());
  const Sizes strides = call.integers("stride").value_or(Sizes());
  const int64_t offset = call.integer("storage_offset");
  at::Tensor result;
  {
    const LocalOnly guard;
    bool copied = false;
    at::Tensor local = whole_with_strides(meta, copied).as_strided(sizes, strides, offset);
    if (!is_view) local = local.clone();
    const SpecPtr spec = replicated(local, meta.spec->mesh);
    if (is_view) {
      const at::Tensor& base = call.argument(0).toTensor();
      result =
          wrap_view(local, spec, base, copied ? detail::copied_from(*base.unsafeGetTensorImpl()) : meta.copied_from);
    } else {
      result = wrap(local, spec);
    }
  }
  return detail::finish(op, stack, {result});
}

bool run_as_strided(const c10::OperatorHandle& op, Stack& stack) {
  return strided(op, stack, true);
}
bool run_as_strided_copy(const c10::OperatorHandle& op, Stack& stack) {
  return strided(op, stack, false);
}

bool run_as_strided_scatter(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const DTensorMeta* self = dtensor_meta(call.argument(0).toTensor());
  const DTensorMeta* source = dtensor_meta(call.argument(1).toTensor());
  if (call.has_out() || self == nullptr || source == nullptr) return false;
  at::Tensor result;
  {
    const LocalOnly guard;
    bool copied = false;
    at::Tensor whole = whole_with_strides(*self, copied);
    if (!copied) whole = at::empty_strided(whole.sizes(), whole.strides(), whole.options()).copy_(whole);
    whole
        .as_strided(call.integers("size").value_or(Sizes()), call.integers("stride").value_or(Sizes()),
                    call.integer("storage_offset"))
        .copy_(detail::whole_local(*source));
    result = wrap(whole, replicated(whole, self->spec->mesh));
  }
  return detail::finish(op, stack, {result});
}

// The strides that come along are those of the whole; a part that was gathered or cut has others. They only repeat what
// the sizes say, so a view does the same.
bool run_reshape_alias(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  if (call.has_out()) return false;
  const at::Tensor view = call.argument(0).toTensor().view(call.integers("size").value_or(Sizes()));
  return detail::finish(op, stack, {op.schema().name() == "aten::_reshape_alias" ? view : view.clone()});
}

bool run_resize(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  const at::Tensor self = call.argument(0).toTensor();
  const Sizes sizes = call.integers("size").value_or(Sizes());
  if (self.sizes() == c10::IntArrayRef(sizes)) return detail::finish(op, stack, {self});
  raise<c10::ValueError>({"resize_",
                          "a DTensor of sizes " + detail::sizes_text(self.sizes()) + " cannot become " +
                              detail::sizes_text(sizes) + " in place: each rank holds a part of the former",
                          "make a new tensor: zeros(sizes, mesh, placements)"});
}

bool refuse_storage(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  raise<c10::ValueError>({call.name(),
                          "a DTensor has no storage of its own to exchange: its memory is the parts of all ranks",
                          "use copy_() to change its values, or set_ on to_local()"});
}

bool refuse_strides(const c10::OperatorHandle& op, Stack& stack) {
  const OpCall call(op, stack);
  raise<c10::ValueError>({call.name(), "the strides of a DTensor cannot be changed in place",
                          "use as_strided(), which gathers the tensor and returns a copy"});
}

}  // namespace

std::vector<HandlerEntry> metadata_handlers() {
  return {
      {"aten::_reshape_alias", run_reshape_alias},
      {"aten::_reshape_alias_copy", run_reshape_alias},
      {"aten::as_strided", run_as_strided},
      {"aten::as_strided_", refuse_strides},
      {"aten::as_strided_copy", run_as_strided_copy},
      {"aten::as_strided_scatter", run_as_strided_scatter},
      {"aten::resize_", run_resize},
      {"aten::set_", refuse_storage},
  };
}

}  // namespace serried
