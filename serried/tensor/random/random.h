// Seeds and generators of DTensors: one stream per rank, equal on all ranks of a mesh.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>
#include <optional>

#include "serried/mesh/mesh.h"

namespace serried {

/// Seeds this rank's generator; every rank of the mesh calls it with the same seed. Communicates nothing. ValueError on
/// a rank outside the mesh. Where ranks are processes it is torch::manual_seed, where they are threads each has a
/// generator of its own.
///     manual_seed(7, mesh);
///     randn({8, 4}, mesh, {Shard(0)});  // what torch::randn({8, 4}) gives after torch::manual_seed(7)
void manual_seed(uint64_t seed, const DeviceMesh& mesh);

/// What DTensors of this rank draw from: torch's default generator, or that of this rank thread, which begins as a copy
/// of torch's default one.
at::Generator rank_generator();

/// A seed for one stage of a pipeline: stages differ, ranks of one stage agree. Stage 0 keeps `seed`.
///     manual_seed(seed_for(7, stage), mesh["tp"]);
uint64_t seed_for(uint64_t seed, int64_t stage);

/// The generator of an op over `mesh`: `given`, else this rank's. The first use on a mesh since the last seeding
/// compares the ranks' generators (one all-reduce of 16 bytes); ValueError that names the ranks that differ.
at::Generator generator_for(const std::optional<at::Generator>& given, const DeviceMesh& mesh);

namespace detail {

/// Somebody has given `generator` another state, on this rank and perhaps on others: where it is this rank's, the next
/// use on each mesh compares anew.
void note_new_state(const at::Generator& generator);

}  // namespace detail

}  // namespace serried
