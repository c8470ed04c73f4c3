// The passes that every captured function gets, in order.
#include "serried/graph/passes/passes.h"

namespace serried::passes {

std::vector<Pass> defaults() {
  // Buffers exist after freeze, and views of them are hoisted too.
  return {functional_collectives(), drop_dead(), fuse_foreach(), freeze(), hoist_views(), plan_memory()};
}

}  // namespace serried::passes
