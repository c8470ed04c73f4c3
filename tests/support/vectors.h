// Recorded calls of ATen ops with their results: the conformance vectors.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <utility>
#include <vector>

namespace serried::testing {

/// One recorded call. Tensors are shared between all users: copy before an op may write to them.
struct VectorCase {
  std::string id;                                        // of twelve hexadecimal digits, the same for ever
  torch::jit::Stack arguments;                           // as the schema has them, all of them
  std::vector<c10::IValue> outputs;                      // as the stack has them after the call
  std::vector<std::pair<int64_t, c10::IValue>> mutated;  // (argument index, its value after the call)
  bool mutates(size_t argument) const;
};

struct VectorFile {
  std::string name;  // "aten.add.Tensor"
  c10::OperatorHandle op;
  std::vector<VectorCase> cases;
};

/// Where the build has unpacked tests/data/aten_vectors.tar.zst.
std::string vectors_folder();

/// The overloads that have vectors, sorted: "aten._adaptive_avg_pool2d.default", ...
std::vector<std::string> vector_names(const std::string& folder = vectors_folder());

/// All cases of one overload. Throws where there is no such file or LibTorch has no such op.
VectorFile load_vectors(const std::string& name, const std::string& folder = vectors_folder());

}  // namespace serried::testing
