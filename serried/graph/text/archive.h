// The content of a graph's file: text and tensors, and a digest that tells whether all of it is there unchanged.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

namespace serried::graph {

struct Archive {
  std::string text = {};
  std::vector<int64_t> ids = {};
  std::vector<at::Tensor> tensors = {};  // one for each id; those that share memory come back so
};

/// Writes what `unpack` reads.
void pack(const Archive& archive, std::ostream& out);

/// None where a byte is not as `pack` wrote it.
std::optional<Archive> unpack(std::istream& in);

}  // namespace serried::graph
