// Attention of plain code inside ContextParallel, above autograd: its queries, keys and values are this rank's parts.
#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/above_key.h"
#include "serried/tensor/attention/sequence_attention.h"
#include "serried/tensor/attention/sequence_scope.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace {

using detail::kHeadsDim;
using detail::kLengthDim;
using detail::SequenceAttention;
using detail::SequenceScope;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kAttention = "scaled_dot_product_attention";
constexpr c10::DispatchKeySet kBelowAttention(c10::DispatchKeySet::FULL_AFTER, kAboveKey);

// A call that waits for its backward.
struct KeptCall final : torch::CustomClassHolder {
  explicit KeptCall(SequenceAttention call_) : call(std::move(call_)) {}
  SequenceAttention call;  // without its mask, which is saved as tensors are
};

struct PartAttention : torch::autograd::Function<PartAttention> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& query, const at::Tensor& key,
                            const at::Tensor& value, SequenceAttention call) {
    detail::AttentionResult result;
    {
      const detail::LocalOnly guard;
      result = attend(call, query, key, value);
    }
    const at::Tensor mask = std::exchange(call.mask, at::Tensor());
    ctx->save_for_backward({query, key, value, mask, result.out, result.lse});
    ctx->saved_data["call"] = c10::IValue::make_capsule(c10::make_intrusive<KeptCall>(std::move(call)));
    return result.out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    if (c10::GradMode::is_enabled()) {
      raise<c10::NotImplementedError>({kAttention, "inside ContextParallel attention has no second gradient",
                                       "call backward without create_graph"});
    }
    const variable_list saved = ctx->get_saved_variables();
    SequenceAttention call = static_cast<const KeptCall&>(*ctx->saved_data["call"].toCapsule()).call;
    call.mask = saved[3];
    const detail::LocalOnly guard;
    const detail::AttentionGradients parts =
        attend_backward(call, gradients[0], saved[0], saved[1], saved[2], {saved[4], saved[5]});
    return {parts.query, parts.key, parts.value, at::Tensor()};
  }
};

[[noreturn]] void raise_wrong_length(const SequenceScope& scope, const char* what, const at::Tensor& t) {
  const int64_t rank = scope.mesh.get_local_rank(int64_t(0));
  raise<c10::ValueError>(
      {kAttention,
       c10::str(what, " are ", watch::describe_tensor(t), ", with ", t.size(kLengthDim),
                " positions, but inside ContextParallel rank ", rank, " of ", scope.mesh.to_string(), " holds ",
                scope.cut->size(rank), " of ", scope.cut->length()),
       "pass all tensors that have the sequence as .buffers, or call attention to other sequences outside of the "
       "scope"});
}

// LibTorch broadcasts a batch of one; its kernel reads past the end where nobody has compared them.
void check_batches(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  if (key.size(0) == query.size(0) && value.size(0) == query.size(0)) return;
  raise<c10::ValueError>(
      {kAttention,
       c10::str("inside ContextParallel queries, keys and values have one batch size, and these have ", query.size(0),
                ", ", key.size(0), " and ", value.size(0)),
       "expand() those of one to the size of the others"});
}

void check_dtypes(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value) {
  const at::ScalarType dtype = query.scalar_type();
  if (query.is_floating_point() && key.scalar_type() == dtype && value.scalar_type() == dtype) return;
  raise<c10::ValueError>(
      {kAttention,
       c10::str("inside ContextParallel queries, keys and values have one floating dtype, and these are ",
                watch::dtype_name(dtype), ", ", watch::dtype_name(key.scalar_type()), " and ",
                watch::dtype_name(value.scalar_type())),
       "convert them by to(dtype)"});
}

void check_tensors(const SequenceScope& scope, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   bool enable_gqa) {
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) {
    raise<c10::ValueError>({kAttention,
                            c10::str("inside ContextParallel queries, keys and values have 4 dims, and these have ",
                                     query.dim(), ", ", key.dim(), " and ", value.dim()),
                            "pass [batch, heads, length, size]"});
  }
  check_batches(query, key, value);
  const int64_t due = scope.cut->size(scope.mesh.get_local_rank(int64_t(0)));
  if (query.size(kLengthDim) != due) raise_wrong_length(scope, "queries", query);
  if (key.size(kLengthDim) != due) raise_wrong_length(scope, "keys", key);
  if (value.size(kLengthDim) != due) raise_wrong_length(scope, "values", value);
  if (query.size(3) != key.size(3) || query.size(3) != value.size(3)) {
    raise<c10::NotImplementedError>(
        {kAttention,
         c10::str("inside ContextParallel queries, keys and values have one size, and these "
                  "have ",
                  query.size(3), ", ", key.size(3), " and ", value.size(3)),
         "pad the shorter ones with zeros"});
  }
  const int64_t heads = query.size(kHeadsDim), shared = key.size(kHeadsDim);
  if (shared == value.size(kHeadsDim) && (heads == shared || (enable_gqa && shared > 0 && heads % shared == 0))) return;
  raise<c10::ValueError>({kAttention,
                          c10::str("there are ", heads, " heads of queries, ", shared, " of keys and ",
                                   value.size(kHeadsDim), " of values"),
                          "pass as many of each, or enable_gqa = true where those of keys divide those of queries"});
}

void check_options(const SequenceScope& scope, const at::Tensor& mask, double dropout, bool is_causal) {
  if (dropout > 0) {
    raise<c10::NotImplementedError>(
        {kAttention, c10::str("inside ContextParallel there is no dropout of weights, and dropout_p is ", dropout),
         "pass 0 and drop out elements of the result instead"});
  }
  if (!mask.defined()) return;
  if (is_causal) {
    raise<c10::ValueError>({kAttention, "there is a mask, and is_causal is set, too", "put both into the mask"});
  }
  if (scope.has_documents) {
    raise<c10::NotImplementedError>({kAttention, "there is a mask, and ContextParallel was given documents, too",
                                     "put the documents into the mask and leave .documents out"});
  }
  if (mask.scalar_type() != at::kBool && !mask.is_floating_point()) {
    raise<c10::ValueError>({kAttention, c10::str("the mask is ", watch::describe_tensor(mask)),
                            "pass bool, true where a query attends to a key, or floats that are added"});
  }
  if (mask.requires_grad()) {
    raise<c10::NotImplementedError>(
        {kAttention, "inside ContextParallel a mask has no gradient", "pass mask.detach()"});
  }
}

// This rank's rows of a mask, [..., rows or 1, all keys or 1], to be added to the weights.
at::Tensor own_rows(const SequenceScope& scope, const at::Tensor& mask, const at::Tensor& query) {
  const int64_t rank = scope.mesh.get_local_rank(int64_t(0)), all = scope.cut->length(), own = scope.cut->size(rank);
  const auto fits = [&](int64_t dim) { return mask.size(dim) == 1 || mask.size(dim) == query.size(dim); };
  const bool has_dims = mask.dim() == 2 || (mask.dim() == 4 && fits(0) && fits(kHeadsDim));
  const bool rows_fit = has_dims && (mask.size(-2) == 1 || mask.size(-2) == own || mask.size(-2) == all);
  if (!rows_fit || (mask.size(-1) != 1 && mask.size(-1) != all)) {
    raise<c10::ValueError>(
        {kAttention,
         c10::str("the mask is ", watch::describe_tensor(mask), ", and inside ContextParallel rank ", rank, " of ",
                  scope.mesh.to_string(), " has ", own, " rows of ", all, " keys, for queries ",
                  watch::describe_tensor(query)),
         "pass [rows, keys] or [batch, heads, rows, keys] with this rank's rows, all rows or one row, and all keys"});
  }
  at::Tensor rows = mask;
  if (mask.size(-2) == all && all != own && all != 1) {
    std::vector<at::Tensor> chunks = {mask.narrow(-2, 0, 0)};
    for (const detail::SequenceChunk& chunk : scope.cut->chunks(rank)) {
      chunks.push_back(mask.narrow(-2, chunk.begin, chunk.size));
    }
    rows = at::cat(chunks, -2);
  }
  if (rows.scalar_type() != at::kBool) return rows.to(query.scalar_type()).contiguous();
  const at::Tensor nothing = at::zeros(rows.sizes(), query.options());
  return nothing.masked_fill_(rows.logical_not(), -std::numeric_limits<double>::infinity());
}

// As autocast would: it sees the call only where we hand it on.
at::Tensor autocast(const at::Tensor& t) {
  const bool casts = at::autocast::is_autocast_enabled(at::kCPU) && t.scalar_type() != at::kDouble;
  return casts ? t.to(at::autocast::get_autocast_dtype(at::kCPU)) : t;
}

struct PlainCall {
  at::Tensor query, key, value, mask;
  bool is_causal;
  std::optional<double> scale;
};

at::Tensor attend_parts(const SequenceScope& scope, const PlainCall& given) {
  const at::Tensor query = autocast(given.query), key = autocast(given.key), value = autocast(given.value);
  check_dtypes(query, key, value);
  const at::Tensor mask = given.mask.defined() ? own_rows(scope, given.mask, query) : at::Tensor();
  SequenceAttention call{.group = scope.mesh.get_group(int64_t(0)),
                         .queries = *scope.cut,
                         .keys = *scope.cut,
                         .causal = given.is_causal,
                         .scale = given.scale,
                         .mask = mask};
  call.way = chosen_way(scope.way, detail::attention_sizes(query, key, mask.defined()), call,
                        spmd::cost_models(scope.mesh)[0]);
  return PartAttention::apply(query, key, value, call);
}

bool is_cut_along_sequence(const at::Tensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta == nullptr) return false;
  const Placements& placements = meta->spec->placements;
  return std::any_of(placements.begin(), placements.end(), [](const Placement& p) { return p.is_shard(kLengthDim); });
}

// A placement says nothing of documents: queries would attend to all of them.
void refuse_documents(const SequenceScope& scope) {
  if (!scope.has_documents) return;
  raise<c10::NotImplementedError>(
      {kAttention, "queries are a DTensor cut along its sequence, and ContextParallel was given documents",
       "pass plain tensors, cut as .buffers or by context_parallel_shard with the documents, or leave .documents out "
       "and pass a mask"});
}

// How tensor parallel may leave queries: cut along batch or heads, which attention keeps apart. Grouped heads are cut
// only where that parts no group.
Placements kept_placements(const DTensor& query, const at::Tensor& key) {
  Placements kept = without_partial(query.placements());
  for (size_t axis = 0; axis < kept.size(); ++axis) {
    const int64_t ranks = query.device_mesh().size(int64_t(axis));
    const bool parts_groups = query.size(kHeadsDim) != key.size(kHeadsDim) &&
                              (query.size(kHeadsDim) % ranks != 0 || key.size(kHeadsDim) % ranks != 0);
    const bool is_kept = kept[axis] == Shard(0) || (kept[axis] == Shard(kHeadsDim) && !parts_groups);
    if (!is_kept) kept[axis] = Replicate();
  }
  return kept;
}

at::Tensor attend_dtensors(const SequenceScope& scope, PlainCall given) {
  for (const at::Tensor& t : {given.key, given.value}) {
    if (is_dtensor(t) && DTensor(t).device_mesh() == DTensor(given.query).device_mesh()) continue;
    raise<c10::TypeError>({kAttention, "queries are a DTensor, and keys and values are none of the same mesh",
                           "pass all three as DTensors of one mesh, or all three as plain tensors"});
  }
  const DTensor query(given.query), key(given.key), value(given.value);
  const Placements placements = kept_placements(query, key);
  if (given.mask.defined() && (is_dtensor(given.mask) || given.mask.dim() != 2)) {
    raise<c10::NotImplementedError>({kAttention,
                                     "queries are a DTensor inside ContextParallel, and the mask is not a plain tensor "
                                     "of 2 dims",
                                     "pass this rank's rows of a mask that serves all heads: [rows, keys]"});
  }
  given.query = query.redistribute(placements).to_local();
  given.key = key.redistribute(placements).to_local();
  given.value = value.redistribute(placements).to_local();
  const at::Tensor out = attend_parts(scope, given);
  const c10::DimVector strides = serried::contiguous_strides(query.sizes());
  return DTensor::from_local(out, query.device_mesh(), placements,
                             {.shape = query.sizes(), .stride = c10::IntArrayRef(strides)});
}

at::Tensor scaled_dot_product_attention(c10::DispatchKeySet keys, const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value, const std::optional<at::Tensor>& attn_mask,
                                        double dropout_p, bool is_causal, std::optional<double> scale,
                                        bool enable_gqa) {
  const detail::SequenceScopePtr scope = detail::sequence_scope();
  const auto go_on = [&] {
    return at::_ops::scaled_dot_product_attention::redispatch(keys & kBelowAttention, query, key, value, attn_mask,
                                                              dropout_p, is_causal, scale, enable_gqa);
  };
  if (scope == nullptr) return go_on();
  if (is_cut_along_sequence(query)) {
    refuse_documents(*scope);
    return go_on();
  }
  detail::rely_on_sequence_scope();
  if (!scope->cut.has_value()) {
    raise<c10::ValueError>({kAttention, "inside ContextParallel nobody said how long the sequence is",
                            "pass .buffers, or .length where the parts are there already"});
  }
  const at::Tensor mask = attn_mask.value_or(at::Tensor());
  check_tensors(*scope, query, key, value, enable_gqa);
  if (scope->mesh.size() == 1 && !scope->has_documents) return go_on();
  check_options(*scope, mask, dropout_p, is_causal);
  const PlainCall call{query, key, value, mask, is_causal, scale};
  return is_dtensor(query) ? attend_dtensors(*scope, call) : attend_parts(*scope, call);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  m.impl("scaled_dot_product_attention", scaled_dot_product_attention);
}

}  // namespace serried
