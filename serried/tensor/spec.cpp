// The table of specs: equal content is one object, gone when nobody uses it.
#include "serried/tensor/spec.h"

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "serried/base/hash.h"
#include "serried/comm/watch.h"
#include "serried/tensor/detail/text.h"

namespace serried {
namespace {

struct Content {
  const DeviceMesh& mesh;
  const Placements& placements;
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  c10::ScalarType dtype;
};

uint64_t hash_of(const Content& content) {
  uint64_t hash = mix_hash(content.mesh.id(), uint64_t(content.dtype));
  for (const Placement& placement : content.placements) hash = mix_hash(hash, placement.bits());
  for (int64_t size : content.sizes) hash = mix_hash(hash, uint64_t(size));
  for (int64_t stride : content.strides) hash = mix_hash(hash, uint64_t(stride));
  return hash;
}

bool is_same(const Spec& spec, const Content& content) {
  return spec.mesh.id() == content.mesh.id() && spec.dtype == content.dtype && spec.placements == content.placements &&
         content.sizes == spec.sizes && content.strides == spec.strides;
}

// Weak references only, so that a mesh and its groups do not outlive their tensors.
class SpecTable {
 public:
  SpecPtr find_or_add(const Content& content) {
    const uint64_t hash = hash_of(content);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto range = specs_.equal_range(hash);
    for (auto it = range.first; it != range.second; ++it) {
      const Spec* candidate = it->second._unsafe_get_target();
      if (!is_same(*candidate, content)) continue;
      SpecPtr found = it->second.lock();
      if (found) return found;  // else its last user is just letting go of it
    }
    auto made = c10::make_intrusive<Spec>(content.mesh, content.placements, content.sizes, content.strides,
                                          content.dtype, next_id());
    specs_.emplace(hash, c10::weak_intrusive_ptr<Spec>(made));
    return made;
  }

  void remove(const Spec& spec) {
    const uint64_t hash = hash_of({spec.mesh, spec.placements, spec.sizes, spec.strides, spec.dtype});
    std::lock_guard<std::mutex> lock(mutex_);
    const auto range = specs_.equal_range(hash);
    for (auto it = range.first; it != range.second; ++it) {
      if (it->second._unsafe_get_target() != &spec) continue;
      specs_.erase(it);
      return;
    }
  }

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> counter{0};
    return ++counter;
  }

  std::mutex mutex_;
  std::unordered_multimap<uint64_t, c10::weak_intrusive_ptr<Spec>> specs_;
};

SpecTable& table_of(const DeviceMesh& mesh) {
  // Ranks that are threads have meshes of their own, so they rarely meet at one lock. Never destroyed: tensors of
  // static storage duration may outlive any order of destruction.
  static auto* tables = new std::array<SpecTable, 16>();
  return (*tables)[mesh.id() % tables->size()];
}

}  // namespace

std::string Spec::to_string() const {
  return watch::dtype_name(dtype) + detail::sizes_text(sizes) + " " + serried::to_string(placements) + " on " +
         mesh.to_string();
}

void Spec::release_resources() {
  table_of(mesh).remove(*this);
}

SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides, c10::ScalarType dtype) {
  return table_of(mesh).find_or_add({mesh, placements, sizes, strides, dtype});
}

SpecPtr with_placements(const Spec& spec, const Placements& placements) {
  return intern_spec(spec.mesh, placements, spec.sizes, spec.strides, spec.dtype);
}

}  // namespace serried
