// The cost model: latency per collective plus bytes over bandwidth, by kind of move.
#include "serried/spmd/cost.h"

#include <limits>
#include <map>
#include <mutex>

#include "serried/spmd/plan.h"

namespace serried::spmd {
namespace {

struct Models {
  std::mutex mutex;
  CostModel of_all;
  std::map<std::string, CostModel> of_backend;
};

Models& models() {
  static Models instance;
  return instance;
}

// The change first: who sees the new version must plan by the new model.
template <class Change>
void change_models(const Change& change) {
  {
    const std::lock_guard lock(models().mutex);
    change(models());
  }
  make_plans_stale();
}

bool is_impossible(const Placement& from, const Placement& to) {
  return to.is_partial() && !from.is_replicate() && !(from == to);
}

}  // namespace

CostModel cost_model() {
  const std::lock_guard lock(models().mutex);
  return models().of_all;
}

CostModel cost_model(const std::string& backend) {
  const std::lock_guard lock(models().mutex);
  const auto own = models().of_backend.find(backend);
  return own == models().of_backend.end() ? models().of_all : own->second;
}

std::vector<CostModel> cost_models(const DeviceMesh& mesh) {
  std::vector<CostModel> of_axes;
  for (int64_t axis = 0; axis < mesh.ndim(); ++axis) of_axes.push_back(cost_model(mesh.backend(axis)));
  return of_axes;
}

void set_cost_model(const CostModel& model) {
  change_models([&](Models& all) { all.of_all = model; });
}

void set_cost_model(const std::string& backend, const CostModel& model) {
  change_models([&](Models& all) { all.of_backend.insert_or_assign(backend, model); });
}

void reset_cost_model(const std::string& backend) {
  change_models([&](Models& all) { all.of_backend.erase(backend); });
}

int64_t bytes_sent(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks) {
  if (from == to || ranks <= 1 || from.is_replicate() || is_impossible(from, to)) return 0;
  const double others = double(ranks - 1) / double(ranks);
  if (from.is_partial() && to.is_replicate()) return int64_t(2.0 * double(bytes) * others);
  if (from.is_shard() && to.is_shard()) return int64_t(double(bytes) / double(ranks) * others);
  return int64_t(double(bytes) * others);
}

double move_cost(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks, const CostModel& model) {
  if (from == to || ranks <= 1) return 0;
  if (is_impossible(from, to)) return std::numeric_limits<double>::infinity();
  if (from.is_replicate()) {
    const double copied = to.is_shard() ? double(bytes) / double(ranks) : double(bytes);
    return model.copy_latency + copied / model.copy_bandwidth;
  }
  return model.latency + double(bytes_sent(from, to, bytes, ranks)) / model.bandwidth;
}

}  // namespace serried::spmd
