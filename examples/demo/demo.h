// What the parts of the demo share.
#pragma once

#include <serried/serried.h>

#include <functional>
#include <string>
#include <vector>

namespace demo {

using serried::Group;

/// One collective to try. `passes` is true where this rank saw the values it should.
struct Check {
  std::string name;
  std::string what;
  std::function<bool(const Group&)> passes;
};

/// serried's own: functional with gradients, in place, point to point.
std::vector<Check> serried_checks();

/// What every c10d::ProcessGroup has: lists, coalesced, sparse, asynchronous.
std::vector<Check> c10d_checks();

/// Rank 0 prints how long both take, one row as soon as it is measured.
void print_bandwidths(const Group& world, const Group& gloo);

/// What `rank` brings to a collective; every rank can make everybody's, and so the expected values, without a message.
at::Tensor sample(int rank, at::IntArrayRef sizes);

/// The sum of all ranks' samples, added up here.
at::Tensor sum_of_samples(int num_ranks, at::IntArrayRef sizes);

/// Rank `rank`'s piece of `x` along dim 0: ceil(size / num_ranks) rows, fewer or none for the last ranks.
at::Tensor shard(const at::Tensor& x, int rank, int num_ranks);

}  // namespace demo
