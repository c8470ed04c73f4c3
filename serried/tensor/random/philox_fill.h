// Counter-based random numbers: element i of a tensor is a function of a key and i alone.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

#include "serried/tensor/random/owned_runs.h"

namespace serried::detail {

// Each fills `local`, this rank's part as `placed` says. i is an element's place in the row-major whole, whatever the
// strides; word w of block b is what at::Philox4_32(key, 0, b) gives as its w-th number. Elements take words in order:
// one each for bernoulli and for uniform and normal numbers of up to 32 bits, two each for doubles and integers.

/// 1 where the word is below p * 2^32, else 0. Any real dtype.
void philox_bernoulli_(const at::Tensor& local, const PlacedPart& placed, uint64_t key, double p);
/// In [0, 1). Floating or complex.
void philox_uniform_(const at::Tensor& local, const PlacedPart& placed, uint64_t key);
/// Mean 0, variance 1, by Box and Muller from two neighbours. Floating or complex.
void philox_normal_(const at::Tensor& local, const PlacedPart& placed, uint64_t key);
/// In [low, high).
void philox_integers_(const at::Tensor& local, const PlacedPart& placed, uint64_t key, int64_t low, int64_t high);

/// A fresh key: 64 bits off the generator.
uint64_t draw_key(const at::Generator& generator);

}  // namespace serried::detail
