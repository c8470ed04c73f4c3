// How a DTensor reads.
#include <ATen/ATen.h>

#include <ostream>

#include "serried/tensor/dtensor.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/text.h"

namespace serried {

std::ostream& operator<<(std::ostream& out, const DTensor& t) {
  const DTensorMeta* meta = dtensor_meta(t);
  if (meta == nullptr) return out << "DTensor (undefined)";
  out << "DTensor " << meta->spec->to_string();
  if (!meta->spec->mesh.contains_this_rank()) return out << ", no part on this rank";
  return out << ", local " << detail::sizes_text(meta->local.sizes()) << " =\n" << meta->local;
}

}  // namespace serried
