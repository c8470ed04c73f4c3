// Compares where generators stand.
#include "serried/graph/record/generator_watch.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "serried/comm/groups/live_groups.h"

namespace serried::graph {
namespace {

// Those of a thread's recordings so far: the next one has to know where they stand when its call begins.
std::vector<c10::weak_intrusive_ptr<c10::GeneratorImpl>>& generators_of_thread() {
  static thread_local std::vector<c10::weak_intrusive_ptr<c10::GeneratorImpl>> generators;
  std::erase_if(generators, [](const auto& generator) { return generator.expired(); });
  return generators;
}

bool is_default(const at::Generator& generator) {
  return generator == at::detail::getDefaultCPUGenerator();
}

GeneratorPlace place_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  auto& impl = *generator.get<at::CPUGeneratorImpl>();
  const at::mt19937_data_pod data = impl.engine().data();
  return {data.seed_,
          data.left_,
          data.next_,
          data.state_[0],
          impl.next_float_normal_sample(),
          impl.next_double_normal_sample()};
}

}  // namespace

GeneratorWatch::GeneratorWatch() {
  note(at::detail::getDefaultCPUGenerator());
  for (const auto& weak : generators_of_thread()) {
    const at::Generator generator(weak.lock());
    known_[generator.unsafeGetGeneratorImpl()] = {generator, place_of(generator)};
  }
}

std::string GeneratorWatch::change_of(const at::Generator& generator) const {
  const auto known = known_.find(generator.unsafeGetGeneratorImpl());
  if (known == known_.end()) return "";
  const GeneratorPlace& before = known->second.place;
  const GeneratorPlace now = place_of(generator);
  if (now == before) return "";
  if (now.seed != before.seed || now.is_seeded()) return c10::str("was seeded with ", now.seed);
  return is_default(generator) ? "" : "was drawn from without an op";
}

std::string GeneratorWatch::any_change() const {
  for (const auto& [impl, known] : known_) {
    const std::string change = change_of(known.generator);
    if (!change.empty()) return change;
  }
  return "";
}

void GeneratorWatch::note(const at::Generator& generator) {
  if (!generator.device().is_cpu() || (is_default(generator) && detail::live_groups_of_thread())) return;
  const bool is_new = !known_.contains(generator.unsafeGetGeneratorImpl());
  known_[generator.unsafeGetGeneratorImpl()] = {generator, place_of(generator)};
  if (is_new && !is_default(generator)) generators_of_thread().emplace_back(generator.getIntrusivePtr());
}

}  // namespace serried::graph
