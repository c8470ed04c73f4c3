// How sizes read in messages.
#pragma once

#include <c10/util/ArrayRef.h>

#include <string>

namespace serried::detail {

/// "[8,4]"
inline std::string sizes_text(c10::IntArrayRef sizes) {
  std::string text = "[";
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(sizes[i]);
  }
  return text + "]";
}

}  // namespace serried::detail
