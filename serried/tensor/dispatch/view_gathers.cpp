// Warns of views that split a cut dim where the ranks do not divide it: heads that are gathered without a word.
#include "serried/tensor/dispatch/view_gathers.h"

#include <algorithm>
#include <optional>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/collectives/watch.h"
#include "serried/spmd/rules/reshape.h"
#include "serried/tensor/guards.h"

namespace serried::detail {
namespace {

// What dim `d` of `from` is split into where dims of `to` end inside of it: [6,8] of [5,4,48] to [5,24,8], which merges
// the 6 with the 4. None where it is not split, or the two do not nest.
c10::DimVector split_of(c10::IntArrayRef from, c10::IntArrayRef to, size_t d) {
  const int64_t begin = c10::multiply_integers(from.slice(0, d));
  c10::DimVector parts;
  int64_t done = begin;
  int64_t product = 1;
  for (const int64_t size : to) {
    product *= size;
    if (product <= done || product > begin * from[d]) continue;
    if (product % done != 0) return {};
    parts.push_back(product / done);
    done = product;
  }
  return done == begin * from[d] && parts.size() > 1 ? parts : c10::DimVector();
}

// The sizes that a view is asked for; none where the call is of another kind.
std::optional<Sizes> sizes_asked(const spmd::Call& call) {
  if (call.tensors().size() != 1 || !call.has("size")) return std::nullopt;
  const auto asked = call.integers("size");
  return asked ? spmd::detail::resolve_sizes(call.tensor(0).numel(), *asked) : std::nullopt;
}

// Who cuts `dim`, and how many they are.
struct Cutters {
  int64_t number = 1;
  std::string text;
};

Cutters cutters_of(const Placements& from, const DeviceMesh& mesh, int64_t dim) {
  Cutters found;
  size_t axes = 0, last = 0;
  for (size_t axis = 0; axis < from.size(); ++axis) {
    if (!from[axis].is_shard(dim)) continue;
    found.number *= mesh.size(int64_t(axis));
    last = axis;
    ++axes;
  }
  const bool is_named = last < mesh.dim_names().size();
  const std::string name = is_named ? c10::str("\"", mesh.dim_names()[last], "\"") : c10::str("axis ", last);
  found.text = c10::str("the ", found.number, axes == 1 ? " ranks of " + name : " ranks that cut it");
  return found;
}

// The number that ranks would have to divide for `placement` to stay: of heads. None: the view moves for other reasons.
std::optional<int64_t> heads_of(const Placement& placement, const c10::DimVector& parts) {
  if (parts.empty()) return std::nullopt;
  if (!placement.is_strided()) return parts[0];
  // Projections that stand side by side are cut one by one.
  if (parts[0] != placement.split_factor()) return std::nullopt;
  return parts[1];
}

}  // namespace

void warn_of_split(const OpInfo& info, const spmd::Call& call, const CachedPlan& plan, const Placements& from,
                   const DeviceMesh& mesh) {
  if (plan.moves.size() != 1 || !plan.moves[0].communicates || plan.is_default) return;
  const std::optional<Sizes> sizes = sizes_asked(call);
  if (!sizes.has_value()) return;
  const bool is_first =
      std::all_of(plan.own_coordinate.begin(), plan.own_coordinate.end(), [](int64_t c) { return c == 0; });
  if (!is_first || ExplicitRedistribution::current().mode != HiddenCommunication::allow) return;
  const spmd::TensorArg& tensor = plan.tensors[0];
  const Placements& to = plan.moves[0].to;
  for (size_t axis = 0; axis < from.size(); ++axis) {
    if (from[axis] == to[axis] || !from[axis].is_shard()) continue;
    const int64_t dim = from[axis].dim();
    const c10::DimVector parts = split_of(tensor.sizes, *sizes, size_t(dim));
    const std::optional<int64_t> heads = heads_of(from[axis], parts);
    const Cutters cutters = cutters_of(from, mesh, dim);
    if (!heads.has_value() || *heads % cutters.number == 0) continue;
    return log::warn_once(format_error(
        {info.name,
         c10::str(watch::dtype_name(tensor.dtype), sizes_text(tensor.sizes), " ", to_string(from), " on ",
                  mesh.to_string(), " is moved to ", to_string(to), ": dim ", dim, " becomes ", sizes_text(parts),
                  ", and ", cutters.text, " do not divide ", *heads),
         c10::str("choose a multiple of ", cutters.number, " in place of ", *heads,
                  ", the heads of an attention; or ask for the move: constrain(x, parse_placements(\"", to_string(to),
                  "\")) before the view, or that layout as the output of the module's style")}));
  }
}

}  // namespace serried::detail
