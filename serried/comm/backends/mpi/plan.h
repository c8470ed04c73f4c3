// From a collective to the rounds of MPI that carry it out.
#pragma once

#include "serried/comm/backends/mpi/work.h"
#include "serried/comm/collectives/collective.h"

#include <vector>

namespace serried::mpi {

/// ValueError where the reduction has no meaning for the dtype. Says nothing to anybody.
Plan plan_of(const detail::Collective& collective, int rank, int size);

/// Several plans without checks as one call: the rounds of all are under way together.
Plan joined(std::vector<Plan> plans);

/// The round before a collective of ranks that share no memory: all gather what all of them call, and where that
/// differs every rank fails the group with the same words. `before` is the call before, where there is one.
Step compare_step(const watch::Record& record, const watch::Record& before, int size);

}  // namespace serried::mpi
