// Tells what is there, builds places for it, moves bytes pair by pair, and compares what has come of it.
#include "serried/elastic/spread_meeting.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <set>

#include "serried/base/log.h"
#include "serried/base/trace.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/ranks.h"
#include "serried/checkpoint/reader.h"
#include "serried/comm/collectives/watch.h"
#include "serried/elastic/move_state.h"
#include "serried/elastic/spread_plan.h"
#include "serried/elastic/what_travels.h"
#include "serried/tensor/parts.h"

namespace serried::detail {
namespace {

using checkpoint::detail::fail;
using checkpoint::detail::Ranks;
using nlohmann::json;

void check_names(const checkpoint::Contents& contents) {
  std::set<std::string> seen;
  for (const checkpoint::Entry& entry : contents) {
    checkpoint::detail::check_entry_name(entry.name);
    if (seen.insert(entry.name).second) continue;
    fail(c10::str("the name \"", entry.name, "\" is there twice"), "give each thing a name of its own");
  }
}

at::Tensor bytes_of_part(const SpreadPart& part) {
  return bytes_of_tensor(part_of(part.tensor));
}

// One meeting, as one rank sees it.
class SpreadMeeting {
 public:
  SpreadMeeting(const Group& group, const checkpoint::Contents& built, SpreadVersions& versions)
      : group_(group), ranks_(group), built_(built), versions_(versions), rank_(group->getRank()) {}

  void run(Standing& mine) {
    read_offers(ranks_.together([&] { return offers(mine); }));
    read_places(ranks_.together([&] { return places(); }));
    log::line(log::Topic::comm, "Elastic: ", group_->getSize(), " ranks put together the state of step ", choice_.step);
    transfers_ = transfers_of(choice_, places_of_ranks_);
    stage();
    move();
    compare_hashes(ranks_.together([&] { return text_of(hashes_); }));
    // From here on nothing can fail but this rank.
    versions_.settle_for(choice_.step);
    write();
    compare_states(ranks_.together([&] { return state(); }));
    mine = {choice_.step, Condition::whole};
    versions_.met(choice_.step, std::move(state_), std::move(names_));
  }

 private:
  std::string offers(const Standing& mine) {
    check_names(built_);
    json told = {{"step", mine.step}, {"condition", int(mine.condition)}, {"names", versions_.names()}};
    json& offers = told["offers"] = json::array();
    if (mine.condition == Condition::fresh) {
      mine_.push_back(spread_state(built_));
      offers.push_back({{"step", mine.step}, {"state", description_of(mine_.back())}});
    } else {
      for (const SpreadVersions::Version* version : versions_.all()) {
        mine_.push_back(version->state);
        offers.push_back({{"step", version->step}, {"state", description_of(version->state)}});
      }
    }
    return text_of(told);
  }

  void read_offers(const std::vector<std::string>& texts) {
    std::vector<SpreadTold> ranks;
    for (const std::string& text : texts) {
      const json said = json::parse(text);
      SpreadTold& told = ranks.emplace_back();
      told.condition = Condition(said.at("condition").get<int>());
      told.step = said.at("step");
      told.names = said.at("names").get<std::vector<std::string>>();
      for (const json& offer : said.at("offers")) {
        told.offers.push_back({int(ranks.size()) - 1, offer.at("step"), described(offer.at("state"))});
        if (int(ranks.size()) - 1 == rank_) give_tensors(told.offers.back(), told.offers.size() - 1);
      }
    }
    choice_ = choose_spread(ranks);
  }

  // This rank's own come back as the others see them, without tensors.
  void give_tensors(SpreadOffer& offer, size_t number) const {
    for (size_t i = 0; i < offer.state.parts.size(); ++i) {
      offer.state.parts[i].tensor = mine_[number].parts[i].tensor;
    }
  }

  std::string places() {
    const SpreadState whole = joined(choice_.offers);
    places_ = places_for(built_, whole);
    return text_of({{"parts", places_.parts}, {"unwanted", places_.unwanted}});
  }

  void read_places(const std::vector<std::string>& texts) {
    std::vector<std::set<std::pair<std::string, std::string>>> unwanted;
    for (const std::string& text : texts) {
      const json said = json::parse(text);
      places_of_ranks_.push_back(said.at("parts").get<std::vector<SpreadPart>>());
      unwanted.push_back(said.at("unwanted").get<std::set<std::pair<std::string, std::string>>>());
    }
    for (const auto& name : unwanted[0]) {
      if (!std::all_of(unwanted.begin(), unwanted.end(), [&](const auto& each) { return each.count(name) > 0; })) {
        continue;
      }
      fail(c10::str("\"", name.first, ".", name.second, "\" was there before, and no rank has built it again"),
           "build the same modules and optimizers whenever ranks change");
    }
  }

  // Beside what it goes into, which may be what comes from here.
  void stage() {
    for (const SpreadPart& place : places_.parts) {
      const at::Tensor part = part_of(place.tensor);
      staged_.push_back(at::empty({int64_t(part.nbytes())}, part.options().dtype(at::kByte)));
    }
  }

  const SpreadPart& source_of(const SpreadTransfer& transfer) const {
    return choice_.offers[transfer.offer].state.parts[transfer.part];
  }

  void move() {
    std::map<std::pair<int, int>, std::vector<size_t>> by_pair;
    for (size_t i = 0; i < transfers_.size(); ++i) {
      by_pair[{transfers_[i].source, transfers_[i].target}].push_back(i);
    }
    for (const auto& [pair, numbers] : by_pair) {
      if (pair.first == rank_ || pair.second == rank_) move_between(pair.first, pair.second, numbers);
    }
  }

  void move_between(int source, int target, const std::vector<size_t>& numbers) {
    std::vector<at::Tensor> packed;
    for (const size_t number : numbers) {
      packed.push_back(source == rank_ ? pack(transfers_[number]) : empty_for(transfers_[number]));
    }
    if (source != target) {
      move_state(packed, {{source}, {target}}, group_);
      for (size_t i = 0; i < numbers.size(); ++i) hashes_[std::to_string(numbers[i])] = hash_of_bytes(packed[i]);
    }
    if (target != rank_) return;
    for (size_t i = 0; i < numbers.size(); ++i) unpack(transfers_[numbers[i]], packed[i]);
  }

  at::Tensor empty_for(const SpreadTransfer& transfer) const {
    int64_t size = 0;
    for (const CopiedRun& run : transfer.runs) size += run.num_bytes;
    return at::empty({size}, staged_.at(transfer.place).options());
  }

  at::Tensor pack(const SpreadTransfer& transfer) const {
    const at::Tensor bytes = bytes_of_part(source_of(transfer));
    std::vector<at::Tensor> pieces;
    for (const CopiedRun& run : transfer.runs) pieces.push_back(bytes.narrow(0, run.in_source, run.num_bytes));
    return pieces.size() == 1 ? pieces[0] : at::cat(pieces);
  }

  void unpack(const SpreadTransfer& transfer, const at::Tensor& packed) const {
    int64_t at = 0;
    for (const CopiedRun& run : transfer.runs) {
      staged_[transfer.place].narrow(0, run.in_target, run.num_bytes).copy_(packed.narrow(0, at, run.num_bytes));
      at += run.num_bytes;
    }
  }

  void compare_hashes(const std::vector<std::string>& texts) const {
    std::vector<json> hashes;
    for (const std::string& text : texts) hashes.push_back(json::parse(text));
    for (size_t i = 0; i < transfers_.size(); ++i) {
      const SpreadTransfer& each = transfers_[i];
      if (each.source == each.target) continue;
      const std::string number = std::to_string(i);
      if (hashes[size_t(each.source)].at(number) == hashes[size_t(each.target)].at(number)) continue;
      fail(c10::str("rank ", each.target, " got other bytes of \"", source_of(each).full_name(), "\" than rank ",
                    each.source, " sent"),
           "check the network and the memory of both machines");
    }
  }

  void write() {
    for (size_t i = 0; i < staged_.size(); ++i) {
      const at::Tensor part = part_of(places_.parts[i].tensor);
      checkpoint::detail::write_part(places_.parts[i].tensor, staged_[i].view(part.scalar_type()).view(part.sizes()));
    }
    for (const auto& apply : places_.apply) apply();
    staged_.clear();
  }

  std::string state() {
    state_ = spread_state(built_);
    json hashes = json::object();
    for (const SpreadPart& part : state_.parts) {
      hashes[part.full_name()] = {text_of(json(part).at("spans")), hash_of_bytes(bytes_of_part(part))};
    }
    return text_of(hashes);
  }

  // Ranks with copies of a part have the same bits.
  void compare_states(const std::vector<std::string>& texts) {
    std::map<std::pair<std::string, std::string>, std::pair<size_t, json>> known;
    std::set<std::string> names;
    for (size_t rank = 0; rank < texts.size(); ++rank) {
      const json said = json::parse(texts[rank]);
      for (const auto& [name, each] : said.items()) {
        names.insert(name);
        const auto [first, is_new] =
            known.emplace(std::pair(name, each[0].get<std::string>()), std::pair(rank, each[1]));
        if (is_new || first->second.second == each[1]) continue;
        fail(c10::str("ranks have done the same steps and hold different values of \"", name, "\": rank ",
                      first->second.first, " and rank ", rank),
             "do nothing to what rebuild() returns that differs between ranks which hold the same part");
      }
    }
    names_.assign(names.begin(), names.end());
  }

  const Group& group_;
  const Ranks ranks_;
  const checkpoint::Contents& built_;
  SpreadVersions& versions_;
  const int rank_;
  std::vector<SpreadState> mine_;  // what this rank offers
  SpreadChoice choice_;
  SpreadPlaces places_;
  std::vector<std::vector<SpreadPart>> places_of_ranks_;
  std::vector<SpreadTransfer> transfers_;
  std::vector<at::Tensor> staged_;  // by place
  json hashes_ = json::object();    // by number of a transfer, of what this rank has sent and got
  SpreadState state_;
  std::vector<std::string> names_;
};

}  // namespace

void bring_parts_together(const Group& group, const checkpoint::Contents& built, SpreadVersions& versions,
                          Standing& mine) {
  const watch::PartOf scope("Elastic's meeting");
  const trace::Span span("Elastic's meeting", trace::kSetup);
  const at::NoGradGuard no_grad;
  SpreadMeeting(group, built, versions).run(mine);
}

}  // namespace serried::detail
