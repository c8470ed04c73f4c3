// Sparse gradients: one bucket each, reduced as they are, or as dense rows where it is known which rows matter.
#include <ATen/ops/_unique.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/parallel/ddp/reducer.h"

namespace serried::detail {
namespace {

[[noreturn]] void raise_row_missing(const std::string& name, int64_t row, int64_t num_rows) {
  raise<c10::ValueError>(
      {"backward",
       c10::str("row ", row, " of ", name, " has a gradient but is not among the ", num_rows, " rows given"),
       "pass the rows that any rank uses to set_sparse_metadata"});
}

// The values of a sparse gradient at `rows`, which are sorted, as a dense tensor.
at::Tensor dense_rows(const std::string& name, const at::Tensor& gradient, const at::Tensor& rows) {
  const at::Tensor sums = gradient.coalesce();
  const at::Tensor touched = sums.indices()[0];
  c10::DimVector sizes(gradient.sizes());
  sizes[0] = rows.numel();
  at::Tensor dense = at::zeros(sizes, sums.values().options());
  if (touched.numel() == 0) return dense;
  if (rows.numel() == 0) raise_row_missing(name, touched[0].item<int64_t>(), 0);
  const at::Tensor places = at::searchsorted(rows, touched).clamp_max_(rows.numel() - 1);
  const at::Tensor missing = touched.masked_select(rows.index_select(0, places).ne(touched));
  if (missing.numel() > 0) raise_row_missing(name, missing[0].item<int64_t>(), rows.numel());
  return dense.index_copy_(0, places, sums.values());
}

}  // namespace

void Reducer::set_sparse_rows(const std::map<std::string, at::Tensor>& rows) {
  sparse_rows_.clear();
  for (const auto& [name, indices] : rows) {
    const auto found = std::find_if(parameters_.begin(), parameters_.end(), [&, &name = name](const auto& parameter) {
      return parameter.name == name && parameter.sparse_gradient;
    });
    if (found == parameters_.end()) {
      raise<c10::ValueError>({"set_sparse_metadata", c10::str("no parameter \"", name, "\" has sparse gradients"),
                              "use the names of weights of embeddings made with sparse(true)"});
    }
    sparse_rows_[size_t(found - parameters_.begin())] = std::get<0>(at::_unique(indices.reshape({-1})));
  }
}

void Reducer::contribute_sparse(size_t index) {
  const ManagedParameter& parameter = parameters_[index];
  const at::Tensor& grad = parameter.tensor.grad();
  if (!grad.defined()) {
    raise<c10::ValueError>({"backward", parameter.name + " should have a sparse gradient but has none",
                            "use it in every forward, or make its embedding dense"});
  }
  at::Tensor given = grad.to(options_.reduce_dtype.value_or(grad.scalar_type()));
  const auto rows = sparse_rows_.find(index);
  if (rows != sparse_rows_.end()) given = dense_rows(parameter.name, given, rows->second);
  if (!comm_hook_) given = given / divisor_.value_or(group_->getSize());
  buckets_[locations_[index].bucket].flat = given;
}

void Reducer::give_sparse_gradient(size_t index) {
  const at::Tensor& parameter = parameters_[index].tensor;
  at::Tensor result = buckets_[locations_[index].bucket].flat.to(parameter.scalar_type());
  const auto rows = sparse_rows_.find(index);
  if (rows != sparse_rows_.end()) {
    result = at::sparse_coo_tensor(rows->second.unsqueeze(0), result, parameter.sizes(), {}, /*is_coalesced=*/true);
  }
  parameter.mutable_grad() = result;
}

}  // namespace serried::detail
