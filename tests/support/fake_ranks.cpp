// Scatter and gather written once more, apart from the library's layout arithmetic, so that each checks the other.
#include "tests/support/fake_ranks.h"

#include <torch/torch.h>

namespace serried::testing {
namespace {

at::Tensor noise_like(const at::Tensor& x, double size) {
  if (at::isIntegralType(x.scalar_type(), false)) return at::randint(-3, 4, x.sizes(), x.options());
  return at::randn_like(x) * size;
}

std::vector<at::Tensor> split_sum(const at::Tensor& x, int64_t ranks, Split split) {
  std::vector<at::Tensor> parts;
  at::Tensor rest = x.clone();
  for (int64_t r = 1; r < ranks; ++r) {
    parts.push_back(split == Split::scaled ? x * (r == 1 ? 0.6 : 0.1) : noise_like(x, 2));
    rest = rest - parts.back();
  }
  parts.push_back(rest);
  return parts;
}

// One rank holds the extremum of each element, the others something beyond it.
std::vector<at::Tensor> split_extremum(const at::Tensor& x, int64_t ranks, double sign) {
  const at::Tensor owner = at::randint(0, ranks, x.sizes(), at::kLong);
  std::vector<at::Tensor> parts;
  for (int64_t r = 0; r < ranks; ++r) {
    const at::Tensor gap = noise_like(x, 3).abs();
    parts.push_back(at::where(owner.eq(r), x, (x + gap * sign).to(x.scalar_type())));
  }
  return parts;
}

std::vector<at::Tensor> split_product(const at::Tensor& x, int64_t ranks) {
  std::vector<at::Tensor> parts;
  at::Tensor rest = x.clone();
  for (int64_t r = 1; r < ranks; ++r) {
    const at::Tensor sign = at::where(at::rand(x.sizes(), at::kFloat).gt(0.5), 1.0, -1.0).to(x.scalar_type());
    parts.push_back((at::rand_like(x) + 0.5) * sign);
    rest = rest / parts.back();
  }
  parts.push_back(rest);
  return parts;
}

std::vector<at::Tensor> split_partial(const at::Tensor& x, ReduceKind kind, int64_t ranks, Split split) {
  if (kind == ReduceKind::max) return split_extremum(x, ranks, -1);
  if (kind == ReduceKind::min) return split_extremum(x, ranks, 1);
  if (kind == ReduceKind::product) return split_product(x, ranks);
  std::vector<at::Tensor> parts = split_sum(x, ranks, split);
  if (kind == ReduceKind::avg) {
    for (at::Tensor& part : parts) part = part * ranks;
  }
  return parts;
}

// ceil(size / ranks) each, within each of `pieces` equal pieces of the dim.
at::Tensor cut(const at::Tensor& x, int64_t dim, int64_t pieces, int64_t ranks, int64_t rank) {
  std::vector<at::Tensor> parts;
  const int64_t size = x.size(dim) / pieces;
  TORCH_CHECK(size * pieces == x.size(dim), "dim ", dim, " of ", x.sizes(), " has no ", pieces, " equal pieces");
  const int64_t part = (size + ranks - 1) / ranks;
  const int64_t begin = std::min(rank * part, size);
  const int64_t end = std::min(begin + part, size);
  for (int64_t k = 0; k < pieces; ++k) parts.push_back(x.narrow(dim, k * size + begin, end - begin));
  return at::cat(parts, dim).contiguous();
}

at::Tensor join(const std::vector<at::Tensor>& parts, int64_t dim, int64_t pieces) {
  std::vector<at::Tensor> sorted;
  for (int64_t k = 0; k < pieces; ++k) {
    for (const at::Tensor& part : parts) {
      TORCH_CHECK(part.dim() > dim, "a part of ", part.dim(), " dims is cut along dim ", dim);
      const int64_t size = part.size(dim) / pieces;
      sorted.push_back(part.narrow(dim, k * size, size));
    }
  }
  return at::cat(sorted, dim);
}

at::Tensor reduce(const std::vector<at::Tensor>& parts, ReduceKind kind) {
  const at::Tensor all = at::stack(parts);
  const bool is_bool = all.scalar_type() == at::kBool;
  switch (kind) {
    case ReduceKind::avg: return all.mean(0);
    case ReduceKind::max: return is_bool ? all.any(0) : all.amax(0);
    case ReduceKind::min: return is_bool ? all.all(0) : all.amin(0);
    case ReduceKind::product: return all.prod(0, false, all.scalar_type());
    default: return all.sum(0, false, all.scalar_type());
  }
}

at::Tensor as_doubles(const at::Tensor& x) {
  if (!x.is_complex()) return x.to(at::kDouble);
  return at::view_as_real(x.resolve_conj().to(at::kComplexDouble).contiguous());
}

}  // namespace

bool can_split(const at::Tensor& x, const Placement& placement) {
  if (!placement.is_partial()) return true;
  const ReduceKind kind = placement.reduce();
  if (x.is_complex()) return kind == ReduceKind::sum || kind == ReduceKind::avg;
  if (x.is_floating_point()) return true;
  const bool is_signed = at::isIntegralType(x.scalar_type(), false) && x.scalar_type() != at::kByte;
  return is_signed && kind != ReduceKind::avg && kind != ReduceKind::product;
}

std::vector<at::Tensor> scatter(const at::Tensor& x, const Placement& placement, int64_t ranks, Split split) {
  std::vector<at::Tensor> parts;
  if (placement.is_partial()) return split_partial(x, placement.reduce(), ranks, split);
  for (int64_t r = 0; r < ranks; ++r) {
    parts.push_back(placement.is_shard() ? cut(x, placement.dim(), placement.split_factor(), ranks, r) : x.clone());
  }
  return parts;
}

at::Tensor gather(const std::vector<at::Tensor>& parts, const Placement& placement) {
  for (const at::Tensor& part : parts) {
    TORCH_CHECK(part.defined() == parts[0].defined(), "only some ranks have a result");
    if (!part.defined()) return part;
    TORCH_CHECK(placement.is_shard() || part.sizes() == parts[0].sizes(), "ranks have ", parts[0].sizes(), " and ",
                part.sizes());
    TORCH_CHECK(!placement.is_replicate() || same_values(part, parts[0]), "replicas differ");
  }
  if (placement.is_shard()) return join(parts, placement.dim(), placement.split_factor());
  return placement.is_partial() ? reduce(parts, placement.reduce()) : parts[0];
}

bool same_values(const at::Tensor& got, const at::Tensor& want) {
  if (!got.defined() || !want.defined()) return got.defined() == want.defined();
  if (got.sizes() != want.sizes() || got.scalar_type() != want.scalar_type()) return false;
  if (want.numel() == 0) return true;
  if (!want.is_floating_point() && !want.is_complex()) return got.equal(want);
  const bool is_double = want.scalar_type() == at::kDouble || want.scalar_type() == at::kComplexDouble;
  const double tolerance = is_double ? 1e-8 : 1e-4;
  const at::Tensor a = as_doubles(got);
  const at::Tensor b = as_doubles(want);
  const at::Tensor finite = at::where(b.isfinite(), b.abs(), at::zeros_like(b));
  const double scale = std::max(1.0, finite.max().item<double>());
  return at::allclose(a, b, tolerance, tolerance * scale, /*equal_nan=*/true);
}

}  // namespace serried::testing
