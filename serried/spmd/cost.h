// What moving a tensor from one placement to another costs on one mesh axis, by a simple replaceable model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "serried/mesh/mesh.h"

namespace serried::spmd {

/// Microseconds of latency per collective and bytes per microsecond; measured on shared memory, only ratios matter.
struct CostModel {
  double latency = 2.0;
  double bandwidth = 4000.0;        // bytes per microsecond through a collective
  double copy_bandwidth = 10000.0;  // of a local slice or fill
  double copy_latency = 0.2;
};

/// Of mesh axes whose backend has no model of its own.
CostModel cost_model();
/// Of mesh axes whose groups are of `backend`: its own, else `cost_model()`.
CostModel cost_model(const std::string& backend);
/// One per axis of `mesh`, by the backend of its group. Makes no group.
std::vector<CostModel> cost_models(const DeviceMesh& mesh);

/// Replaces the model of all backends, or of one. Plans that any thread made by the old one are made anew. Ranks that
/// are processes must set the same: they plan by themselves.
///     spmd::set_cost_model("gloo", {.latency = 50, .bandwidth = 1000});
void set_cost_model(const CostModel& model);
void set_cost_model(const std::string& backend, const CostModel& model);
/// Gives `backend` back to `cost_model()`.
void reset_cost_model(const std::string& backend);

/// Bytes this rank sends when `bytes` (the whole tensor as it lies on the other axes) goes from `from` to `to` over
/// `ranks` ranks.
int64_t bytes_sent(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks);

/// Microseconds for it; infinity where there is no way (Shard to Partial, one Partial to another).
double move_cost(const Placement& from, const Placement& to, int64_t bytes, int64_t ranks,
                 const CostModel& model = cost_model());

}  // namespace serried::spmd
