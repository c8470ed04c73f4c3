// How the asynchronous calls make their Pendings.
#pragma once

#include "serried/comm/collectives/async.h"
#include "serried/comm/collectives/collective.h"

#include <functional>
#include <tuple>
#include <vector>

namespace serried::detail {

/// What an op has started: the result, and the Work to wait for before it is used; none where it is there already.
using StartedOp = std::tuple<at::Tensor, WorkPtr>;

/// A tensor that a collective reads while it is on its way.
struct Sent {
  const char* where = "";
  at::Tensor x = {};
};

/// `writes`: the call that writes into a tensor of the user's, which is the result.
Pending pending(StartedOp started, Sent sent = {}, const char* writes = nullptr);

/// A collective that can only start when ranks know what each of them sends: by the time of the group's next call, or
/// of the first wait. So all ranks start it at the same place among the calls of the group, whoever waits when.
Pending pending_after(const char* where, const at::Tensor& x, const Group& group, std::function<bool()> is_known,
                      std::function<StartedOp()> start);

/// Several tensors that arrive as one, which `cut` takes apart once.
PendingTensors pending_parts(Pending whole, std::function<std::vector<at::Tensor>(const at::Tensor&)> cut);

/// Starts what waits for its place among the calls of `group`.
void start_what_is_due(const Group& group);

}  // namespace serried::detail
