// Names that a load finds on one side only.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "serried/checkpoint/source.h"

namespace serried::checkpoint::detail {

/// "a, b, and 5 more"; "none".
std::string list_of_names(std::vector<std::string> names);

/// "missing there: a, b; only there: c", without the half that has no names.
std::string differences_of_names(const Wanted& wanted);

/// Failure with both lists where `strict` and there are any.
void check_names(const std::string& entry, const Wanted& wanted, bool strict);

/// Names of one entry as one rank has them.
struct NamesOfRank {
  std::vector<std::string> missing = {};  // that only this rank has
  std::vector<std::string> extra = {};    // that only the checkpoint has
};

/// The same for ranks that load together, one after the other, each with what it has to say of its entries: a name that
/// some rank wants is none that only the checkpoint has, so that stages of a pipeline load what is theirs. A rank that
/// wants less than another and nothing that the other does not want has forgotten something: names, or whole entries.
/// An entry may go into several things: these have the numbers 0, 1 and so on.
using NamesOfEntries = std::map<std::pair<std::string, size_t>, NamesOfRank>;
void check_names_of_ranks(const std::vector<NamesOfEntries>& of_ranks);

}  // namespace serried::checkpoint::detail
