// Tells, chooses, moves, and compares what has come of it.
#include "serried/elastic/meeting.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <optional>

#include "serried/base/log.h"
#include "serried/base/trace.h"
#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/ranks.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/watch.h"
#include "serried/elastic/kept_state.h"
#include "serried/elastic/move_state.h"
#include "serried/elastic/what_travels.h"

namespace serried::detail {
namespace {

using checkpoint::detail::fail;
using checkpoint::detail::Ranks;
using nlohmann::json;

bool contains(const std::vector<int>& ranks, int rank) {
  return std::count(ranks.begin(), ranks.end(), rank) > 0;
}

uint64_t digest_of(const std::string& lines) {
  return checkpoint::detail::hash_of(lines.data(), int64_t(lines.size()));
}

std::string names_of(const checkpoint::Contents& kept) {
  std::vector<std::string> names;
  for (const checkpoint::Entry& entry : kept) names.push_back("\"" + entry.name + "\"");
  return names.empty() ? "nothing" : c10::Join(", ", names);
}

std::string told_by(const Standing& mine, const KeptState& state, const std::string& names) {
  return json({{"step", mine.step},
               {"condition", int(mine.condition)},
               {"digest", digest_of(lines_of(state, false))},
               {"buffers", digest_of(lines_of(state, true))},
               {"names", names}})
      .dump();
}

std::vector<Told> read_told(const std::vector<std::string>& texts) {
  std::vector<Told> ranks;
  std::vector<std::string> names;
  for (const std::string& text : texts) {
    const json said = json::parse(text);
    ranks.push_back(
        {said.at("step"), Condition(said.at("condition").get<int>()), said.at("digest"), said.at("buffers")});
    names.push_back(said.at("names"));
    if (names.back() == names[0]) continue;
    fail(c10::str("rank 0 keeps ", names[0], ", and rank ", names.size() - 1, " keeps ", names.back()),
         "call keep() with the same names, in the same order, on every rank");
  }
  return ranks;
}

// Where a rank writes what comes, until it is known to be all.
class Landing {
 public:
  /// `in_place`: tensors are written as bytes come, since what they hold is of no use.
  Landing(Incoming incoming, bool in_place) : incoming_(std::move(incoming)) {
    for (const at::Tensor& tensor : incoming_.tensors) {
      const bool direct = in_place && tensor.is_contiguous();
      bytes_.push_back(direct ? bytes_of_tensor(tensor)
                              : at::empty({int64_t(tensor.nbytes())}, tensor.options().dtype(at::kByte)));
    }
  }

  const std::vector<at::Tensor>& bytes() const { return bytes_; }

  /// Tensor `number` has come: into its place.
  void write(size_t number) const {
    const at::NoGradGuard no_grad;
    const at::Tensor& tensor = incoming_.tensors[number];
    if (bytes_[number].is_alias_of(tensor)) return;
    tensor.detach().copy_(bytes_[number].view(tensor.scalar_type()).view(tensor.sizes()));
  }
  void write_values() const {
    for (const auto& apply : incoming_.apply) apply();
  }

 private:
  Incoming incoming_;
  std::vector<at::Tensor> bytes_;
};

// One transfer of a meeting, as one rank sees it.
class Transfer {
 public:
  Transfer(const Group& group, const checkpoint::Contents& kept, const KeptState& state, const Choice& choice)
      : group_(group), ranks_(group), kept_(kept), state_(state), choice_(choice), rank_(group->getRank()) {}

  void run(Standing& mine) {
    const bool receives = contains(choice_.receivers, rank_),
               receives_buffers = contains(choice_.buffer_receivers, rank_);
    // Where nobody else has a copy yet, what a rank holds may be needed: the source may be lost half-way.
    const bool in_place = receives && mine.condition != Condition::whole && !choice_.is_start;
    const int first = choice_.sources[0];
    const std::string text = broadcast_bytes(rank_ == first ? text_of_manifest() : "", group_, {.src = first});
    manifest_ = json::parse(text);
    ranks_.together([&]() -> std::string {
      if (!receives && !receives_buffers) return "";
      landing_.emplace(incoming_state(kept_, manifest_, first), in_place);
      return "";
    });
    if (in_place) mine.condition = Condition::torn;
    move_state(bytes(false), {choice_.sources, choice_.receivers}, group_);
    move_state(bytes(true), {{first}, choice_.buffer_receivers}, group_);
    ranks_.together([&]() -> std::string {
      if (receives) check_hashes(false);
      if (receives_buffers) check_hashes(true);
      return "";
    });
    // From here on nothing can fail but this rank.
    if (receives_buffers) write(true);
    if (!receives) return;
    write(false);
    landing_->write_values();
  }

 private:
  std::string text_of_manifest() const {
    json manifest = manifest_of(state_);
    for (size_t i = 0; i < state_.tensors.size(); ++i) {
      manifest["tensors"][i]["hash"] = hash_of_bytes(bytes_of_tensor(state_.tensors[i].tensor));
    }
    return text_of(manifest);
  }

  bool is_buffer(size_t number) const { return manifest_["tensors"][number]["is_buffer"]; }

  // Of the source's tensors, or where they land.
  std::vector<at::Tensor> bytes(bool buffers) const {
    std::vector<at::Tensor> all;
    const bool sends = buffers ? rank_ == choice_.sources[0] : contains(choice_.sources, rank_);
    if (!sends && !landing_) return all;
    for (size_t i = 0; i < manifest_["tensors"].size(); ++i) {
      if (is_buffer(i) != buffers) continue;
      all.push_back(sends ? bytes_of_tensor(state_.tensors.at(i).tensor) : landing_->bytes()[i]);
    }
    return all;
  }

  void check_hashes(bool buffers) const {
    for (size_t i = 0; i < landing_->bytes().size(); ++i) {
      const json& each = manifest_["tensors"][i];
      if (is_buffer(i) != buffers || hash_of_bytes(landing_->bytes()[i]) == each["hash"].get<uint64_t>()) continue;
      fail(c10::str("\"", each["entry"].get<std::string>(), ".", each["name"].get<std::string>(),
                    "\" came with other bytes than rank ", choice_.sources[0],
                    " has: ranks with the same step hold "
                    "different values of it, or the network changed them"),
           "look for what one rank does to its state and another does not, such as a keep()'d value of its own");
    }
  }

  void write(bool buffers) const {
    for (size_t i = 0; i < landing_->bytes().size(); ++i) {
      if (is_buffer(i) == buffers) landing_->write(i);
    }
  }

  const Group& group_;
  const Ranks ranks_;
  const checkpoint::Contents& kept_;
  const KeptState& state_;
  const Choice& choice_;
  const int rank_;
  json manifest_;
  std::optional<Landing> landing_;
};

void check_same_state(const Group& group, const checkpoint::Contents& kept) {
  const KeptState state = kept_state(kept);
  const auto found = first_difference(lines_of(state, false) + lines_of(state, true), group);
  if (!found) return;
  const auto shown = [](const std::optional<std::string>& line) { return line ? *line : std::string("nothing more"); };
  fail(c10::str("ranks have done the same steps and hold different values: rank 0 has ", shown(found->first), ", rank ",
                found->rank, " has ", shown(found->other)),
       "do nothing to what is kept that differs between ranks: gradients are averaged by DistributedDataParallel, or "
       "all_reduce_, before optimizers step");
}

}  // namespace

void bring_to_one_state(const Group& group, const checkpoint::Contents& kept, Standing& mine) {
  const watch::PartOf scope("Elastic's meeting");
  const trace::Span span("Elastic's meeting", trace::kSetup);
  const Ranks ranks(group);
  KeptState state;
  const std::string names = names_of(kept);
  const std::vector<std::string> texts = ranks.together([&] {
    state = kept_state(kept);
    return told_by(mine, state, names);
  });
  const Choice choice = choose(read_told(texts));
  if (choice.sources.empty()) {
    fail("the last rank with the state of a whole step is lost: what is left was in the middle of one, behind commit()",
         "start again from a checkpoint; a step that communicates does so before commit(), so that nothing can go "
         "wrong behind it");
  }
  if (!choice.receivers.empty() || !choice.buffer_receivers.empty()) {
    log::line(log::Topic::comm, "Elastic: ", rank_list(choice.receivers), " of ", group->getSize(),
              " take the state of ", rank_list(choice.sources), " at step ", choice.step);
    Transfer(group, kept, state, choice).run(mine);
  }
  mine = {choice.step, Condition::whole};
  check_same_state(group, kept);
}

}  // namespace serried::detail
