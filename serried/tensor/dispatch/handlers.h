// Ops that do not go by rules alone: random numbers, host reads, decompositions; and what their handlers need.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <initializer_list>
#include <string_view>
#include <vector>

#include "serried/spmd/op_call.h"
#include "serried/tensor/meta.h"

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
std::vector<HandlerEntry> softmax_handlers();     // handlers/decompose_softmax.cpp: along a cut dim
std::vector<HandlerEntry> loss_handlers();        // handlers/decompose_losses.cpp
std::vector<HandlerEntry> batch_norm_handlers();  // handlers/batch_norm.cpp: statistics over the batch of all ranks
std::vector<HandlerEntry> metadata_handlers();    // handlers/metadata_ops.cpp: as_strided, set_, resize_, ...
std::vector<HandlerEntry> image_convolution_handlers();    // images/convolution.cpp: of images that are cut in space
std::vector<HandlerEntry> image_pool_handlers();           // images/pools.cpp
std::vector<HandlerEntry> image_adaptive_pool_handlers();  // images/adaptive_pools.cpp
std::vector<HandlerEntry> image_resize_handlers();         // images/resizes.cpp
std::vector<HandlerEntry> attention_handlers();            // attention/attention_handlers.cpp: of cut sequences
std::vector<HandlerEntry> own_tensor_handlers();           // handlers/own_tensors.cpp: linalg_matrix_rank, quantile

namespace detail {

using spmd::OpCall;

/// Puts the results in place of the arguments of `op`. Always true: done.
bool finish(const c10::OperatorHandle& op, torch::jit::Stack& stack, std::initializer_list<c10::IValue> results);

/// This rank's part of `t` placed as `to`; all ranks of the mesh call it.
at::Tensor local_as(const DTensorMeta& meta, const Placements& to);
/// All of it.
at::Tensor whole_local(const DTensorMeta& meta);

/// For factory ops, which have no tensor to go by (making/born_sharded.cpp): runs the one on top of `stack` as this
/// thread's BornSharded says. False: there is none, or the op does not make a tensor from nothing; nothing was touched.
bool make_born_sharded(const c10::OperatorHandle& op, torch::jit::Stack& stack);

}  // namespace detail

}  // namespace serried
