// What this rank has to save, before it is known what the others have.
#pragma once

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

#include "serried/checkpoint/ranks.h"
#include "serried/checkpoint/source.h"
#include "serried/mesh/mesh.h"
#include "serried/tensor/spec.h"

namespace serried::checkpoint::detail {

struct CollectedItem {
  std::string entry;
  Item item;
  SpecPtr spec = {};  // of a DTensor
  size_t mesh = 0;    // its number among the meshes of this rank
};

struct Collected {
  std::vector<CollectedItem> items = {};  // that other ranks may have as well
  std::vector<CollectedItem> owned = {};  // of this one alone
  std::vector<DeviceMesh> meshes = {};
  std::map<std::string, std::map<std::string, std::string>> aliases = {};
  nlohmann::json values = nlohmann::json::object();  // the user's
  nlohmann::json entry_values = nlohmann::json::object();
  nlohmann::json entry_owned = nlohmann::json::object();
  nlohmann::json per_rank = nlohmann::json::object();

  /// One of both, `items` first.
  const CollectedItem& item(size_t number) const {
    return number < items.size() ? items[number] : owned.at(number - items.size());
  }
};

/// Communicates nothing. Failure for what cannot be saved.
Collected collect(const Contents& contents, const Ranks& ranks);

/// Failure for a tensor that no file can have; `entry` may be empty.
void check_can_save(const std::string& entry, const std::string& name, const at::Tensor& tensor);

/// Names that the modules of a call have for their parameters.
ParameterNames parameter_names(const Contents& contents);

/// Null where `value` is no State.
Source* source_of(const Value& value);

}  // namespace serried::checkpoint::detail
