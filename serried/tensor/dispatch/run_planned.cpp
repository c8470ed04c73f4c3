// Runs a planned call on this rank: move inputs, call on local tensors, wrap results.
#include <ATen/ops/diagonal.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <optional>

#include <c10/core/InferenceMode.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/tape/tape.h"
#include "serried/tensor/debug/comm_notes.h"
#include "serried/tensor/dispatch/cached_plan.h"
#include "serried/tensor/dispatch/class_gathers.h"
#include "serried/tensor/dispatch/copied_view.h"
#include "serried/tensor/guards.h"
#include "serried/tensor/random/random_fill.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {
namespace {

using c10::IValue;
using torch::jit::Stack;
using Locals = c10::SmallVector<at::Tensor, 8>;

// What hidden communication is allowed to do.
void announce(const OpInfo& info, const CachedPlan& plan, const InputMove& move, const Spec& from) {
  comm_debug::note_redistribution(info.name, from, move.to, /*implicit=*/true);
  const ExplicitRedistributionOptions options = ExplicitRedistribution::current();
  if (options.mode == HiddenCommunication::allow || (!move.communicates && !options.strict)) return;
  const int argument = plan.tensors[move.slot].argument;
  const bool goes_back = info.is_written[argument] && !info.is_metadata_change;
  const auto call_to = [](const Placements& to) {
    return c10::str("redistribute(parse_placements(\"", to_string(to), "\"))");
  };
  const ErrorText text{
      info.name,
      c10::str("argument ", argument, " \"", info.schema->arguments()[argument].name(), "\" ", from.to_string(),
               " would be redistributed to ", to_string(move.to), goes_back ? " and back" : "",
               plan.is_default ? ": the op has no sharding rule" : c10::str(" by the rule ", plan.plan.rule)),
      c10::str("call ", call_to(move.to), " before the op",
               goes_back ? ", and " + call_to(from.placements) + " on what it has written" : "")};
  if (options.mode == HiddenCommunication::forbid) raise<c10::ValueError>(text);
  if (options.mode == HiddenCommunication::warn) return log::warn_once(format_error(text));
  log::line(log::Topic::plan, format_error(text));
}

Locals gather_locals(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments, const spmd::Call& call,
                     const DeviceMesh& mesh) {
  Locals locals;
  for (const TensorSlot& slot : arguments.tensors) locals.push_back(local_of(slot));
  if (C10_UNLIKELY(class_gathers_forbidden())) check_class_gathers(plan, call, arguments, mesh);
  for (const InputMove& move : plan.moves) {
    const SpecPtr from = spec_of(arguments.tensors[move.slot], mesh);
    announce(info, plan, move, *from);
    at::Tensor moved = run_steps(locals[move.slot], *from, move.steps);
    // The op writes into its own copy, which goes back afterwards; sizes and strides it changes on an alias.
    const bool written = info.is_written[plan.tensors[move.slot].argument] && !info.is_metadata_change;
    if (written && moved.is_same(locals[move.slot])) moved = moved.clone();
    locals[move.slot] = std::move(moved);
  }
  return locals;
}

// Something that the kernel takes: zeros, or what the rule asks for where those would raise. Identities are symmetric,
// positive definite and triangular, whatever a decomposition wants; pivots count from 1.
at::Tensor stand_in(const spmd::Plan& plan, c10::IntArrayRef sizes, const at::TensorOptions& options) {
  for (const spmd::FixupPattern& fixup : plan.fixups) {
    if (fixup.name != "ones" && fixup.name != "eye") continue;
    const bool is_matrix = sizes.size() >= 2 && !c10::isIntegralType(c10::typeMetaToScalarType(options.dtype()), true);
    if (fixup.name == "ones" || !is_matrix) return at::ones(sizes, options);
    at::Tensor matrices = at::zeros(sizes, options);
    matrices.diagonal(0, -2, -1).fill_(1);
    return matrices;
  }
  return at::zeros(sizes, options);
}

// Where other terms of a sum count, one that is stood in for must be 0: its stand-ins need not be (indices), and values
// that are broadcast have no part that is empty.
void clear_terms(const CachedPlan& plan, c10::ArrayRef<int> replaced, Locals& locals) {
  for (size_t i = 0; i < plan.plan.terms.size(); ++i) {
    const spmd::InputTerm& input = plan.plan.terms[i];
    const bool cleared = input.linear && std::find(replaced.begin(), replaced.end(), input.term) != replaced.end();
    if (cleared) locals[i] = at::zeros_like(locals[i]);
  }
}

// In the shape of the rank this one stands in for.
void put_stand_ins(const CachedPlan& plan, Locals& locals) {
  c10::SmallVector<int, 4> replaced;  // terms
  for (size_t i = 0; i < locals.size(); ++i) {
    const c10::DimVector sizes = local_sizes(plan.tensors[i].sizes, plan.plan.inputs[i], plan.position());
    if (locals[i].sizes() == c10::IntArrayRef(sizes)) continue;
    locals[i] = stand_in(plan.plan, sizes, locals[i].options());
    if (plan.stand_in_counts && i < plan.plan.terms.size()) replaced.push_back(plan.plan.terms[i].term);
  }
  if (plan.stand_in_counts) clear_terms(plan, replaced, locals);
}

void put_locals(const OpInfo& info, const Arguments& arguments, const Locals& locals, Stack& stack, size_t base) {
  for (size_t i = 0; i < locals.size(); ++i) {
    const TensorSlot& slot = arguments.tensors[i];
    if (slot.list_index < 0) {
      stack[base + slot.argument] = locals[i];
      continue;
    }
    // The whole list at its first tensor; absent elements stay absent.
    if (i > 0 && arguments.tensors[i - 1].argument == slot.argument) continue;
    size_t next = i;
    const auto local_at = [&](int k) -> std::optional<at::Tensor> {
      if (next == locals.size() || arguments.tensors[next].argument != slot.argument) return std::nullopt;
      return arguments.tensors[next].list_index == k ? std::optional(locals[next++]) : std::nullopt;
    };
    const int size = int(stack[base + slot.argument].toListRef().size());
    if (info.kinds[slot.argument] == OpInfo::ArgumentKind::tensor_list) {
      c10::List<at::Tensor> list;
      for (int k = 0; k < size; ++k) list.push_back(local_at(k).value_or(at::Tensor()));
      stack[base + slot.argument] = list;
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (int k = 0; k < size; ++k) list.push_back(local_at(k));
      stack[base + slot.argument] = list;
    }
  }
}

SpecPtr spec_for(CachedOutput& output, const at::Tensor& local, const DeviceMesh& mesh) {
  if (C10_LIKELY(output.content && local.sizes() == c10::IntArrayRef(output.local_sizes) &&
                 local.strides() == c10::IntArrayRef(output.local_strides) && local.scalar_type() == output.dtype)) {
    SpecPtr spec = output.spec.lock();
    if (C10_LIKELY(spec.defined())) return spec;
    spec = output.content->on(mesh);
    output.spec = c10::weak_intrusive_ptr<Spec>(spec);
    return spec;
  }
  SpecPtr spec = spec_of_result(local, mesh, output.placements, output.sizes);
  if (output.strides.has_value()) {
    spec = intern_spec(mesh, output.placements, spec->sizes, *output.strides, local.scalar_type());
  }
  output.content = spec->content;
  output.spec = c10::weak_intrusive_ptr<Spec>(spec);
  output.local_sizes = c10::DimVector(local.sizes());
  output.local_strides = c10::DimVector(local.strides());
  output.dtype = local.scalar_type();
  return spec;
}

// Ranks must agree on the order of dims in memory, and a part of one row has none: only views are other than row-major.
void lay_out(const CachedOutput& output, at::Tensor& local) {
  if (C10_UNLIKELY(!output.strides.has_value() && !local.is_contiguous())) local = local.contiguous();
}

// What the stand-in computed has only the right shape. `base`: the part that the result is a view of, if it is one.
at::Tensor undo_stand_in(const CachedPlan& plan, const CachedOutput& output, const at::Tensor& local,
                         const at::Tensor& base = {}) {
  c10::DimVector global(local.sizes());
  for (const Placement& placement : output.placements) {
    if (placement.is_shard()) global[placement.dim()] = output.sizes[placement.dim()];
  }
  const c10::DimVector sizes = local_sizes(global, output.placements, plan.own_position());
  if (plan.stand_in_counts && local.sizes() == c10::IntArrayRef(sizes)) return local;
  // A view shares the memory of its base on every rank, or only some would notice what is written to it.
  const bool is_view = base.defined() && base.numel() == 0 && base.dtype() == local.dtype();
  if (is_view && c10::multiply_integers(sizes) == 0) return base.as_strided(sizes, serried::contiguous_strides(sizes));
  at::Tensor result = at::empty(sizes, local.options());
  if (result.numel() == 0) return result;
  for (int64_t axis : plan.stand_in_axes) {
    if (output.placements[axis].is_partial()) {
      fill_identity_(result, output.placements[axis].reduce());
      return result;
    }
  }
  return local;
}

struct Wrapping {
  const OpInfo& info;
  const CachedPlan& plan;
  const DeviceMesh& mesh;
  const c10::TensorImpl* view_of;  // null: no view
  CopiedFromPtr copied_from;
  bool leave_inference;  // a view of an ordinary tensor is one too, even in InferenceMode
};

at::Tensor wrap_result(const Wrapping& w, CachedOutput& output, at::Tensor local) {
  if (C10_UNLIKELY(!w.plan.stand_in_axes.empty())) {
    local = undo_stand_in(w.plan, output, local, w.view_of != nullptr ? dtensor_meta(w.view_of)->local : at::Tensor());
  }
  CopiedFromPtr copied = w.copied_from;
  if (C10_UNLIKELY(local.is_conj() || local.is_neg())) {
    local = local.resolve_conj().resolve_neg();
    if (w.view_of != nullptr) copied = copied_from(*w.view_of);
  }
  lay_out(output, local);
  std::optional<c10::InferenceMode> ordinary;
  if (C10_UNLIKELY(w.leave_inference)) ordinary.emplace(false);
  SpecPtr spec = spec_for(output, local, w.mesh);
  return wrap(std::move(local), std::move(spec), std::move(copied));
}

void wrap_list(const Wrapping& w, CachedReturn& description, IValue& value) {
  c10::List<at::Tensor> wrapped;
  size_t k = 0;
  for (const at::Tensor& local : value.toTensorVector()) {
    if (!local.defined() || description.elements.empty()) {
      wrapped.push_back(local);
      continue;
    }
    // Elements of one description may differ in size, so none of them keeps its spec.
    CachedOutput shared = description.elements[description.shared ? 0 : k];
    wrapped.push_back(wrap_result(w, description.shared ? shared : description.elements[k], local));
    ++k;
  }
  value = wrapped;
}

// `written` holds per return the tensor given, where it was written in place.
void wrap_returns(const Wrapping& w, c10::ArrayRef<IValue> written, Stack& stack) {
  const size_t base = stack.size() - w.info.num_returns;
  for (int r = 0; r < w.info.num_returns; ++r) {
    IValue& value = stack[base + r];
    if (w.info.return_alias[r] >= 0) {
      value = written[r];
      continue;
    }
    CachedReturn& description = w.plan.returns[r];
    if (value.isTensor()) {
      at::Tensor local = std::move(value).toTensor();
      value = local.defined() && !description.elements.empty()
                  ? wrap_result(w, description.elements[0], std::move(local))
                  : local;
    } else if (value.isTensorList()) {
      wrap_list(w, description, value);
    }
  }
}

// Written inputs that the op saw elsewhere than they lie: bring the new value back.
void write_back(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments, const Locals& locals) {
  for (const InputMove& move : plan.moves) {
    const TensorSlot& slot = arguments.tensors[move.slot];
    if (!info.is_written[slot.argument]) continue;
    const Spec& from = *slot.meta->spec;
    const SpecPtr moved = with_placements(from, move.to);
    comm_debug::note_redistribution(info.name, *moved, from.placements, /*implicit=*/true);
    slot.meta->local.copy_(run_steps(locals[move.slot], *moved, move.back));
  }
}

// Whether views of it, .data() or parts that were handed out share its memory.
bool is_shared(const DTensorMeta& meta) {
  auto* of_all = const_cast<DTensorMeta*>(&meta);
  return c10::raw::intrusive_ptr::use_count(of_all) > 1 || meta.local.use_count() > 1 ||
         meta.local.storage().use_count() > 1;
}

// A dim that goes must be whole first, so the tensor moves; who shares its memory would go on with the old one, and
// nobody would tell them. Asked after the move, so that ranks stay in step.
void check_may_move(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments) {
  const TensorSlot& self = arguments.tensors[0];
  const auto moves = [](const InputMove& move) { return move.slot == 0 && !move.steps.empty(); };
  if (std::none_of(plan.moves.begin(), plan.moves.end(), moves) || !is_shared(*self.meta)) return;
  raise<c10::ValueError>(
      {info.name,
       c10::str("argument \"", info.schema->arguments()[self.argument].name(), "\" ", self.meta->spec->to_string(),
                " would get new memory, and views of it or its to_local() keep the old one"),
       "use the form that returns a new tensor, or redistribute before the views are taken"});
}

// squeeze_ and the like: the tensor itself gets the new sizes.
void change_metadata(const CachedPlan& plan, const DeviceMesh& mesh, const IValue& self, at::Tensor local) {
  CachedOutput& output = plan.returns[0].elements[0];
  if (!plan.stand_in_axes.empty()) local = undo_stand_in(plan, output, local);
  const SpecPtr spec = spec_for(output, local, mesh);
  set_meta(self.toTensor(), std::move(local), spec);
}

void prepare_out(const OpInfo& info, Stack& stack, size_t base) {
  for (int i = 0; i < info.num_arguments; ++i) {
    if (!info.is_out[i] || !stack[base + i].isTensor()) continue;
    const at::Tensor& out = stack[base + i].toTensor();
    if (dtensor_meta(out) == nullptr) {
      raise<c10::TypeError>({info.name,
                             c10::str("the out= tensor \"", info.schema->arguments()[i].name(), "\" is plain"),
                             "pass a DTensor on the same mesh, or use the form that returns a new tensor"});
    }
    stack[base + i] = at::empty({0}, dtensor_meta(out)->local.options());
  }
}

void fill_out(const OpInfo& info, const CachedPlan& plan, const DeviceMesh& mesh, c10::ArrayRef<IValue> given,
              Stack& stack) {
  const size_t base = stack.size() - info.num_returns;
  for (int r = 0; r < info.num_returns; ++r) {
    const int argument = info.return_alias[r];
    if (argument < 0 || !info.is_out[argument] || plan.returns[r].elements.empty()) continue;
    at::Tensor local = stack[base + r].toTensor();
    CachedOutput& output = plan.returns[r].elements[0];
    if (!plan.stand_in_axes.empty()) local = undo_stand_in(plan, output, local);
    lay_out(output, local);
    const SpecPtr spec = spec_for(output, local, mesh);
    const at::Tensor out = given[argument].toTensor();
    const DTensorMeta* meta = dtensor_meta(out);
    begin_write(info.name, info.schema->arguments()[argument].name(), *meta);
    if (meta->spec->placements == spec->placements && meta->spec->sizes == spec->sizes) {
      meta->local.copy_(local);  // others may share the memory
    } else {
      set_meta(out, local, spec);
    }
  }
}

bool nothing_to_write(const OpInfo& info, const CachedPlan& plan, const Locals& locals) {
  if (plan.stand_in_axes.empty() || !info.has_written || info.is_metadata_change) return false;
  for (int alias : info.return_alias) {
    if (alias < 0) return false;
  }
  for (size_t i = 0; i < locals.size(); ++i) {
    if (info.is_written[plan.tensors[i].argument] && locals[i].numel() == 0) return true;
  }
  return false;
}

// A view of a view that was copied is one itself. Along axes of one rank nothing is moved, so the view stays one.
CopiedFromPtr copied_view(const CachedPlan& plan, const TensorSlot& base) {
  for (const InputMove& move : plan.moves) {
    if (move.slot == 0 && !move.steps.empty() && base.meta != nullptr) return copied_from(*base.impl);
  }
  return base.meta != nullptr ? base.meta->copied_from : nullptr;
}

Wrapping wrapping_of(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments, const DeviceMesh& mesh) {
  if (C10_LIKELY(!info.is_view)) return {info, plan, mesh, nullptr, nullptr, false};
  const TensorSlot& base = arguments.tensors[0];
  const bool leave_inference = c10::InferenceMode::is_enabled() && !base.impl->is_inference();
  return {info, plan, mesh, base.meta != nullptr ? base.impl : nullptr, copied_view(plan, base), leave_inference};
}

SpecPtr held(const Spec* spec) {
  return SpecPtr::reclaim_copy(const_cast<Spec*>(spec));
}

}  // namespace

void check_writable(const OpInfo& info, const Arguments& arguments) {
  for (const TensorSlot& slot : arguments.tensors) {
    if (!info.is_written[slot.argument]) continue;
    const std::string& argument = info.schema->arguments()[slot.argument].name();
    if (C10_UNLIKELY(slot.meta == nullptr)) {
      raise<c10::TypeError>({info.name, c10::str("a DTensor would be written into the plain tensor \"", argument, "\""),
                             "use the functional form, or make the plain tensor a DTensor first"});
    }
    begin_write(info.name, argument, *slot.meta);
  }
}

at::Tensor wrap_fast(const OpInfo& info, const CachedPlan& plan, const Arguments& arguments, int r, at::Tensor local) {
  if (!local.defined()) return local;
  const Wrapping wrapping = wrapping_of(info, plan, arguments, arguments.first->mesh);
  return wrap_result(wrapping, plan.returns[r].elements[0], std::move(local));
}

void run_fast(const c10::OperatorHandle& op, const OpInfo& info, const CachedPlan& plan, const Arguments& arguments,
              Stack& stack) {
  const size_t base = stack.size() - info.num_arguments;
  // The stack may hold the only handle on an argument, and what it says is needed to wrap the results.
  const SpecPtr first = held(arguments.first);
  const at::Tensor view_of = info.is_view ? stack[base + arguments.tensors[0].argument].toTensor() : at::Tensor();
  const Wrapping wrapping = wrapping_of(info, plan, arguments, first->mesh);
  c10::SmallVector<IValue, 2> written(info.num_returns);
  if (info.has_written) {
    check_writable(info, arguments);
    for (int r = 0; r < info.num_returns; ++r) {
      if (info.return_alias[r] >= 0) written[r] = stack[base + info.return_alias[r]];
    }
  }
  for (const TensorSlot& slot : arguments.tensors) {
    if (slot.meta != nullptr) stack[base + slot.argument] = IValue(at::Tensor(slot.meta->local));
  }
  for (const auto& [argument, value] : plan.replaced) stack[base + argument] = value;
  if (C10_UNLIKELY(plan.is_default && info.takes_generator)) put_rank_generator(*info.schema, stack, &first->mesh);
  tape::run(op, stack);
  wrap_returns(wrapping, written, stack);
}

void run_planned(const c10::OperatorHandle& op, const OpInfo& info, const CachedPlan& plan, const Arguments& arguments,
                 Stack& stack) {
  const size_t base = stack.size() - info.num_arguments;
  if (info.has_written && !info.is_metadata_change) check_writable(info, arguments);
  // The call as it was made: results in place are these tensors, and their parts stay alive.
  const std::vector<IValue> given(stack.begin() + base, stack.end());
  std::vector<IValue> written(info.num_returns);
  for (int r = 0; r < info.num_returns; ++r) {
    if (info.return_alias[r] >= 0) written[r] = given[info.return_alias[r]];
  }
  const SpecPtr first = held(arguments.first);
  const Wrapping wrapping = wrapping_of(info, plan, arguments, first->mesh);
  const spmd::Call call(*info.schema, given, plan.tensors);
  Locals locals = gather_locals(info, plan, arguments, call, first->mesh);
  if (info.is_metadata_change) check_may_move(info, plan, arguments);
  if (nothing_to_write(info, plan, locals)) {
    write_back(info, plan, arguments, locals);
    torch::jit::drop(stack, info.num_arguments);
    stack.insert(stack.end(), written.begin(), written.end());
    return;
  }
  if (!plan.stand_in_axes.empty()) put_stand_ins(plan, locals);
  if (info.is_metadata_change) locals[0] = locals[0].alias();
  put_locals(info, arguments, locals, stack, base);
  if (info.has_out) prepare_out(info, stack, base);
  for (const auto& [argument, value] : plan.replaced) stack[base + argument] = value;
  if (plan.is_default && info.takes_generator) put_rank_generator(*info.schema, stack, &first->mesh);

  const spmd::LocalCall local_call{call, plan.plan, plan.position()};
  Stack local(stack.begin() + base, stack.end());
  for (const auto& [fixup, pattern] : plan.fixups) {
    if (fixup->before != nullptr) fixup->before(local_call, pattern, local);
  }
  const Stack arguments_of_call = plan.fixups.empty() ? Stack() : local;
  tape::run(op, local);
  for (const auto& [fixup, pattern] : plan.fixups) {
    if (fixup->after != nullptr) fixup->after(local_call, pattern, arguments_of_call, local);
  }
  torch::jit::drop(stack, info.num_arguments);
  stack.insert(stack.end(), local.begin(), local.end());
  if (info.has_out) fill_out(info, plan, first->mesh, given, stack);
  if (info.is_metadata_change) {
    change_metadata(plan, first->mesh, given[0], stack.back().toTensor());
  } else if (info.has_written) {
    write_back(info, plan, arguments, locals);
  }
  wrap_returns(wrapping, written, stack);
}

}  // namespace serried::detail
