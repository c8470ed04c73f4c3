// Running random programs: how many, from which seed, and how a failure is repeated.
#pragma once

#include <cstdint>
#include <functional>

namespace serried::testing {

/// Calls `program` with one seed after another until it fails: `count` of them as a test, as many as fit into
/// SERRIED_SOAK_MINUTES where that is set. Seeds follow SERRIED_SEED, where it is set, and are the same in every run
/// where it is not. Prints the first seed and the number of programs; a failure says how to run that program alone.
///     TEST(RandomCollectives, EqualPlainSums) { for_random_programs(200, [](uint64_t seed) { ... EXPECT_... }); }
void for_random_programs(int64_t count, const std::function<void(uint64_t seed)>& program);

}  // namespace serried::testing
