// Runs redistributions on one mesh, and keeps the steps once computed.
#include "serried/tensor/redistribute/redistribute.h"

#include <unordered_map>

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/hash.h>

#include "serried/spmd/cost.h"
#include "serried/spmd/plan.h"

namespace serried {
namespace {

struct Key {
  uint64_t spec;
  uint64_t version;  // of what steps are chosen by
  Placements to;
};

// The same without owning the placements: a look-up allocates nothing.
struct KeyView {
  uint64_t spec;
  uint64_t version;
  const Placements& to;

  KeyView(uint64_t spec_, uint64_t version_, const Placements& to_) : spec(spec_), version(version_), to(to_) {}
  KeyView(const Key& key) : spec(key.spec), version(key.version), to(key.to) {}
};

struct KeyHash {
  using is_transparent = void;
  size_t operator()(const KeyView& key) const {
    size_t hash = c10::hash_combine(key.spec, key.version);
    for (const Placement& p : key.to) hash = c10::hash_combine(hash, p.bits());
    return hash;
  }
};

struct KeyEqual {
  using is_transparent = void;
  bool operator()(const KeyView& a, const KeyView& b) const {
    return a.spec == b.spec && a.version == b.version && a.to == b.to;
  }
};

// Two generations: when the young one is full it becomes the old one, so what is in use survives and references stay
// good for at least kCapacity further look-ups.
class KnownSteps {
 public:
  const std::vector<spmd::Step>& find(const Spec& from, const Placements& to) {
    const KeyView view(from.id, spmd::plans_version(), to);
    const auto young = young_.find(view);
    if (young != young_.end()) return young->second;
    Key key{view.spec, view.version, to};
    auto found = old_.extract(key);
    if (!found.empty()) return insert(std::move(key), std::move(found.mapped()));
    return insert(std::move(key), spmd::redistribution(from.sizes, from.placements, to, from.mesh.shape(),
                                                       spmd::cost_models(from.mesh)));
  }

 private:
  static constexpr size_t kCapacity = 4096;
  using Map = std::unordered_map<Key, std::vector<spmd::Step>, KeyHash, KeyEqual>;

  const std::vector<spmd::Step>& insert(Key key, std::vector<spmd::Step> steps) {
    if (young_.size() >= kCapacity) {
      old_ = std::move(young_);
      young_ = Map();
    }
    return young_.emplace(std::move(key), std::move(steps)).first->second;
  }

  Map young_;
  Map old_;
};

}  // namespace

const std::vector<spmd::Step>& redistribution(const Spec& from, const Placements& to) {
  thread_local KnownSteps known;
  return known.find(from, to);
}

at::Tensor run_steps(const at::Tensor& local, const Spec& from, const std::vector<spmd::Step>& steps) {
  if (steps.empty()) return local;
  // No gradients here: whoever calls records them for the redistribution as a whole.
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor part = detail::run_step(local, /*owned=*/false, from, steps.front());
  for (size_t i = 1; i < steps.size(); ++i) part = detail::run_step(part, /*owned=*/true, from, steps[i]);
  return part;
}

StartedRedistribution start_redistribution(const at::Tensor& local, const SpecPtr& from, const Placements& to) {
  const std::vector<spmd::Step>& steps = redistribution(*from, to);
  size_t last = steps.size();  // that communicates
  while (last > 0 && !spmd::communicates(steps[last - 1])) --last;
  if (last == 0 || local.is_meta()) {
    const at::Tensor part = run_steps(local, *from, steps);
    return {part, {}, [part] { return part; }};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor part = local;
  for (size_t i = 0; i + 1 < last; ++i) part = detail::run_step(part, /*owned=*/i > 0, *from, steps[i]);
  detail::StartedStep started;
  part = detail::run_step(part, /*owned=*/last > 1, *from, steps[last - 1], &started);
  const std::vector<spmd::Step> cuts(steps.begin() + int64_t(last), steps.end());
  return {part, started.work, [part, from, cuts, after = std::move(started.after)] {
            const at::AutoDispatchBelowADInplaceOrView as_above;
            if (after) after();
            at::Tensor cut = part;
            for (const spmd::Step& step : cuts) cut = detail::run_step(cut, /*owned=*/true, *from, step);
            return cut;
          }};
}

at::Tensor redistribute_local(const at::Tensor& local, const Spec& from, const Placements& to) {
  return run_steps(local, from, redistribution(from, to));
}

}  // namespace serried
