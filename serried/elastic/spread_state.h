// What a rank holds of things that are spread over ranks: its part of each tensor, and what other ranks have to know
// of it to build the same things cut in another way.
#pragma once

#include <ATen/core/Tensor.h>

#include <nlohmann/json.hpp>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "serried/checkpoint/runs.h"
#include "serried/checkpoint/source.h"

namespace serried::detail {

/// Some of the elements of a tensor; all of them where it is no DTensor.
struct SpreadPart {
  std::string entry;
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  checkpoint::detail::Region region = {};  // of the whole tensor
  bool is_buffer = false;                  // ranks may differ, and the first one's counts
  at::Tensor tensor = {};                  // undefined where another rank holds it

  std::string full_name() const { return entry + "." + name; }
  int64_t element_bytes() const { return int64_t(c10::elementSize(dtype)); }
};

void to_json(nlohmann::json& json, const SpreadPart& part);
void from_json(const nlohmann::json& json, SpreadPart& part);

/// All that one rank holds at one moment.
struct SpreadState {
  std::vector<SpreadPart> parts = {};
  nlohmann::json values = nlohmann::json::object();   // by entry
  nlohmann::json aliases = nlohmann::json::object();  // by entry: other names of its tensors
  nlohmann::json owned = nlohmann::json::object();    // by entry: of this rank alone
  /// By entry: parameters whose state this rank alone keeps, of those that ranks deal out among themselves.
  nlohmann::json owners = nlohmann::json::object();
};

/// Communicates nothing. Failure for what no rank could take over.
SpreadState spread_state(const checkpoint::Contents& contents);

/// With tensors of its own.
SpreadState copy_of(const SpreadState& state);

/// All of it but the bytes, and the same without tensors.
nlohmann::json description_of(const SpreadState& state);
SpreadState described(const nlohmann::json& description);

/// Where a state goes that is put together from those of several ranks.
struct SpreadPlaces {
  std::vector<SpreadPart> parts = {};
  std::vector<std::function<void()>> apply = {};                   // when all tensors are there
  std::vector<std::pair<std::string, std::string>> unwanted = {};  // entry and name of what this rank has no use for
};

/// `whole` lists each tensor once. Failure where this rank needs what is not in it.
SpreadPlaces places_for(const checkpoint::Contents& contents, const SpreadState& whole);

}  // namespace serried::detail
