// What Elastic keeps: its tensors and values by name, and what it takes to give them to another rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <functional>
#include <string>
#include <vector>

#include "serried/checkpoint/source.h"

namespace serried::detail {

struct KeptTensor {
  std::string entry;
  std::string name;
  at::Tensor tensor;
  bool is_buffer = false;  // ranks may differ, and the first one's counts

  std::string full_name() const { return entry + "." + name; }
};

/// All of it at one moment, the same on all ranks but for buffers.
struct KeptState {
  std::vector<KeptTensor> tensors = {};
  nlohmann::json values = nlohmann::json::object();   // by entry
  nlohmann::json aliases = nlohmann::json::object();  // by entry: other names of its tensors
};

/// Failure for what cannot be kept.
KeptState kept_state(const checkpoint::Contents& contents);

/// A line for each tensor and each entry's values, with hashes; buffers, or all else.
std::string lines_of(const KeptState& state, bool buffers);

/// The looks of a state, from which ranks that are behind know what comes.
nlohmann::json manifest_of(const KeptState& state);

/// Where a state goes that another rank has.
struct Incoming {
  std::vector<at::Tensor> tensors = {};           // one per tensor of the manifest, in its order
  std::vector<std::function<void()>> apply = {};  // when all tensors are there
};

/// Failure where this rank keeps other things. Optimizers make state that they lack.
Incoming incoming_state(const checkpoint::Contents& contents, const nlohmann::json& manifest, int from);

}  // namespace serried::detail
