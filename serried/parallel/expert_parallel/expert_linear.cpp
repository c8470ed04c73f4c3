// Matrix products by groups of rows, each other's gradients, on parameters that may be cut over ranks.
#include "serried/parallel/expert_parallel/expert_linear.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/expert_parallel/own_experts.h"
#include "serried/parallel/expert_parallel/token_way.h"
#include "serried/parallel/fsdp/block.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/gather_on_use.h"

namespace serried {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Counts = std::vector<int64_t>;

constexpr const char* kExpertLinear = "expert_linear";

// How a parameter lies while ops compute with it: what fully_shard has cut is whole then.
SpecPtr spec_in_use(const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return nullptr;
  const auto* member = dynamic_cast<const detail::BlockParameter*>(detail::gather_of(*meta));
  return member == nullptr ? meta->spec : member->block->members()[member->index].inner;
}

// This rank's experts of it. Nobody keeps it longer than for an op.
at::Tensor local_value(const at::Tensor& parameter) {
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr) return parameter;
  if (detail::GatherOnUse* gather = detail::gather_of(*meta)) {
    const at::Tensor whole = gather->whole(*meta);
    const DTensorMeta* inner = dtensor_meta(whole);
    return inner != nullptr ? inner->local : whole;
  }
  tape::meet(parameter.unsafeGetTensorImpl());
  return meta->local;
}

bool are_alike(const Counts& counts) {
  return std::all_of(counts.begin(), counts.end(), [&](int64_t count) { return count == counts[0]; });
}

// Each group of rows of `a` [rows, m] by its matrix of `b` [groups, m, n].
at::Tensor multiply_groups(const at::Tensor& a, const at::Tensor& b, const Counts& counts) {
  const int64_t groups = int64_t(counts.size());
  if (are_alike(counts)) return at::bmm(a.reshape({groups, counts[0], a.size(1)}), b).view({a.size(0), b.size(2)});
  at::Tensor result = at::empty({a.size(0), b.size(2)}, a.options());
  int64_t first = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t count = counts[size_t(group)];
    at::Tensor rows = result.narrow(0, first, count);
    at::mm_out(rows, a.narrow(0, first, count), b.select(0, group));
    first += count;
  }
  return result;
}

// [groups, m, n]: of each group the product of its rows, a [rows, m] and b [rows, n].
at::Tensor multiply_across(const at::Tensor& a, const at::Tensor& b, const Counts& counts) {
  const int64_t groups = int64_t(counts.size());
  if (are_alike(counts)) {
    return at::bmm(a.reshape({groups, counts[0], a.size(1)}).transpose(1, 2),
                   b.reshape({groups, counts[0], b.size(1)}));
  }
  at::Tensor result = at::empty({groups, a.size(1), b.size(1)}, a.options());
  int64_t first = 0;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t count = counts[size_t(group)];
    at::Tensor matrix = result.select(0, group);
    at::mm_out(matrix, a.narrow(0, first, count).t(), b.narrow(0, first, count));
    first += count;
  }
  return result;
}

// autocast would cast products of equal groups, and not those of unequal ones.
using NoAutocast = c10::impl::ExcludeDispatchKeyGuard;

// What `mm` is for one expert; `weight` may be cut over ranks. A bias is a matrix of one row.
struct ByGroups : torch::autograd::Function<ByGroups> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& rows, const at::Tensor& weight,
                            const Counts& counts, bool transposed) {
    ctx->save_for_backward({rows, weight});
    ctx->saved_data["counts"] = counts;
    ctx->saved_data["transposed"] = transposed;
    const NoAutocast guard(c10::autocast_dispatch_keyset);
    const at::Tensor value = local_value(weight);
    const at::Tensor matrices = value.dim() == 2 ? value.unsqueeze(1) : value;
    return multiply_groups(rows, transposed ? matrices.transpose(1, 2) : matrices, counts);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads);
};

// The gradient of a weight.
struct AcrossRows : torch::autograd::Function<AcrossRows> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& a, const at::Tensor& b, const Counts& counts) {
    ctx->save_for_backward({a, b});
    ctx->saved_data["counts"] = counts;
    const NoAutocast guard(c10::autocast_dispatch_keyset);
    return multiply_across(a, b, counts);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const variable_list saved = ctx->get_saved_variables();
    const Counts counts = ctx->saved_data["counts"].toIntVector();
    const at::Tensor& grad = grads[0];
    return {ctx->needs_input_grad(0) ? ByGroups::apply(saved[1], grad, counts, true) : at::Tensor(),
            ctx->needs_input_grad(1) ? ByGroups::apply(saved[0], grad, counts, false) : at::Tensor(), at::Tensor()};
  }
};

variable_list ByGroups::backward(AutogradContext* ctx, const variable_list& grads) {
  const variable_list saved = ctx->get_saved_variables();
  const at::Tensor &rows = saved[0], &weight = saved[1], &grad = grads[0];
  const Counts counts = ctx->saved_data["counts"].toIntVector();
  const bool transposed = ctx->saved_data["transposed"].toBool();
  variable_list all(4);
  if (ctx->needs_input_grad(0)) all[0] = ByGroups::apply(grad, weight, counts, !transposed);
  if (!ctx->needs_input_grad(1)) return all;
  at::Tensor local = transposed ? AcrossRows::apply(grad, rows, counts) : AcrossRows::apply(rows, grad, counts);
  if (weight.dim() == 2) local = local.squeeze(1);
  const SpecPtr spec = spec_in_use(weight);
  all[1] = spec == nullptr ? local : at::Tensor(DTensor::from_local(local, spec->mesh, spec->placements));
  return all;
}

std::string describe_parameter(const at::Tensor& parameter) {
  const SpecPtr spec = spec_in_use(parameter);
  return spec != nullptr ? spec->to_string() : watch::describe_tensor(parameter);
}

// Cut over other ranks, or along another dim, the numbers would be those of other experts, or parts of a sum.
void check_cut(const char* name, const at::Tensor& parameter, const DeviceMesh& mesh) {
  const DistMeta* dist = dist_meta(parameter.unsafeGetTensorImpl());
  if (dist != nullptr && dist->kind != &kDTensor) {
    raise<c10::TypeError>(
        {kExpertLinear, c10::str(name, " is a view of a sharded parameter"), "pass the parameter itself"});
  }
  const SpecPtr spec = spec_in_use(parameter);
  if (spec == nullptr) return detail::check_own(kExpertLinear, name, parameter, mesh);
  if (spec->mesh == mesh && spec->placements == Placements{Shard(0)}) {
    return detail::check_not_averaged(kExpertLinear, name, parameter, mesh);
  }
  raise<c10::ValueError>(
      {kExpertLinear, c10::str(name, " is ", spec->to_string(), ", and experts are cut over ", mesh.to_string()),
       "distribute_parameter(weight, mesh[\"ep\"], {Shard(0)}) over the mesh of the experts, and leave other axes to "
       "fully_shard or DDP"});
}

void check_fit(const at::Tensor& rows, const DispatchedTokens& dispatched, const at::Tensor& weight,
               const at::Tensor& bias) {
  const int64_t num_local = int64_t(dispatched.counts.size());
  const auto is_of_all = [&](const at::Tensor& t) {
    return t.size(0) == num_local * (spec_in_use(t) != nullptr ? dispatched.way->mesh.size() : 1);
  };
  const int64_t num_rows = std::accumulate(dispatched.counts.begin(), dispatched.counts.end(), int64_t(0));
  const bool fits_rows = rows.dim() == 2 && rows.size(0) == num_rows;
  const bool fits_weight = weight.dim() == 3 && is_of_all(weight) && rows.size(-1) == weight.size(1);
  const bool fits_bias = !bias.defined() || (bias.dim() == 2 && is_of_all(bias) && bias.size(1) == weight.size(-1));
  if (fits_rows && fits_weight && fits_bias) return;
  raise<c10::ValueError>({kExpertLinear,
                          c10::str("rows ", watch::describe_tensor(rows), " of ", num_local, " experts with ", num_rows,
                                   " rows do not fit weight ", describe_parameter(weight),
                                   bias.defined() ? " and bias " + describe_parameter(bias) : std::string()),
                          "pass rows [rows, in], weight [experts, in, out] and bias [experts, out]"});
}

// As beside a Linear whose parameters compute in a lower dtype. Under autocast rows may come in a lower one than the
// weights have.
at::Tensor cast_like(const at::Tensor& rows, const at::Tensor& weight) {
  const detail::GatherOnUse* gather = detail::gather_of(weight);
  if (gather != nullptr && gather->casts_inputs() && gather->other_dtype()) return rows.to(*gather->other_dtype());
  return at::autocast::is_autocast_enabled(rows.device().type()) ? rows.to(weight.scalar_type()) : rows;
}

}  // namespace

at::Tensor expert_linear(const at::Tensor& rows, const DispatchedTokens& dispatched, const at::Tensor& weight,
                         const at::Tensor& bias) {
  if (!dispatched.way || !rows.defined() || !weight.defined()) {
    raise<c10::ValueError>({kExpertLinear, "nothing was dispatched, or a tensor is undefined",
                            "pass rows, what dispatch_tokens gave, and a weight"});
  }
  check_cut("weight", weight, dispatched.way->mesh);
  if (bias.defined()) check_cut("bias", bias, dispatched.way->mesh);
  check_fit(rows, dispatched, weight, bias);
  const at::Tensor inputs = cast_like(rows, weight);
  const at::Tensor products = ByGroups::apply(inputs, weight, dispatched.counts, false);
  if (!bias.defined()) return products;
  return products + ByGroups::apply(at::ones({inputs.size(0), 1}, inputs.options().requires_grad(false)), bias,
                                    dispatched.counts, false);
}

}  // namespace serried
