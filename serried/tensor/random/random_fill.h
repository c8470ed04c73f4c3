// The random fills of parts, each as one op while the thread is recorded.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Scalar.h>

#include <string_view>

#include "serried/tensor/random/stream_fill.h"

namespace serried::detail {

/// stream_fill, as the op serried::random_stream_.
void fill_by_stream(const at::Tensor& local, const Spec& spec, const StreamOp& op, const at::Generator& generator);

/// A fill of philox_fill.h with a key drawn off the generator, as the op serried::random_fill_. The kinds and what they
/// take: "bernoulli" {p}, "integers" {low, high}, "normal" {}, "uniform" {}.
void fill_by_key(const at::Tensor& local, const Spec& spec, std::string_view kind, at::ArrayRef<at::Scalar> arguments,
                 const at::Generator& generator);

}  // namespace serried::detail
