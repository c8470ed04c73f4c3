// Asks who else has a parameter: wrappers by their groups, DTensors by their mesh.
#include "serried/parallel/expert_parallel/own_experts.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/parallel/ddp/claim.h"
#include "serried/tensor/meta.h"

namespace serried::detail {
namespace {

// A group knows how many ranks it has, not which: too many not to share another one with the mesh.
bool must_share(const Group& group, const DeviceMesh& mesh) {
  if (group->getSize() == 1 || mesh.size() == 1) return false;
  if (group == mesh.get_group()) return true;
  const int64_t num_all = mesh.root_group()->getSize();
  return group->getSize() <= num_all && group->getSize() + mesh.size() - 1 > num_all;
}

bool share(const DeviceMesh& a, const DeviceMesh& b) {
  if (a.root_group() != b.root_group()) return false;  // numbers of other ranks
  return std::any_of(a.rank_list().begin(), a.rank_list().end(), [&](int64_t rank) {
    return rank != a.get_rank() && std::find(b.rank_list().begin(), b.rank_list().end(), rank) != b.rank_list().end();
  });
}

}  // namespace

void check_own(const char* where, const std::string& name, const at::Tensor& parameter, const DeviceMesh& mesh) {
  for (const Group& group : claiming_groups(parameter)) {
    if (!must_share(group, mesh)) continue;
    raise<c10::ValueError>({where,
                            c10::str("DistributedDataParallel over ", group->getSize(), " ranks takes ", name,
                                     " for a copy of what other ranks of ", mesh.to_string(),
                                     " have, and these are other experts"),
                            "name the parameters of experts in .ignore, or wrap what ranks share by itself"});
  }
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr || !share(meta->spec->mesh, mesh)) return;
  raise<c10::ValueError>({where,
                          c10::str(name, " is ", meta->spec->to_string(), ": ranks of ", mesh.to_string(),
                                   " share it, and each has experts of its own"),
                          "leave it plain, or cut it over ranks with the same experts: {.mesh = mesh[\"dp\"]}"});
}

}  // namespace serried::detail
