// Finds plans by (op, specs, static arguments); one cache per thread, bounded.
#include "serried/tensor/dispatch/cached_plan.h"
#include "serried/tensor/dispatch/dispatch.h"

#include <cstring>
#include <unordered_map>

#include "serried/base/log.h"
#include "serried/tensor/debug/comm_notes.h"

namespace serried {
namespace detail {
namespace {

// Programs with ever new shapes must not grow for ever; a full cache is simply begun anew.
constexpr size_t kMaxPlans = 1 << 16;

struct Entry {
  std::vector<uint64_t> key;
  std::unique_ptr<CachedPlan> plan;
};

struct Cache {
  std::unordered_multimap<uint64_t, Entry> plans;
  uint64_t version = spmd::plans_version();
  DispatchStats stats;
};

Cache& cache() {
  static thread_local Cache instance;
  return instance;
}

// A user's rule or a cost model may have come from another thread.
void drop_stale_plans() {
  const uint64_t version = spmd::plans_version();
  if (C10_LIKELY(cache().version == version)) return;
  clear_dispatch_cache();
  cache().version = version;
}

const CachedPlan* find(const OpInfo& info, const Arguments& arguments) {
  auto [entry, end] = cache().plans.equal_range(arguments.hash);
  for (; entry != end; ++entry) {
    const auto& key = entry->second.key;
    if (key.size() == arguments.key.size() + 1 && key.back() == reinterpret_cast<uintptr_t>(&info) &&
        std::equal(arguments.key.begin(), arguments.key.end(), key.begin())) {
      return entry->second.plan.get();
    }
  }
  return nullptr;
}

const CachedPlan* keep(const OpInfo& info, const Arguments& arguments, std::unique_ptr<CachedPlan> plan) {
  if (cache().plans.size() >= kMaxPlans) clear_dispatch_cache();
  Entry entry{{arguments.key.begin(), arguments.key.end()}, std::move(plan)};
  entry.key.push_back(reinterpret_cast<uintptr_t>(&info));
  const CachedPlan* kept = entry.plan.get();
  cache().plans.emplace(arguments.hash, std::move(entry));
  return kept;
}

void note_default(const OpInfo& info) {
  ++cache().stats.defaults;
  comm_debug::note_default(info.name);
  if (!log::enabled(log::Topic::dispatch)) return;
  static thread_local std::unordered_map<const void*, bool> said;
  if (said.emplace(info.schema, true).second) {
    log::line(log::Topic::dispatch, info.name, " has no sharding rule: inputs are replicated");
  }
}

const CachedPlan& counted(const OpInfo& info, const CachedPlan& plan) {
  if (plan.is_default) note_default(info);
  return plan;
}

}  // namespace

const CachedPlan& plan_for(OpInfo& info, const Arguments& arguments, const torch::jit::Stack& stack,
                           std::unique_ptr<CachedPlan>& uncached) {
  drop_stale_plans();
  DispatchStats& stats = cache().stats;
  // 64 bits of hash: two keys of one op that collide are less likely than a broken memory bit.
  if (info.last_plan != nullptr && info.last_hash == arguments.hash && arguments.cacheable) {
    ++stats.hits;
    return counted(info, *info.last_plan);
  }
  const CachedPlan* found = arguments.cacheable ? find(info, arguments) : nullptr;
  if (found == nullptr) {
    ++stats.misses;
    const c10::ArrayRef<c10::IValue> values(stack.data() + stack.size() - info.num_arguments, info.num_arguments);
    std::unique_ptr<CachedPlan> made = build_plan(info, arguments, values);
    if (!arguments.cacheable) {
      uncached = std::move(made);
      return counted(info, *uncached);
    }
    found = keep(info, arguments, std::move(made));
  } else {
    ++stats.hits;
  }
  info.last_hash = arguments.hash;
  info.last_plan = found;
  return counted(info, *found);
}

const CachedPlan* find_fast_plan(OpInfo& info, const Arguments& arguments) {
  if (!arguments.cacheable) return nullptr;
  drop_stale_plans();
  if (info.last_plan == nullptr || info.last_hash != arguments.hash) {
    const CachedPlan* found = find(info, arguments);
    if (found == nullptr) return nullptr;
    info.last_hash = arguments.hash;
    info.last_plan = found;
  }
  if (!info.last_plan->is_fast || info.last_plan->is_default) return nullptr;
  ++cache().stats.hits;
  return info.last_plan;
}

}  // namespace detail

DispatchStats dispatch_stats() {
  return detail::cache().stats;
}

void reset_dispatch_stats() {
  detail::cache().stats = {};
}

void clear_dispatch_cache() {
  detail::forget_last_plans();
  detail::cache().plans.clear();
}

}  // namespace serried
