// What ranks tell each other before tokens travel to experts: how many go where, and whether the calls fit.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "serried/mesh/mesh.h"

namespace serried::detail {

/// One rank's view of a call.
struct ExpertCall {
  const char* where;  // for messages
  DeviceMesh mesh;    // one axis
  int64_t num_experts;
  int64_t num_local;  // experts of this rank
  int64_t width;      // features of a token
  at::ScalarType dtype;
  std::optional<int64_t> slots;  // rows that go to each expert, filled or not; none: as many as there are
  bool wants_gradient;           // of the tokens
  bool trains;                   // autograd may record what this rank's experts do
};

/// Rows that travel. Experts lie in order, so those for one rank are one piece.
struct Traffic {
  std::vector<std::vector<int64_t>> arriving;       // by rank and local expert
  std::vector<int64_t> sent_sizes, arriving_sizes;  // by rank
  uint32_t sizes_of_all = 0;                        // watch::hash_sizes of what every rank has said
  // By some rank, and so on every one: backward sends as well, and those that took no part would be waited for.
  bool tokens_need_gradient = false;
  bool results_need_gradient = false;
};

/// One mesh axis that holds this rank; all ranks of the current group where there is none. ValueError otherwise.
DeviceMesh checked_expert_mesh(const char* where, const std::optional<DeviceMesh>& mesh);

/// Every rank calls it: one small all_gather. `counts` has the rows for each expert, unless there are slots; it is read
/// on the host. ValueError on every rank where ranks differ, or where their experts are not all there are.
Traffic agree_on_traffic(const ExpertCall& call, const at::Tensor& counts);

}  // namespace serried::detail
