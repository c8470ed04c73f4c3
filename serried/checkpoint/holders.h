// Who holds what: what the ranks of a save have together, name by name, and which of them hold the same bytes.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "serried/checkpoint/collect.h"
#include "serried/checkpoint/ranks.h"

namespace serried::checkpoint::detail {

/// A rank that has a tensor, or a part of it.
struct HeldBy {
  int rank = 0;
  size_t number = 0;  // among that rank's, as Collected::item has it
  uint64_t part = 0;  // ranks of one number have the same part, and write the same rows of it
};

/// A rank outside of the mesh of its DTensor.
inline constexpr uint64_t kHoldsNothing = 0;

struct SharedItem {
  std::string entry;
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes = {};
  Holder holder = Holder::all;
  std::vector<HeldBy> held = {};  // by rank, ascending
};

/// The same on every rank.
struct Shared {
  std::vector<SharedItem> items = {};
  std::map<std::string, std::map<std::string, std::string>> aliases = {};
  nlohmann::json entry_values = nlohmann::json::object();
  std::vector<nlohmann::json> messages = {};  // of each rank: "entry_owned" and "per_rank" are among it
};

/// What the other ranks need to know of this one. Where all have the same names, names are not among it.
std::string message_of(const Collected& mine);

/// All ranks call it with what all have said. Ranks may have different names, as the stages of a pipeline do: then
/// names are gathered, and the ranks have the union. Failure on all ranks where one name is of different tensors, where
/// copies have different values, and where a rank lacks some of another's names and has none that the other lacks.
Shared shared_of(const Collected& mine, const std::vector<std::string>& messages, const Ranks& ranks);

}  // namespace serried::checkpoint::detail
