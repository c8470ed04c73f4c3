// What a checkpoint has, by the names that its listing, its comparison and `serried checkpoint cat` share.
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "serried/checkpoint/reader.h"

namespace serried::checkpoint::detail {

struct FoundTensor {
  std::shared_ptr<TensorFile> file;
  const FileTensor* tensor = nullptr;
};

/// By entry and name in it: "model" may have an "ema.w" beside the "w" of "model.ema".
using TensorNames = std::map<std::pair<std::string, std::string>, FoundTensor>;
TensorNames tensors_of(Checkpoint& checkpoint);

/// "model.head.bias", and "x" for a tensor among the values.
std::string whole_name(const std::string& entry, const std::string& name);

/// "f32[2,3]"
std::string looks_of(const FileTensor& tensor);

/// Whether a value is a tensor, which stands elsewhere.
bool names_tensor(const nlohmann::json& value);

/// A value in a line, cut where it is long.
std::string shown_value(const nlohmann::json& value);

}  // namespace serried::checkpoint::detail
