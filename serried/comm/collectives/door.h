// The one door: every collective of the library goes through here, blocking or not, past the same hooks.
#pragma once

#include "serried/comm/collectives/collective.h"
#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/groups/group.h"

namespace serried::detail {

/// Tells observers, then has the group's backend for the tensors' device do it: as it is where the
/// backend takes Collectives, else by c10d's calls. ValueError that lists the group's devices where it serves another
/// one.
void run(const Group& group, const Collective& collective);

/// The same, started only. Waiting for the Work raises what went wrong and may be done again; to drop it is no error.
WorkPtr start(const Group& group, const Collective& collective);

/// The same without telling anybody: for what a collective has to find out first.
void run_quietly(const Group& group, const Collective& collective);
WorkPtr start_quietly(const Group& group, const Collective& collective);

/// A collective by c10d's own calls, for backends that know no others: what they lack is made of what they have.
/// Averages are exact sums divided, complex numbers are added as pairs, pieces of different sizes travel padded, and
/// what a backend cannot name travels as bytes. What is left to do when the backend is done, waiting for the Work does.
WorkPtr start_by_c10d(c10d::Backend& backend, const Collective& collective);

/// Where a call without a tensor works; the CPU where there is no backend, which the collective then says.
at::Device device_of(const Group& group);

/// Whether `run` goes to the group's backend as it is, on the device of `x`.
bool goes_straight(const Group& group, const at::Tensor& x);
/// Whether that backend takes Collective::rows, too.
bool places_rows(const Group& group, const at::Tensor& x);

}  // namespace serried::detail
