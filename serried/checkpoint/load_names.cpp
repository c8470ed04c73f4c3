// The message with both lists of names.
#include "serried/checkpoint/load_names.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"

namespace serried::checkpoint::detail {
namespace {

constexpr size_t kShownNames = 20;

using EntrySet = std::set<std::pair<std::string, size_t>>;

void check_entries_of_ranks(const std::vector<NamesOfEntries>& of_ranks) {
  std::map<EntrySet, size_t> kinds;  // the first rank of each
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    EntrySet mine;
    for (const auto& [entry, names] : of_ranks[rank]) mine.insert(entry);
    kinds.emplace(std::move(mine), rank);
  }
  for (const auto& [less, rank] : kinds) {
    for (const auto& [more, other] : kinds) {
      if (rank == other || !std::includes(more.begin(), more.end(), less.begin(), less.end())) continue;
      const auto lacking =
          std::find_if(more.begin(), more.end(), [&less = less](const auto& e) { return less.count(e) == 0; });
      fail(c10::str("rank ", other, " loads \"", lacking->first, "\", and rank ", rank,
                    " does not, nor anything that rank ", other, " does not load"),
           "load the same contents on every rank, or pass {.strict = false}");
    }
  }
}

}  // namespace

std::string list_of_names(std::vector<std::string> names) {
  for (std::string& name : names) name = serried::detail::printable(name);
  const size_t count = names.size();
  if (count > kShownNames) {
    names.resize(kShownNames);
    names.push_back(c10::str("and ", count - kShownNames, " more"));
  }
  return count == 0 ? "none" : c10::Join(", ", names);
}

std::string differences_of_names(const Wanted& wanted) {
  std::vector<std::string> halves;
  if (!wanted.missing.empty()) halves.push_back("missing there: " + list_of_names(wanted.missing));
  if (!wanted.extra.empty()) halves.push_back("only there: " + list_of_names(wanted.extra));
  return c10::Join("; ", halves);
}

void check_names(const std::string& entry, const Wanted& wanted, bool strict) {
  if (!strict || (wanted.missing.empty() && wanted.extra.empty())) return;
  fail(c10::str("\"", entry, "\" has other names in the checkpoint: ", differences_of_names(wanted)),
       "load into the same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load what both have");
}

void check_names_of_ranks(const std::vector<NamesOfEntries>& of_ranks) {
  check_entries_of_ranks(of_ranks);
  std::map<std::pair<std::string, size_t>, Wanted> all;
  std::map<std::pair<std::string, size_t>, std::set<std::string>> seen;
  std::map<std::pair<std::string, size_t>, std::set<std::set<std::string>>> kinds;  // what different ranks leave alone
  for (const NamesOfEntries& entries : of_ranks) {
    for (const auto& [entry, names] : entries) {
      std::vector<std::string>& missing = all[entry].missing;
      for (const std::string& name : names.missing) {
        if (seen[entry].insert(name).second) missing.push_back(name);
      }
      kinds[entry].emplace(names.extra.begin(), names.extra.end());
    }
  }
  for (auto& [entry, wanted] : all) {
    const std::set<std::set<std::string>>& extras = kinds[entry];
    std::set<std::string> nobody = *extras.begin();
    for (const std::set<std::string>& each : extras) {
      std::erase_if(nobody, [&](const std::string& name) { return each.count(name) == 0; });
    }
    for (const std::set<std::string>& more : extras) {
      for (const std::set<std::string>& less : extras) {
        if (less == more || !std::includes(more.begin(), more.end(), less.begin(), less.end())) continue;
        std::set_difference(more.begin(), more.end(), less.begin(), less.end(), std::inserter(nobody, nobody.end()));
      }
    }
    wanted.extra.assign(nobody.begin(), nobody.end());
    check_names(entry.first, wanted, true);
  }
}

}  // namespace serried::checkpoint::detail
