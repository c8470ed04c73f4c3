// Arithmetic on runs of bytes: what is covered by whom.
#include "serried/elastic/spread_plan.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "serried/checkpoint/failure.h"

namespace serried::detail {
namespace {

using checkpoint::detail::fail;
using checkpoint::detail::Run;
using nlohmann::json;

constexpr const char* kFix =
    "start the job again from its last checkpoint; to outlive a loss cut inside of replicas: fully_shard on a "
    "(replicate, shard) mesh, ZeroRedundancyOptimizer over some of the ranks";

std::vector<Run> runs_of(const SpreadPart& part) {
  std::vector<Run> runs;
  for_each_run(part.region, part.element_bytes(), [&](const Run& run) { runs.push_back(run); });
  return runs;
}

// What of `needed` is in `held` goes to `found`; the rest is left. All ascend in the file.
std::vector<Run> take_from(const std::vector<Run>& needed, const std::vector<Run>& held,
                           std::vector<CopiedRun>& found) {
  std::vector<Run> left;
  size_t at = 0;
  for (Run want : needed) {
    while (at < held.size() && held[at].in_file + held[at].num_bytes <= want.in_file) ++at;
    for (size_t i = at; i < held.size() && want.num_bytes > 0; ++i) {
      const int64_t begin = std::max(want.in_file, held[i].in_file);
      const int64_t end = std::min(want.in_file + want.num_bytes, held[i].in_file + held[i].num_bytes);
      if (begin >= end) break;
      if (begin > want.in_file) left.push_back({want.in_file, want.in_part, begin - want.in_file});
      found.push_back({held[i].in_part + begin - held[i].in_file, want.in_part + begin - want.in_file, end - begin});
      want = {end, want.in_part + end - want.in_file, want.in_file + want.num_bytes - end};
    }
    if (want.num_bytes > 0) left.push_back(want);
  }
  return left;
}

struct Holding {
  size_t offer;
  size_t part;
};
using Holdings = std::map<std::pair<std::string, std::string>, std::vector<Holding>>;  // by entry and name

Holdings holdings_of(const std::vector<SpreadOffer>& offers) {
  Holdings holdings;
  for (size_t o = 0; o < offers.size(); ++o) {
    const auto& parts = offers[o].state.parts;
    for (size_t p = 0; p < parts.size(); ++p) holdings[{parts[p].entry, parts[p].name}].push_back({o, p});
  }
  return holdings;
}

// "elements 6 to 11 of "model.weight", f32[4,3]," of which no offer has the bytes.
std::optional<std::string> lacking_part(const std::vector<SpreadOffer>& offers) {
  for (const auto& [name, holders] : holdings_of(offers)) {
    const SpreadPart& first = offers[holders[0].offer].state.parts[holders[0].part];
    SpreadPart whole = first;
    whole.region = checkpoint::detail::Region::whole(first.region.sizes);
    std::vector<Run> left = runs_of(whole);
    std::vector<CopiedRun> found;
    for (const Holding& each : holders) {
      if (left.empty()) break;
      left = take_from(left, runs_of(offers[each.offer].state.parts[each.part]), found);
    }
    if (left.empty()) continue;
    const int64_t size = first.element_bytes();
    return c10::str("elements ", left[0].in_file / size, " to ", (left[0].in_file + left[0].num_bytes) / size - 1,
                    " of \"", first.full_name(), "\", which has the sizes ", c10::IntArrayRef(first.region.sizes), ",");
  }
  return std::nullopt;
}

std::optional<std::string> lacking_name(const std::vector<SpreadOffer>& offers, const std::set<std::string>& names) {
  std::set<std::string> there;
  for (const SpreadOffer& offer : offers) {
    for (const SpreadPart& part : offer.state.parts) there.insert(part.full_name());
  }
  for (const std::string& name : names) {
    if (there.count(name) == 0) return c10::str("\"", name, "\"");
  }
  return std::nullopt;
}

// Of optimizers that deal out their parameters: one that nobody who is left keeps the state of.
std::optional<std::string> lacking_owner(const std::vector<SpreadOffer>& offers) {
  std::map<std::string, std::set<std::string>> dealt, owned;
  for (const SpreadOffer& offer : offers) {
    for (const auto& [entry, names] : offer.state.owners.items()) {
      for (const json& name : names) owned[entry].insert(name.get<std::string>());
      for (const json& group : offer.state.values.at(entry).at("groups")) {
        for (const json& name : group.at("params")) dealt[entry].insert(name.get<std::string>());
      }
    }
  }
  for (const auto& [entry, names] : dealt) {
    for (const std::string& name : names) {
      if (owned[entry].count(name) == 0) return c10::str("the state of \"", name, "\" in \"", entry, "\"");
    }
  }
  return std::nullopt;
}

std::optional<std::string> lacking(const std::vector<SpreadOffer>& offers, const std::set<std::string>& names) {
  if (auto name = lacking_name(offers, names)) return name;
  if (auto owner = lacking_owner(offers)) return owner;
  return lacking_part(offers);
}

std::vector<SpreadOffer> offers_at(const std::vector<SpreadTold>& ranks, int64_t step, bool fresh) {
  std::vector<SpreadOffer> offers;
  for (const SpreadTold& rank : ranks) {
    if ((rank.condition == Condition::fresh) != fresh) continue;
    for (const SpreadOffer& offer : rank.offers) {
      if (offer.step == step) offers.push_back(offer);
    }
  }
  return offers;
}

}  // namespace

SpreadChoice choose_spread(const std::vector<SpreadTold>& ranks) {
  const bool is_start = std::all_of(ranks.begin(), ranks.end(),
                                    [](const SpreadTold& rank) { return rank.condition == Condition::fresh; });
  std::set<int64_t, std::greater<>> steps;
  std::set<std::string> names;
  for (const SpreadTold& rank : ranks) {
    if (!is_start && rank.condition == Condition::fresh) continue;
    names.insert(rank.names.begin(), rank.names.end());
    for (const SpreadOffer& offer : rank.offers) steps.insert(offer.step);
  }
  std::optional<std::string> reason;
  for (const int64_t step : steps) {
    SpreadChoice choice{.step = step, .is_start = is_start, .offers = offers_at(ranks, step, is_start)};
    const auto lacks = lacking(choice.offers, names);
    if (!lacks) return choice;
    if (!reason) reason = c10::str("no rank that is left has ", *lacks, " at step ", step);
  }
  fail(reason.value_or("no rank that is left has the state of a whole step"), kFix);
}

SpreadState joined(const std::vector<SpreadOffer>& offers) {
  SpreadState whole;
  for (const auto& [name, holders] : holdings_of(offers)) {
    whole.parts.push_back(offers[holders[0].offer].state.parts[holders[0].part]);
  }
  std::map<std::string, std::vector<std::pair<int, json>>> values;
  for (const SpreadOffer& offer : offers) {
    for (const auto& [entry, each] : offer.state.values.items()) values[entry].emplace_back(offer.rank, each);
    for (const auto& [entry, each] : offer.state.aliases.items()) whole.aliases[entry].update(each);
  }
  for (const auto& [entry, of_ranks] : values) {
    whole.values[entry] = checkpoint::detail::joined_values(entry, of_ranks);
  }
  for (const SpreadOffer& offer : offers) {
    for (const auto& [entry, owned] : offer.state.owned.items()) {
      for (const auto& [name, value] : owned.items()) whole.values[entry]["owned"][name] = value;
    }
  }
  return whole;
}

std::vector<SpreadTransfer> transfers_of(const SpreadChoice& choice,
                                         const std::vector<std::vector<SpreadPart>>& places_of_ranks) {
  const Holdings holdings = holdings_of(choice.offers);
  std::vector<SpreadTransfer> transfers;
  for (int target = 0; target < int(places_of_ranks.size()); ++target) {
    const auto& places = places_of_ranks[size_t(target)];
    for (size_t place = 0; place < places.size(); ++place) {
      std::vector<Holding> holders = holdings.at({places[place].entry, places[place].name});
      const bool first_counts = choice.is_start || places[place].is_buffer;
      if (!first_counts) {
        std::rotate(holders.begin(), holders.begin() + int64_t((place + size_t(target)) % holders.size()),
                    holders.end());
        std::stable_partition(holders.begin(), holders.end(),
                              [&](const Holding& each) { return choice.offers[each.offer].rank == target; });
      }
      std::vector<Run> left = runs_of(places[place]);
      for (const Holding& each : holders) {
        if (left.empty()) break;
        SpreadTransfer transfer{choice.offers[each.offer].rank, each.offer, each.part, target, place};
        left = take_from(left, runs_of(choice.offers[each.offer].state.parts[each.part]), transfer.runs);
        if (!transfer.runs.empty()) transfers.push_back(std::move(transfer));
      }
    }
  }
  return transfers;
}

}  // namespace serried::detail
