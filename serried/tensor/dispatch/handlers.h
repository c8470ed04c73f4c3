// Ops that do not go by rules alone: random numbers, host reads, decompositions.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string_view>
#include <vector>

namespace serried {

/// Gets the whole call with DTensors on the stack, below autograd. True: done, results are on the stack in place of the
/// arguments. False: nothing was touched, go on by rules.
using Handler = bool (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// `op` is the schema's name without overload ("aten::mean"), or with one ("aten::mean.dim").
struct HandlerEntry {
  std::string_view op;
  Handler run;
};

/// Null where rules decide.
Handler find_handler(const c10::FunctionSchema& schema);

// The tables, one per file.
std::vector<HandlerEntry> random_handlers();      // random/random_ops.cpp
std::vector<HandlerEntry> host_read_handlers();   // handlers/host_reads.cpp: item, equal, is_same_size, ...
std::vector<HandlerEntry> reduction_handlers();   // handlers/decompose_reductions.cpp: mean, var, std, norms
std::vector<HandlerEntry> loss_handlers();        // handlers/decompose_losses.cpp
std::vector<HandlerEntry> batch_norm_handlers();  // handlers/batch_norm.cpp: statistics over the batch of all ranks
std::vector<HandlerEntry> metadata_handlers();    // handlers/metadata_ops.cpp: as_strided, set_, resize_, ...
std::vector<HandlerEntry> own_output_handlers();  // handlers/own_outputs.cpp: linalg_matrix_rank

}  // namespace serried
