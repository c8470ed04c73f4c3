// The random fills of parts, each as one op while the thread is recorded, and the generator of ops that draw by
// themselves.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/core/Scalar.h>

#include <string_view>

#include "serried/mesh/mesh.h"
#include "serried/tensor/random/stream_fill.h"

namespace serried::detail {

/// stream_fill, as the op serried::random_stream_.
void fill_by_stream(const at::Tensor& local, const Spec& spec, const StreamOp& op, const at::Generator& generator);

/// A fill of philox_fill.h with a key drawn off the generator, as the op serried::random_fill_. The kinds and what they
/// take: "bernoulli" {p}, "integers" {low, high}, "normal" {}, "uniform" {}.
void fill_by_key(const at::Tensor& local, const Spec& spec, std::string_view kind, at::ArrayRef<at::Scalar> arguments,
                 const at::Generator& generator);

/// Puts this rank's generator where the call on top of `stack` has a generator argument that is None. With a mesh the
/// ranks' generators are compared as generator_for does.
void put_rank_generator(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const DeviceMesh* mesh = nullptr);

}  // namespace serried::detail
