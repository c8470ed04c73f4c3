// The table of specs: equal content is one object, gone when nobody uses it.
#include "serried/tensor/spec.h"

#include <array>
#include <atomic>
#include <mutex>
#include <unordered_map>

#include "serried/base/hash.h"
#include "serried/comm/collectives/watch.h"

namespace serried {
namespace {

struct Content {
  uint64_t mesh_id;
  const Placements& placements;
  c10::IntArrayRef sizes;
  c10::IntArrayRef strides;
  c10::ScalarType dtype;
};

uint64_t hash_of(const Content& content) {
  uint64_t hash = mix_hash(content.mesh_id, uint64_t(content.dtype));
  for (const Placement& placement : content.placements) hash = mix_hash(hash, placement.bits());
  for (int64_t size : content.sizes) hash = mix_hash(hash, uint64_t(size));
  for (int64_t stride : content.strides) hash = mix_hash(hash, uint64_t(stride));
  return hash;
}

bool is_same(const SpecContent& kept, const Content& content) {
  return kept.mesh_id == content.mesh_id && kept.dtype == content.dtype && kept.placements == content.placements &&
         content.sizes == kept.sizes && content.strides == kept.strides;
}

// Weak references only, so that content nobody uses is forgotten.
class ContentTable {
 public:
  SpecContentPtr find_or_add(const Content& content) {
    const uint64_t hash = hash_of(content);
    std::lock_guard<std::mutex> lock(mutex_);
    const auto range = contents_.equal_range(hash);
    for (auto it = range.first; it != range.second; ++it) {
      const SpecContent* candidate = it->second._unsafe_get_target();
      if (!is_same(*candidate, content)) continue;
      SpecContentPtr found = it->second.lock();
      if (found) return found;  // else its last user is just letting go of it
    }
    auto made = c10::make_intrusive<SpecContent>(content.mesh_id, content.placements, content.sizes, content.strides,
                                                 content.dtype, next_id());
    contents_.emplace(hash, c10::weak_intrusive_ptr<SpecContent>(made));
    return made;
  }

  void remove(const SpecContent& content) {
    const uint64_t hash = hash_of({content.mesh_id, content.placements, content.sizes, content.strides, content.dtype});
    std::lock_guard<std::mutex> lock(mutex_);
    const auto range = contents_.equal_range(hash);
    for (auto it = range.first; it != range.second; ++it) {
      if (it->second._unsafe_get_target() != &content) continue;
      contents_.erase(it);
      return;
    }
  }

 private:
  static uint64_t next_id() {
    static std::atomic<uint64_t> counter{0};
    return ++counter;
  }

  std::mutex mutex_;
  std::unordered_multimap<uint64_t, c10::weak_intrusive_ptr<SpecContent>> contents_;
};

ContentTable& table_of(uint64_t mesh_id) {
  // Ranks that are threads have meshes of their own, so they rarely meet at one lock. Never destroyed: tensors of
  // static storage duration may outlive any order of destruction.
  static auto* tables = new std::array<ContentTable, 16>();
  return (*tables)[mesh_id % tables->size()];
}

}  // namespace

Spec::Spec(DeviceMesh mesh_, SpecContentPtr content_)
    : owned_mesh_(std::move(mesh_)),
      owned_content_(std::move(content_)),
      mesh(owned_mesh_),
      content(owned_content_),
      placements(content->placements),
      sizes(content->sizes),
      strides(content->strides),
      dtype(content->dtype),
      id(content->id) {}

Spec::~Spec() = default;

std::string Spec::to_string() const {
  return watch::dtype_name(dtype) + detail::sizes_text(sizes) + " " + serried::to_string(placements) + " on " +
         mesh.to_string();
}

void Spec::release_resources() {
  const DeviceMesh mesh_dropped = std::move(owned_mesh_);
  owned_content_.reset();
}

SpecContent::SpecContent(uint64_t mesh_id_, Placements placements_, c10::IntArrayRef sizes_, c10::IntArrayRef strides_,
                         c10::ScalarType dtype_, uint64_t id_)
    : mesh_id(mesh_id_), placements(std::move(placements_)), sizes(sizes_), strides(strides_), dtype(dtype_), id(id_) {}

SpecPtr SpecContent::on(const DeviceMesh& mesh) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (SpecPtr alive = spec_.lock()) return alive;
  auto made = c10::make_intrusive<Spec>(mesh, SpecContentPtr::reclaim_copy(this));
  spec_ = c10::weak_intrusive_ptr<Spec>(made);
  return made;
}

void SpecContent::release_resources() {
  table_of(mesh_id).remove(*this);
}

SpecPtr intern_spec(const DeviceMesh& mesh, const Placements& placements, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides, c10::ScalarType dtype) {
  return table_of(mesh.id()).find_or_add({mesh.id(), placements, sizes, strides, dtype})->on(mesh);
}

SpecPtr with_placements(const Spec& spec, const Placements& placements) {
  return intern_spec(spec.mesh, placements, spec.sizes, spec.strides, spec.dtype);
}

}  // namespace serried
