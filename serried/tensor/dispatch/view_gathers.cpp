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

std::string axis_name(const DeviceMesh& mesh, size_t axis) {
  return axis < mesh.dim_names().size() ? c10::str("\"", mesh.dim_names()[axis], "\"") : c10::str("axis ", axis);
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
    c10::DimVector parts = split_of(tensor.sizes, *sizes, size_t(from[axis].dim()));
    const std::string shown = sizes_text(parts);
    // Projections that stand side by side are cut one by one.
    if (from[axis].is_strided() && parts.size() > 1 && parts[0] == from[axis].split_factor())
      parts.erase(parts.begin());
    const int64_t ranks = mesh.size(int64_t(axis));
    if (parts.empty() || parts[0] % ranks == 0) continue;
    log::warn_once(format_error(
        {info.name,
         c10::str(watch::dtype_name(tensor.dtype), sizes_text(tensor.sizes), " ", to_string(from), " on ",
                  mesh.to_string(), " is moved to ", to_string(to), ": dim ", from[axis].dim(), " becomes ", shown,
                  ", and the ", ranks, " ranks of ", axis_name(mesh, axis), " do not divide ", parts[0]),
         c10::str("choose a multiple of ", ranks, " in place of ", parts[0],
                  ", the heads of an attention; or ask for the move: constrain(x, parse_placements(\"", to_string(to),
                  "\")) before the view, or that layout as the output of the module's style")}));
  }
}

}  // namespace serried::detail
