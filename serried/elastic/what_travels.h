// What all state that ranks give each other has in common: which may travel, its bytes, and how they are compared.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>

#include "serried/checkpoint/source.h"

namespace serried::detail {

/// Failure for a name that JSON cannot take.
void check_utf8(const std::string& entry, const checkpoint::detail::Item& item);

/// Failure for what each rank has one of its own of.
void check_not_per_rank(const std::string& entry, const checkpoint::detail::Part& part);

/// The bytes of a tensor, in order: of its own memory where that is dense, else of a copy.
at::Tensor bytes_of_tensor(const at::Tensor& tensor);

uint64_t hash_of_bytes(const at::Tensor& bytes);

/// A value's JSON takes only what is UTF-8, or says so itself.
std::string text_of(const nlohmann::json& value);

}  // namespace serried::detail
