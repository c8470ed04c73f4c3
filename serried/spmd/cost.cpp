// The cost model: latency per collective plus bytes over bandwidth, by kind of move.
#include "serried/spmd/cost.h"

#include <atomic>
#include <deque>
#include <limits>
#include <mutex>

namespace serried::spmd {
namespace {

// Models are kept for ever, so that a reference handed out stays good while another thread sets a new one.
struct Models {
  std::mutex mutex;
  std::deque<CostModel> all{CostModel{}};
  std::atomic<const CostModel*> current{&all.front()};
};

Models& models() {
  static Models instance;
  return instance;
}

bool is_impossible(const Placement& from, const Placement& to) {
  return to.is_partial() && !from.is_replicate() && !(from == to);
}

}  // namespace

const CostModel& cost_model() {
  return *models().current.load(std::memory_order_acquire);
}

void set_cost_model(const CostModel& model) {
  Models& kept = models();
  const std::lock_guard<std::mutex> lock(kept.mutex);
  kept.all.push_back(model);
  kept.current.store(&kept.all.back(), std::memory_order_release);
}

int64_t bytes_sent(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks) {
  if (from == to || ranks <= 1 || from.is_replicate() || is_impossible(from, to)) return 0;
  const double others = double(ranks - 1) / double(ranks);
  if (from.is_partial() && to.is_replicate()) return int64_t(2.0 * double(bytes) * others);
  if (from.is_shard() && to.is_shard()) return int64_t(double(bytes) / double(ranks) * others);
  return int64_t(double(bytes) * others);
}

double move_cost(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks) {
  if (from == to || ranks <= 1) return 0;
  if (is_impossible(from, to)) return std::numeric_limits<double>::infinity();
  const CostModel& model = cost_model();
  if (from.is_replicate()) {
    const double copied = to.is_shard() ? double(bytes) / double(ranks) : double(bytes);
    return model.copy_latency + copied / model.copy_bandwidth;
  }
  return model.latency + double(bytes_sent(from, to, bytes, ranks)) / model.bandwidth;
}

}  // namespace serried::spmd
