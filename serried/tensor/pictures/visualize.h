// Draws which rank holds which part of a tensor: as text, SVG or a page of HTML.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "serried/tensor/spec.h"

namespace serried {

struct VisualizeOptions {
  std::string format = "text";     // "text", "svg" or "html" (one page without anything else)
  std::vector<int64_t> dims = {};  // the one or two dims drawn; none: those that are cut, else the first two
};

/// The picture of a DTensor; communicates nothing, so every rank or only one may draw. A tensor of more than two cut
/// dims needs {.dims}: it is drawn at index 0 of the others.
///     std::cout << visualize_sharding(d);
///     std::ofstream("d.html") << visualize_sharding(d, {.format = "html"});
std::string visualize_sharding(const at::Tensor& d, const VisualizeOptions& options = {});

/// The same of a tensor that exists nowhere yet.
std::string visualize_sharding(const Spec& spec, const VisualizeOptions& options = {});

}  // namespace serried
