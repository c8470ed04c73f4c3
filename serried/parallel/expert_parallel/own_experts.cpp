// Asks who else has a parameter: wrappers by their groups, DTensors by their mesh.
#include "serried/parallel/expert_parallel/own_experts.h"

#include <c10/util/StringUtil.h>

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

}  // namespace

void check_not_averaged(const char* where, const std::string& name, const at::Tensor& parameter,
                        const DeviceMesh& mesh) {
  for (const Group& group : claiming_groups(parameter)) {
    if (!must_share(group, mesh)) continue;
    raise<c10::ValueError>(
        {where,
         c10::str("DistributedDataParallel over ", group->getSize(), " ranks takes ", name,
                  " for a copy of what other ranks of ", mesh.to_string(), " have, and these are other experts"),
         "name the parameters of experts in .ignore, or wrap what ranks share by itself"});
  }
}

void check_own(const char* where, const std::string& name, const at::Tensor& parameter, const DeviceMesh& mesh) {
  check_not_averaged(where, name, parameter, mesh);
  const DTensorMeta* meta = dtensor_meta(parameter);
  if (meta == nullptr || !share_other_ranks(meta->spec->mesh, mesh)) return;
  raise<c10::ValueError>(
      {where,
       c10::str(name, " is ", meta->spec->to_string(), ": ranks of ", mesh.to_string(),
                " share it, and each has experts of its own"),
       "leave it plain, or cut it over ranks with the same experts: {.mesh = mesh[\"dp\"]}; weights of all experts "
       "in one tensor are cut over ranks of experts by distribute_parameter(weight, mesh[\"ep\"], "
       "{Shard(0)})"});
}

}  // namespace serried::detail
