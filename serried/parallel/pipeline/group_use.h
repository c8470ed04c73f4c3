// What the pipelines of this rank have done with a group: their messages share its streams.
#pragma once

#include <cstdint>
#include <string>

#include "serried/comm/groups/group.h"

namespace serried::detail {

/// The how-many-th pipeline on the group the next one is, from 1: all ranks make them in the same order.
int64_t count_pipeline(const Group& group);

/// A step has failed: messages of it may be left in the group.
void note_failed_step(const Group& group, const std::string& where);

/// Where one has; empty if none has.
std::string failed_step_on(const Group& group);

}  // namespace serried::detail
