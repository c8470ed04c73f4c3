// One call of a captured function, taken apart, and the conditions that it has to meet, for readers.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "serried/graph/text/plain_value.h"

namespace serried::graph {

/// One condition, for readers.
struct Guard {
  std::string name;      // "input 0 sizes", "grad mode", "group dp"
  std::string expected;  // "[8, 64]"
};

/// A watched variable at the time of a call.
struct WatchedText {
  const std::string* name;  // of CaptureOptions
  std::string text;
  Identities identities = {};
  bool operator==(const WatchedText&) const = default;
};

/// What a function takes or returns, taken apart: tensors in order, and all other values as text.
struct FlatValues {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> constants;
};

/// One call.
struct CallArguments : FlatValues {
  std::vector<WatchedText> watched;
  const void* types = nullptr;  // those that the caller gave: 2 is not 2.0, though both may be "2"
};

}  // namespace serried::graph
