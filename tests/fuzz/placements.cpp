// Placements: one text for each list of them, both ways.
#include "tests/fuzz/target.h"

#include <c10/util/Exception.h>

#include "serried/mesh/placement.h"

namespace serried::fuzz {

void run_placements(std::string_view bytes) {
  Placements placements;
  if (!succeeds<c10::ValueError>([&] { placements = parse_placements(bytes); })) return;
  require(to_string(placements) == bytes, "two texts for one list of placements");
  for (int64_t tensor_ndim = 0; tensor_ndim < 4; ++tensor_ndim) {
    Placements checked;
    const auto check = [&] {
      checked = checked_placements("fuzz", placements, tensor_ndim, int64_t(placements.size()));
    };
    bool valid = false;
    if (!succeeds<c10::IndexError>([&] { valid = succeeds<c10::ValueError>(check); }) || !valid) continue;
    for (const Placement& placement : checked) {
      if (!placement.is_shard()) continue;
      require(placement.dim() >= 0 && placement.dim() < tensor_ndim, "a dim that the tensor does not have");
    }
    require(parse_placements(to_string(checked)) == checked, "checked placements that do not come back from text");
  }
}

}  // namespace serried::fuzz
