// from_local's run_check: what every rank of the mesh holds, compared.
#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tape/tape.h"
#include "serried/tensor/making/from_local.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/text.h"

namespace serried::detail {
namespace {

constexpr int64_t kMaxDims = 64;  // LibTorch's own limit

struct RankPart {
  c10::ScalarType dtype;
  bool requires_grad;
  c10::DimVector sizes;

  std::string to_string() const { return watch::dtype_name(dtype) + sizes_text(sizes); }
};

std::vector<RankPart> parts_of_all(const at::Tensor& local, const DeviceMesh& mesh) {
  const tape::Pause only_checks;
  at::Tensor mine = at::zeros({1, 3 + kMaxDims}, at::kLong);
  int64_t* row = mine.data_ptr<int64_t>();
  row[0] = int64_t(local.scalar_type());
  row[1] = local.requires_grad() ? 1 : 0;
  row[2] = local.dim();
  std::copy(local.sizes().begin(), local.sizes().end(), row + 3);
  const at::Tensor all = all_gather(mine, whole_group(mesh));
  std::vector<RankPart> parts;
  for (int64_t i = 0; i < mesh.size(); ++i) {
    const int64_t* r = all.data_ptr<int64_t>() + i * (3 + kMaxDims);
    parts.push_back({c10::ScalarType(r[0]), r[1] != 0, c10::DimVector(r + 3, r + 3 + r[2])});
  }
  return parts;
}

std::string rank_text(const DeviceMesh& mesh, size_t index) {
  return "rank " + std::to_string(mesh.rank_list()[index]);
}

void check_alike(std::string_view where, const std::vector<RankPart>& parts, const DeviceMesh& mesh) {
  for (size_t i = 1; i < parts.size(); ++i) {
    const RankPart& first = parts[0];
    const RankPart& other = parts[i];
    if (other.dtype != first.dtype || other.sizes.size() != first.sizes.size()) {
      raise<c10::ValueError>({where,
                              c10::str("the parts differ: ", rank_text(mesh, 0), " has ", first.to_string(), ", ",
                                       rank_text(mesh, i), " has ", other.to_string()),
                              "pass the same dtype and number of dims on every rank"});
    }
    if (other.requires_grad == first.requires_grad) continue;
    raise<c10::ValueError>(
        {where,
         c10::str("requires_grad differs: ", first.requires_grad ? "true" : "false", " on ", rank_text(mesh, 0), ", ",
                  other.requires_grad ? "true" : "false", " on ", rank_text(mesh, i)),
         "set it alike on every rank"});
  }
}

// The whole dim: what the ranks hold that differ in the axes that cut it only.
int64_t added_size(const std::vector<RankPart>& parts, const DeviceMesh& mesh, const Placements& placements,
                   int64_t dim) {
  int64_t total = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const c10::DimVector coordinate = coordinate_of(int64_t(i), mesh.shape());
    bool counts = true;
    for (size_t axis = 0; axis < placements.size(); ++axis) {
      counts = counts && (placements[axis].is_shard(dim) || coordinate[axis] == 0);
    }
    if (counts) total += parts[i].sizes[size_t(dim)];
  }
  return total;
}

}  // namespace

c10::DimVector agreed_sizes(std::string_view where, const at::Tensor& local, const DeviceMesh& mesh,
                            const Placements& placements, const std::optional<Sizes>& given) {
  const std::vector<RankPart> parts = parts_of_all(local, mesh);
  check_alike(where, parts, mesh);
  c10::DimVector sizes;
  if (given.has_value()) {
    sizes.assign(given->begin(), given->end());
  } else {
    for (int64_t dim = 0; dim < local.dim(); ++dim) sizes.push_back(added_size(parts, mesh, placements, dim));
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const c10::DimVector coordinate = coordinate_of(int64_t(i), mesh.shape());
    const c10::DimVector expected =
        sizes.size() == parts[i].sizes.size() ? local_sizes(sizes, placements, {mesh.shape(), coordinate}) : sizes;
    if (parts[i].sizes == expected) continue;
    raise<c10::ValueError>({where,
                            c10::str("the parts do not make \"", to_string(placements), "\" of ", sizes_text(sizes),
                                     " on ", mesh.to_string(), ": ", rank_text(mesh, i), " has ",
                                     sizes_text(parts[i].sizes), " where ", sizes_text(expected), " is due"),
                            "cut the parts like Shard: ceil(size / ranks) each, the last ranks less or nothing"});
  }
  return sizes;
}

}  // namespace serried::detail
