// Parts of a tensor with some rows of their neighbours: what ops on windows read where an image is cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// A cut dim: per part the rows that it holds and those that it wants. All ranks know both of all parts.
struct BorderedDim {
  int64_t dim = 0;
  std::vector<int64_t> axes;  // of the mesh, ascending: those that cut it
  std::vector<Span> holds;    // part by part, row-major over the axes
  std::vector<Span> wants;    // may reach outside of the tensor, where nobody has rows
};

/// Brings every rank the rows it wants, from as many others as hold them, in one collective; and gradients back. Ranks
/// compute alike what moves, so that nothing is said about sizes, and where nothing moves there is no collective.
class BorderExchange {
 public:
  BorderExchange(const DeviceMesh& mesh, std::vector<BorderedDim> dims);

  /// The rows that this rank wants; those that nobody has are `fill`. `held` itself where it is what is wanted.
  at::Tensor fetch(const at::Tensor& held, const at::Scalar& fill) const;
  /// The transpose of fetch: what ranks have for the rows of `held`, added up in the order of the ranks.
  at::Tensor give_back(const at::Tensor& wanted) const;

  /// The shape of what this rank wants of `held`.
  Sizes wanted_sizes(c10::IntArrayRef held) const { return with_rows(held, &BorderedDim::wants); }

  /// Places along the cut dims that the busiest rank sends in a fetch, and in a give_back.
  int64_t most_fetched() const;
  int64_t most_given_back() const;

 private:
  using Spans = std::vector<Span> BorderedDim::*;
  /// One span of rows per cut dim.
  using Rows = std::vector<Span>;

  Rows rows_of(int64_t peer, Spans spans) const;
  size_t part_of(int64_t peer, const BorderedDim& dim) const;
  Rows common(int64_t from, Spans a, int64_t to, Spans b) const;
  at::Tensor view(const at::Tensor& t, const Rows& rows, Spans of) const;
  Sizes with_rows(c10::IntArrayRef sizes, Spans spans) const;
  bool wants_what_it_holds() const;
  bool wants_more_than_exists() const;
  int64_t most_sent(Spans from, Spans to) const;
  template <class Arrived>
  void exchange(const at::Tensor& sent, Spans from, Spans to, Arrived arrived) const;

  DeviceMesh mesh_;
  std::vector<BorderedDim> dims_;
  std::vector<int64_t> axes_;  // of several ranks, ascending
  int64_t num_ranks_ = 1;      // of these axes together
  int64_t rank_ = 0;           // among them, row-major
  bool moves_ = false;         // whether any rank wants what another has
};

}  // namespace serried::detail
