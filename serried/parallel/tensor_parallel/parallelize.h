// parallelize_module: a plan of patterns and styles, applied to a stock torch::nn module.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <utility>
#include <vector>

#include "serried/parallel/tensor_parallel/styles.h"

namespace serried {

/// Patterns of module paths with the style of what they match. Each name of a path is matched by itself, with the
/// wildcards of a shell: "blocks.*.fc1", "blocks.[01].out". "" is the module itself.
using ParallelPlan = std::vector<std::pair<std::string, ParallelStyle>>;

/// Cuts `module` over `mesh`, which has one axis, as `plan` says: parameters become DTensors in place, and the ops that
/// consume them bring inputs and outputs to the layouts of the style. Parameters and buffers that no style places
/// become Replicate. All ranks of the mesh call it; the values of its first rank count.
/// A plain input of a module with a style is taken in the style's input layout, that of another Linear, Embedding or
/// norm as Replicate; outputs are DTensors. ValueError for a pattern that matches nothing, before anything is changed.
///     parallelize_module(*net, mesh["tp"], {{"blocks.*.up", ColwiseParallel()}, {"blocks.*.down",
///     RowwiseParallel()}});
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const ParallelPlan& plan);

}  // namespace serried
