// Checks that all ways to make a DTensor share.
#include "serried/tensor/making/placing.h"

#include <numeric>

#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/making/like.h"
#include "serried/tensor/spec.h"

namespace serried::detail {

Placements resolved_placements(std::string_view where, const Placements& placements, int64_t tensor_ndim,
                               const DeviceMesh& mesh, c10::ScalarType dtype) {
  if (placements.empty()) return Placements(size_t(mesh.ndim()));
  Placements resolved = checked_placements(where, placements, tensor_ndim, mesh.ndim());
  if (!c10::isIntegralType(dtype, /*includeBool=*/true)) return resolved;
  for (const Placement& placement : resolved) {
    if (!placement.is_partial(ReduceKind::avg)) continue;
    raise<c10::ValueError>({where,
                            c10::str("P(avg) of ", watch::dtype_name(dtype), " in \"", to_string(resolved),
                                     "\": an average of integers is no integer"),
                            "pass Partial(\"sum\"), or convert the tensor to a floating dtype"});
  }
  return resolved;
}

void check_in_mesh(std::string_view where, const DeviceMesh& mesh) {
  if (mesh.contains_this_rank()) return;
  raise<c10::ValueError>(
      {where,
       c10::str("rank ", mesh.get_rank(), " is not in ", mesh.to_string(), " of ranks ", sizes_text(mesh.rank_list())),
       "call it on the ranks of the mesh only: if (mesh.contains_this_rank()) ..."});
}

Placements gradient_placements(const Placements& placements) {
  return without_partial(placements);
}

Group whole_group(const DeviceMesh& mesh) {
  std::vector<int64_t> axes(static_cast<size_t>(mesh.ndim()));
  std::iota(axes.begin(), axes.end(), 0);
  return mesh.get_merged_group(axes);
}

}  // namespace serried::detail
