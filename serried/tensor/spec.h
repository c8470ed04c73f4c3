// What a DTensor is apart from its data: mesh, placements, global sizes, strides and dtype; interned.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include <mutex>
#include <string>

#include "serried/mesh/mesh.h"

namespace serried {

struct SpecContent;
using SpecContentPtr = c10::intrusive_ptr<SpecContent>;

/// Immutable and shared: of equal specs only one is alive, and their ids are equal at all times, so that comparing and
/// hashing is a number. Owns its mesh, and with it the groups.
struct Spec final : c10::intrusive_ptr_target {
  Spec(DeviceMesh mesh_, SpecContentPtr content_);
  ~Spec() override;

 private:
  DeviceMesh owned_mesh_;
  SpecContentPtr owned_content_;

 public:
  const DeviceMesh& mesh;
  const SpecContentPtr& content;
  const Placements& placements;
  const c10::DimVector& sizes;
  const c10::DimVector& strides;
  const c10::ScalarType dtype;
  const uint64_t id;  // never used twice in a process

  c10::DimVector local_sizes() const { return serried::local_sizes(sizes, placements, mesh.position()); }
  /// "f32[8,4] S0 R on mesh dp=2 tp=2"
  std::string to_string() const;

  /// Lets go of what it owns with its last user, whoever still watches it; only c10 calls it.
  void release_resources() override;
};
using SpecPtr = c10::intrusive_ptr<Spec>;

/// What a spec says, with its mesh as a number: what caches hold, which live longer than meshes and must not keep their
/// groups. While it is alive its specs come and go under one id.
struct SpecContent final : c10::intrusive_ptr_target {
  SpecContent(uint64_t mesh_id_, Placements placements_, c10::IntArrayRef sizes_, c10::IntArrayRef strides_,
              c10::ScalarType dtype_, uint64_t id_);

  const uint64_t mesh_id;
  const Placements placements;
  const c10::DimVector sizes;
  const c10::DimVector strides;
  const c10::ScalarType dtype;
  const uint64_t id;

  /// The spec of this content on `mesh`, whose id is `mesh_id`. Thread-safe.
  SpecPtr on(const DeviceMesh& mesh);

  /// Takes itself out of the table when the last user lets go; only c10 calls it.
  void release_resources() override;

 private:
  std::mutex mutex_;
  c10::weak_intrusive_ptr<Spec> spec_{SpecPtr()};
};

/// The one spec of this content. Thread-safe. The table keeps nothing alive: a cache that is keyed by ids holds the
/// contents, else content that comes again gets a new id.
SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides, c10::ScalarType dtype);

/// The same tensor placed otherwise.
SpecPtr with_placements(const Spec& spec, const Placements& placements);

namespace detail {

/// "[8,4]"
inline std::string sizes_text(c10::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace detail

}  // namespace serried
