// What a DTensor is apart from its data: mesh, placements, global sizes, strides and dtype; interned.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/intrusive_ptr.h>

#include "serried/mesh/mesh.h"

namespace serried {

/// Immutable and shared: equal specs are the same object, so that comparing and hashing is a number.
struct Spec final : c10::intrusive_ptr_target {
  Spec(DeviceMesh mesh_, Placements placements_, c10::IntArrayRef sizes_, c10::IntArrayRef strides_,
       c10::ScalarType dtype_, uint64_t id_)
      : mesh(std::move(mesh_)),
        placements(std::move(placements_)),
        sizes(sizes_),
        strides(strides_),
        dtype(dtype_),
        id(id_) {}

  const DeviceMesh mesh;
  const Placements placements;
  const c10::DimVector sizes;
  const c10::DimVector strides;
  const c10::ScalarType dtype;
  const uint64_t id;  // never used twice in a process

  c10::DimVector local_sizes() const { return serried::local_sizes(sizes, placements, mesh.position()); }
  /// "f32[8,4] S0 R on mesh dp=2 tp=2"
  std::string to_string() const;

  /// Takes itself out of the table when the last user lets go; only c10 calls it.
  void release_resources() override;
};
using SpecPtr = c10::intrusive_ptr<Spec>;

/// The one spec of this content. Thread-safe. The table does not keep specs alive: a cache that is keyed by ids holds
/// the SpecPtrs too, else content that comes again gets a new id.
SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides, c10::ScalarType dtype);

/// The same tensor placed otherwise.
SpecPtr with_placements(const Spec& spec, const Placements& placements);

}  // namespace serried
