// Calls on tensors that are gathered on use: lazy views, rules among their like, the whole value beside all else.
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <vector>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dispatch/arguments.h"
#include "serried/tensor/dispatch/cached_plan.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/dispatch/looked_up_rows.h"
#include "serried/tensor/dispatch/whole_values.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried {
namespace detail {

/// One view op on the whole value: where that is a DTensor itself, views are made by rules, not by strides.
struct LazyViewStep {
  std::shared_ptr<const LazyViewStep> previous;
  c10::OperatorHandle op;
  torch::jit::Stack arguments;  // the first is the tensor it is a view of
  size_t index;                 // among the results
};

namespace {

using c10::IValue;
using torch::jit::Stack;

const LazyViewMeta* lazy_meta(const at::Tensor& t) {
  const DistMeta* meta = t.defined() ? dist_meta(t.unsafeGetTensorImpl()) : nullptr;
  return meta != nullptr && meta->kind == &kLazyView ? static_cast<const LazyViewMeta*>(meta) : nullptr;
}

GatherOnUse* parameter_of(const at::Tensor& t) {
  GatherOnUse* gather = gather_of(t);
  return gather != nullptr && gather->is_parameter() ? gather : nullptr;
}

c10::intrusive_ptr<DTensorMeta> shared_meta(const at::Tensor& t) {
  return c10::static_intrusive_pointer_cast<DTensorMeta>(t.unsafeGetTensorImpl()->get_backend_meta_intrusive_ptr());
}

// The parameter behind a tensor of these kinds.
const DTensorMeta& base_of(const at::Tensor& t) {
  const LazyViewMeta* lazy = lazy_meta(t);
  return lazy != nullptr ? *lazy->base : *dtensor_meta(t);
}

template <class Fn>
void for_each_tensor(const OpInfo& info, c10::ArrayRef<IValue> arguments, const Fn& fn) {
  for (int i = 0; i < info.num_arguments; ++i) {
    const IValue& value = arguments[size_t(i)];
    if (value.isTensor()) {
      if (value.toTensor().defined()) fn(value.toTensor(), i);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const IValue& item : value.toListRef()) {
        if (item.isTensor() && item.toTensor().defined()) fn(item.toTensor(), i);
      }
    }
  }
}

// Who is in a call.
struct Company {
  const Spec* spec = nullptr;  // of the first that is gathered on use
  bool has_lazy = false;
  bool has_parameter = false;
  bool writes_ours = false;
  bool has_plain = false;   // beside those that count as numbers
  bool has_number = false;  // a plain tensor of one element
  bool has_other_mesh = false;
  bool writes_plain = false;
};

void meet(Company& company, const at::Tensor& t, bool is_written) {
  if (lazy_meta(t) != nullptr) {
    company.has_lazy = true;
    return;
  }
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta == nullptr) {
    const bool is_number = t.dim() == 0 || t.unsafeGetTensorImpl()->is_wrapped_number();
    company.has_plain |= !is_number;
    company.has_number |= is_number && !t.unsafeGetTensorImpl()->is_wrapped_number();
    company.writes_plain |= is_written;
    return;
  }
  GatherOnUse* gather = gather_of(*meta);
  if (gather != nullptr && company.spec == nullptr) company.spec = meta->spec.get();
  company.has_parameter |= gather != nullptr && gather->is_parameter();
  company.writes_ours |= is_written;
}

Company company_of(const OpInfo& info, c10::ArrayRef<IValue> arguments) {
  Company company;
  for_each_tensor(info, arguments, [&](const at::Tensor& t, int i) { meet(company, t, info.is_written[i]); });
  for_each_tensor(info, arguments, [&](const at::Tensor& t, int) {
    const DTensorMeta* meta = dtensor_meta(t);
    if (meta != nullptr && company.spec != nullptr) company.has_other_mesh |= !(meta->spec->mesh == company.spec->mesh);
  });
  return company;
}

bool makes_like(const OpInfo& info) {
  const std::string& name = info.schema->name();
  return name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0;
}

// Results of rules stay gathered on use, so any answer is right; the question is what it costs. A value made of
// parameters alone is read by what comes next in a forward or backward, which has plain tensors; optimizers run without
// gradients, and write.
bool goes_on_parts(const OpInfo& info, const Company& company) {
  if (company.has_lazy || company.has_other_mesh) return false;
  if (company.writes_ours) return true;
  if (company.has_plain || company.writes_plain) return false;
  if (!company.has_parameter || makes_like(info)) return true;
  return !company.has_number && !at::GradMode::is_enabled() && torch::autograd::get_current_node() == nullptr;
}

at::Tensor replicated(const at::Tensor& t, const DeviceMesh& mesh) {
  if (!t.defined() || dist_meta(t.unsafeGetTensorImpl()) != nullptr || t.dim() == 0) return t;
  const LocalOnly local_only;
  const at::Tensor whole = t.contiguous();
  return wrap(whole,
              intern_spec(mesh, Placements(size_t(mesh.ndim())), whole.sizes(), whole.strides(), whole.scalar_type()));
}

// A written tensor's plain operands are one value to all ranks, as it is itself.
void replicate_plain(const OpInfo& info, const Spec& spec, Stack& stack) {
  const size_t base = stack.size() - size_t(info.num_arguments);
  for (size_t i = base; i < stack.size(); ++i) {
    if (stack[i].isTensor()) {
      stack[i] = replicated(stack[i].toTensor(), spec.mesh);
    } else if (stack[i].isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& t : stack[i].toTensorVector()) list.push_back(replicated(t, spec.mesh));
      stack[i] = list;
    } else if (stack[i].isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const IValue& item : stack[i].toListRef()) {
        list.push_back(item.isTensor() ? std::optional(replicated(item.toTensor(), spec.mesh)) : std::nullopt);
      }
      stack[i] = list;
    }
  }
}

void mark(IValue& value) {
  if (value.isTensor()) {
    const at::Tensor& t = value.toTensor();
    if (t.defined() && dtensor_meta(t) != nullptr && gather_of(t) == nullptr) set_use(t, use_like_parameters());
  } else if (value.isTensorList()) {
    for (const IValue& item : value.toListRef()) {
      IValue copy = item;
      mark(copy);
    }
  }
}

void run_on_parts(const c10::OperatorHandle& op, OpInfo& info, const Company& company, Stack& stack) {
  const auto last = torch::jit::last(stack, size_t(info.num_arguments));
  const std::vector<IValue> given(last.begin(), last.end());
  if (company.has_plain) replicate_plain(info, *company.spec, stack);
  kDTensor.run(op, info, stack);
  const size_t base = stack.size() - size_t(info.num_returns);
  for (int r = 0; r < info.num_returns; ++r) mark(stack[base + size_t(r)]);
  for_each_tensor(info, given, [&](const at::Tensor& t, int i) {
    if (!info.is_written[i]) return;
    if (GatherOnUse* gather = gather_of(t)) gather->note_write();
  });
}

// The sizes and strides of a parameter's whole value, without memory.
const at::Tensor& ghost_of(const DTensorMeta& meta) {
  at::Tensor& ghost = gather_of(meta)->ghost;
  if (!ghost.defined()) {
    const c10::InferenceMode ordinary(false);
    ghost = at::empty_strided(meta.spec->sizes, meta.spec->strides,
                              at::TensorOptions().dtype(meta.spec->dtype).device(at::kMeta));
  }
  return ghost;
}

at::Tensor strided_like(const at::Tensor& whole, const at::Tensor& view, int64_t offset) {
  return at::as_strided(whole, view.sizes(), view.strides(), whole.storage_offset() + offset);
}

struct ViewSource {
  at::Tensor given;  // the parameter, or a lazy view of it
  c10::intrusive_ptr<DTensorMeta> base;
  std::shared_ptr<const LazyViewStep> step;
};

[[noreturn]] void refuse_view(const OpInfo& info, const at::Tensor& given) {
  raise<c10::NotImplementedError>({info.name,
                                   c10::str("a view of other elements than its own, of a parameter ",
                                            sizes_text(given.sizes()), " that is gathered on use"),
                                   "take it of a copy: parameter.clone()"});
}

at::Tensor lazy_view(const OpInfo& info, const ViewSource& source, const at::Tensor& ghost,
                     std::shared_ptr<const LazyViewStep> step) {
  if (ghost.scalar_type() != source.given.scalar_type() || ghost.is_conj() || ghost.is_neg()) {
    refuse_view(info, source.given);
  }
  at::Tensor view =
      make_tensor(c10::make_intrusive<LazyViewMeta>(source.base, ghost.storage_offset(), std::move(step)),
                  {ghost.sizes(), ghost.strides(), ghost.scalar_type()}, source.given.unsafeGetTensorImpl());
  const std::shared_ptr<GatherOnUse>& gather = source.base->use->gather;
  if (gather->other_dtype().has_value()) {
    set_use(view, std::make_shared<const ParameterUse>(ParameterUse{.layouts = nullptr, .gather = gather}));
  }
  return view;
}

// Nothing to see for autograd in it, and a parameter stays one.
at::Tensor same_parameter(const at::Tensor& t) {
  const DTensorMeta& meta = *dtensor_meta(t);
  at::Tensor same = wrap_view(meta.local, meta.spec, t);
  set_use(same, meta.use);
  return same;
}

bool is_identity(const OpInfo& info) {
  return info.name == "aten::detach" || info.name == "aten::alias";
}

void run_view(const c10::OperatorHandle& op, OpInfo& info, Stack& stack) {
  const size_t base = stack.size() - size_t(info.num_arguments);
  const at::Tensor given = stack[base].toTensor();
  const LazyViewMeta* lazy = lazy_meta(given);
  if (lazy == nullptr && is_identity(info)) {
    torch::jit::drop(stack, size_t(info.num_arguments));
    stack.emplace_back(same_parameter(given));
    return;
  }
  const ViewSource source{given, lazy != nullptr ? lazy->base : shared_meta(given),
                          lazy != nullptr ? lazy->step : nullptr};
  const bool by_rules = source.base->spec->mesh.ndim() > 1;
  const Stack arguments = by_rules ? Stack(stack.begin() + int64_t(base), stack.end()) : Stack();
  {
    const tape::Pause no_part_of_the_function;
    const LocalOnly local_only;
    const at::Tensor& whole = ghost_of(*source.base);
    stack[base] = lazy != nullptr ? strided_like(whole, given, lazy->offset) : whole;
    op.callBoxed(stack);
  }
  const auto lift = [&](const at::Tensor& ghost, size_t index) {
    auto step =
        by_rules ? std::make_shared<const LazyViewStep>(LazyViewStep{source.step, op, arguments, index}) : nullptr;
    return lazy_view(info, source, ghost, std::move(step));
  };
  IValue& result = stack.back();
  if (result.isTensor()) {
    result = lift(result.toTensor(), 0);
    return;
  }
  std::vector<at::Tensor> views;
  for (const at::Tensor& ghost : result.toTensorVector()) views.push_back(lift(ghost, views.size()));
  result = views;
}

// The view op on a whole that is a DTensor.
at::Tensor replay(const at::Tensor& whole, const LazyViewStep& step) {
  Stack stack = step.arguments;
  stack[0] = step.previous != nullptr ? replay(whole, *step.previous) : whole;
  kDTensor.run(step.op, op_info(step.op), stack);
  return stack.back().isTensor() ? stack.back().toTensor() : stack.back().toTensorVector().at(step.index);
}

at::Tensor view_of_whole(const at::Tensor& whole, const at::Tensor& given) {
  const LazyViewMeta* lazy = lazy_meta(given);
  if (lazy == nullptr) return whole;
  if (dtensor_meta(whole) != nullptr) return replay(whole, *lazy->step);
  return strided_like(whole, given, lazy->offset);
}

// One call with whole values in place of ours.
class Substitution {
 public:
  Substitution(const c10::OperatorHandle& op, OpInfo& info, Stack& stack) : op_(op), info_(info), stack_(stack) {}

  void run() {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    const auto last = torch::jit::last(stack_, size_t(info_.num_arguments));
    const std::vector<IValue> given(last.begin(), last.end());
    const size_t base = stack_.size() - given.size();
    for_each_tensor(info_, given, [&](const at::Tensor& t, int i) { writes_ |= info_.is_written[i] && is_ours(t); });
    for (size_t i = 0; i < given.size(); ++i) stack_[base + i] = substituted(given[i], info_.is_written[i]);
    check_dtypes(given);
    has_dtensor_ ? run_boxed(op_, stack_) : tape::run(op_, stack_);
    for (const Entry& entry : entries_) {
      if (entry.is_written) write_back(entry);
    }
    const size_t first = stack_.size() - size_t(info_.num_returns);
    for (int r = 0; r < info_.num_returns; ++r) {
      IValue& result = stack_[first + size_t(r)];
      result = info_.return_alias[r] >= 0 ? given[size_t(info_.return_alias[r])] : lifted(result);
    }
  }

 private:
  struct Entry {
    at::Tensor given;
    at::Tensor whole;  // of its parameter; where the op writes any, a copy
    at::Tensor value;  // the part of it that `given` is
    bool is_written;
  };

  bool is_ours(const at::Tensor& t) const { return lazy_meta(t) != nullptr || gather_of(t) != nullptr; }

  // One for all views of a parameter in the call: what is written through one of them is seen through the others.
  at::Tensor whole_of(const DTensorMeta& meta) const {
    for (const Entry& entry : entries_) {
      const DTensorMeta& known = base_of(entry.given);
      if (gather_of(known) == gather_of(meta) && known.local.is_same(meta.local)) return entry.whole;
    }
    return writes_ ? gather_of(meta)->whole_to_write(meta) : gather_of(meta)->whole(meta);
  }

  at::Tensor value_of(const at::Tensor& t, bool is_written) {
    if (!t.defined()) return t;
    if (!is_ours(t)) {
      has_dtensor_ |= dtensor_meta(t) != nullptr;
      return t;
    }
    for (Entry& entry : entries_) {
      if (!entry.given.is_same(t)) continue;
      entry.is_written |= is_written;
      return entry.value;
    }
    at::Tensor whole = whole_of(base_of(t));
    has_dtensor_ |= dtensor_meta(whole) != nullptr;
    at::Tensor value = view_of_whole(whole, t);
    entries_.push_back({t, std::move(whole), value, is_written});
    return value;
  }

  IValue substituted(const IValue& value, bool is_written) {
    if (value.isTensor()) return value_of(value.toTensor(), is_written);
    if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const IValue& item : value.toListRef()) list.push_back(value_of(item.toTensor(), is_written));
      return list;
    }
    if (!value.isOptionalTensorList()) return value;
    c10::List<std::optional<at::Tensor>> list;
    for (const IValue& item : value.toListRef()) {
      list.push_back(item.isTensor() ? std::optional(value_of(item.toTensor(), is_written)) : std::nullopt);
    }
    return list;
  }

  // In a lower precision than the parameter says: what the kernel would say does not name the reason.
  void check_dtypes(c10::ArrayRef<IValue> given) const {
    const Entry* lowered = nullptr;
    for (const Entry& entry : entries_) {
      if (entry.value.scalar_type() != entry.given.scalar_type()) lowered = &entry;
    }
    if (lowered == nullptr) return;
    for_each_tensor(info_, given, [&](const at::Tensor& t, int i) {
      const bool differs = !is_ours(t) && t.dim() > 0 && t.scalar_type() == lowered->given.scalar_type();
      if (!differs || torch::autograd::get_current_node() != nullptr) return;
      raise<c10::TypeError>(
          {info_.name,
           c10::str("argument ", i, " \"", info_.schema->arguments()[size_t(i)].name(), "\" is ", t.scalar_type(),
                    ", and the parameter beside it computes in ", lowered->value.scalar_type()),
           c10::str("cast the input of the module: x.to(at::k", lowered->value.scalar_type(), ")")});
    });
  }

  void write_back(const Entry& entry) const {
    const DTensorMeta& meta = base_of(entry.given);
    GatherOnUse* gather = gather_of(meta);
    meta.local.copy_(gather->part_of_whole(meta, entry.whole));
    gather->note_write();
  }

  static const c10::StorageImpl* storage_of(const at::Tensor& t) {
    const DTensorMeta* meta = dtensor_meta(t);
    const at::Tensor& local = meta != nullptr ? meta->local : t;
    return local.has_storage() ? local.storage().unsafeGetStorageImpl() : nullptr;
  }

  // A result on gathered memory would change under its owner when that serves the next block.
  at::Tensor lifted(const at::Tensor& result) const {
    if (!result.defined() || lazy_meta(result) != nullptr) return result;
    for (const Entry& entry : entries_) {
      if (result.is_same(entry.value)) return entry.given;
      if (storage_of(result) != nullptr && storage_of(result) == storage_of(entry.whole)) return result.clone();
    }
    return result;
  }

  IValue lifted(const IValue& value) const {
    if (value.isTensor()) return lifted(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(lifted(t));
    return list;
  }

  const c10::OperatorHandle& op_;
  OpInfo& info_;
  Stack& stack_;
  std::vector<Entry> entries_;
  bool writes_ = false;  // to one of ours
  bool has_dtensor_ = false;
};

[[noreturn]] void refuse_change(const OpInfo& info) {
  raise<c10::ValueError>({info.name, "would change the sizes of a parameter that is gathered on use, in place",
                          "change the parameter before it is sharded, or use the form that returns a view"});
}

void note_uses(const OpInfo& info, c10::ArrayRef<IValue> arguments) {
  for_each_tensor(info, arguments, [](const at::Tensor& t, int) {
    if (GatherOnUse* gather = parameter_of(t)) gather->note_use();
  });
}

// Right, but gathered anew by every step of an optimizer, which keeps all of its state on every rank.
void warn_of_plain_state(const OpInfo& info, c10::ArrayRef<IValue> arguments, const Company& company) {
  const bool is_of_step = company.spec != nullptr && company.has_plain && !company.has_parameter && !company.has_lazy &&
                          !at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() < 0;
  if (!is_of_step || !info.has_written) return;
  for_each_tensor(info, arguments, [&](const at::Tensor& t, int i) {
    if (!info.is_written[i] || dist_meta(t.unsafeGetTensorImpl()) != nullptr || t.dim() == 0) return;
    if (t.sizes() != c10::IntArrayRef(company.spec->sizes)) return;
    log::warn_once(
        "[fully_shard] gradients are gathered because ops write them into plain tensors of their sizes, as they do "
        "where an optimizer has stepped before its parameters were sharded\n"
        "  fix: call place_like_parameters(optimizer) once after fully_shard, so that its state is cut like them");
  });
}

// Embedding with max_norm writes the rows that a batch looks up, and every rank has a batch of its own.
void look_up_together(const OpInfo& info, Stack& stack) {
  if (info.schema->name() != "aten::embedding_renorm_") return;
  IValue* const first = &stack[stack.size() - size_t(info.num_arguments)];
  const at::Tensor table = first[0].toTensor();
  if (lazy_meta(table) == nullptr && parameter_of(table) == nullptr) return;
  first[1] = rows_of_all_ranks(first[1].toTensor(), table.size(0), base_of(table).spec->mesh);
}

void run_gathered(const c10::OperatorHandle& op, OpInfo& info, Stack& stack) {
  // Composites arrive whole only where autograd is off: they decompose here as they would there.
  if (info.is_composite) {
    const c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    return op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
  }
  const auto arguments = torch::jit::last(stack, size_t(info.num_arguments));
  if (at::GradMode::is_enabled()) note_uses(info, arguments);
  if (info.has_written) look_up_together(info, stack);
  const at::Tensor first = info.num_arguments > 0 && arguments[0].isTensor() ? arguments[0].toTensor() : at::Tensor();
  if (lazy_meta(first) != nullptr || parameter_of(first) != nullptr) {
    if (info.is_metadata_change) refuse_change(info);
    if (info.is_view) return run_view(op, info, stack);
  }
  const Company company = company_of(info, arguments);
  if (goes_on_parts(info, company)) return run_on_parts(op, info, company, stack);
  warn_of_plain_state(info, arguments, company);
  Substitution(op, info, stack).run();
}

bool takes_dtensors(const TensorKind& other) {
  return &other == &kDTensor || &other == &kGathered || &other == &kLazyView;
}

// What as_strided gives, without the way through the dispatcher.
at::Tensor plain_view(const at::Tensor& whole, const c10::TensorImpl& view, int64_t offset) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(whole.storage()),
                                                   whole.key_set(), whole.dtype());
  impl->set_sizes_and_strides(view.sizes(), view.strides(), whole.storage_offset() + offset);
  return at::Tensor(std::move(impl));
}

// The parameter behind an argument; null where that is nothing of this kind.
const DTensorMeta* parameter_behind(const TensorSlot& slot) {
  const DTensorMeta* base = slot.meta;
  if (base == nullptr) {
    const DistMeta* meta = dist_meta(slot.impl);
    if (meta->kind != &kLazyView) return nullptr;
    base = static_cast<const LazyViewMeta*>(meta)->base.get();
  }
  const GatherOnUse* gather = gather_of(*base);
  return gather != nullptr && gather->is_parameter() ? base : nullptr;
}

// The CPU's kernel can have it as it is.
bool is_ordinary(const c10::TensorImpl& plain) {
  return plain.key_set().has(c10::DispatchKey::CPU) && !plain.key_set().has_any(kNeedsMore);
}

bool is_plain(const TensorSlot& slot) {
  return slot.meta == nullptr && !slot.impl->key_set().has(kHomeKey);
}

// Of a gradient or state that meets plain tensors: one gather for it alone.
struct GatherAlone final : GatherOnUse {
  at::Tensor whole(const DTensorMeta& meta) override { return whole_local(meta); }
  at::Tensor part_of_whole(const DTensorMeta& meta, const at::Tensor& whole) override {
    const Spec& spec = *meta.spec;
    const SpecPtr replicated = with_placements(spec, Placements(size_t(spec.mesh.ndim())));
    return redistribute_local(whole, *replicated, spec.placements);
  }
};

}  // namespace

bool WholeValues::find(const Arguments& arguments) {
  if (tape::is_recording() || !arguments.has_plain) return false;
  bool is_lowered = false;
  at::ScalarType said = at::ScalarType::Undefined;
  for (const TensorSlot& slot : arguments.tensors) {
    if (is_plain(slot)) continue;
    const DTensorMeta* base = parameter_behind(slot);
    if (base == nullptr) return false;
    const at::Tensor whole = gather_of(*base)->whole(*base);
    if (dtensor_meta(whole) != nullptr) return false;
    said = base->spec->dtype;
    is_lowered |= whole.scalar_type() != said;
    const bool is_lazy = slot.meta == nullptr;
    values_.emplace_back(slot.impl, is_lazy ? plain_view(whole, *slot.impl,
                                                         static_cast<const LazyViewMeta*>(dist_meta(slot.impl))->offset)
                                            : whole);
  }
  for (const TensorSlot& slot : arguments.tensors) {
    if (!is_plain(slot)) continue;
    if (!is_ordinary(*slot.impl)) return false;
    if (is_lowered && c10::typeMetaToScalarType(slot.impl->dtype()) == said) return false;
  }
  return true;
}

const UsePtr& use_like_parameters() {
  static const UsePtr use =
      std::make_shared<const ParameterUse>(ParameterUse{.layouts = nullptr, .gather = std::make_shared<GatherAlone>()});
  return use;
}

}  // namespace detail

constinit const TensorKind kGathered{
    .name = "sharded parameter",
    .to_plain = "full_tensor()",
    .no_memory = "",
    .run = detail::run_gathered,
    .takes = detail::takes_dtensors,
};

constinit const TensorKind kLazyView{
    .name = "view of a sharded parameter",
    .to_plain = "clone()",
    .no_memory =
        "[data_ptr] a view of a sharded parameter has no memory of its own\n"
        "  fix: take the memory of a copy: view.clone()",
    .run = detail::run_gathered,
    .takes = detail::takes_dtensors,
};

}  // namespace serried
