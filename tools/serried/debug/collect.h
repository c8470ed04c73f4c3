// A dump of a job that lives: from the memory that its launcher, or each rank, holds open.
#pragma once

#include "serried/launch/options.h"
#include "serried/launch/seen.h"
#include "tools/serried/top/jobs.h"

namespace serried::debug {

/// The ranks of this host, which are not asked and go on, save for the moment in which a tool takes a stack. With
/// `patience` 0 there are no stacks.
launch::HostSeen collect(top::Proc& proc, const top::Job& job, launch::Seconds patience);

}  // namespace serried::debug
