// A collective by c10d's own calls, for backends that know no others: what they lack is made of what they have.
#pragma once

#include "serried/comm/collectives/collective.h"

namespace serried::detail {

/// Averages are exact sums divided, complex numbers are added as pairs, pieces of different sizes travel padded, and
/// what a backend cannot name travels as bytes. What is left to do when the backend is done, waiting for the Work does.
WorkPtr start_by_c10d(c10d::Backend& backend, const Collective& collective);

}  // namespace serried::detail
