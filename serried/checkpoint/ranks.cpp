// One text per rank and step, which says how it went.
#include "serried/checkpoint/ranks.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include "serried/checkpoint/failure.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/door.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tape/tape.h"

namespace serried::checkpoint::detail {
namespace {

constexpr char kDone = 'd';
constexpr char kFailed = 'f';

std::string failure_text(const Failure& failure) {
  // The text may quote anything, and JSON takes UTF-8 only.
  return kFailed + nlohmann::json({{"kind", int(failure.kind)}, {"text", failure.text}, {"fix", failure.fix}})
                       .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string outcome_of(const std::function<std::string()>& step) {
  try {
    return kDone + step();
  } catch (const std::exception&) {
    return failure_text(current_failure());
  }
}

[[noreturn]] void throw_failure(const std::string& text, int rank, int size) {
  const auto object = nlohmann::json::parse(text.substr(1));
  const std::string who = size > 1 ? c10::str("rank ", rank, ": ") : "";
  throw Failure(Failure::Kind(object["kind"].get<int>()), who + object["text"].get<std::string>(),
                object["fix"].get<std::string>());
}

}  // namespace

std::vector<std::string> Ranks::together(const std::function<std::string()>& step) const {
  const watch::PartOf scope("checkpoint");
  const std::string mine = outcome_of(step);
  std::vector<std::string> all =
      size() > 1 ? serried::detail::all_gather_bytes(mine, group_) : std::vector<std::string>{mine};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].empty() || all[rank].front() != kDone) throw_failure(all[rank], int(rank), size());
  }
  for (std::string& text : all) text.erase(0, 1);
  return all;
}

std::vector<int64_t> Ranks::deal(const std::vector<std::vector<int64_t>>& for_ranks) const {
  if (size() == 1) return for_ranks.at(0);
  const watch::PartOf scope("checkpoint");
  const tape::Pause off_tape;
  std::vector<int64_t> numbers, counts;
  for (const std::vector<int64_t>& each : for_ranks) {
    numbers.insert(numbers.end(), each.begin(), each.end());
    counts.push_back(int64_t(each.size()));
  }
  const at::Tensor dealt = at::tensor(numbers, at::kLong).to(serried::detail::device_of(group_));
  const at::Tensor received = all_to_all(dealt, group_, {.split_sizes = counts}).cpu().contiguous();
  const auto* const first = received.const_data_ptr<int64_t>();
  return {first, first + received.numel()};
}

void Ranks::compare(const std::string& mine) const {
  if (size() == 1) return;
  const watch::PartOf scope("checkpoint");
  const auto difference = serried::detail::first_difference(mine, group_);
  if (!difference) return;
  const auto shown = [](const std::optional<std::string>& line) { return line ? *line : std::string("nothing more"); };
  fail(
      c10::str("ranks save different things: rank 0 has ", shown(difference->first), ", rank ", difference->rank,
               " has ", shown(difference->other)),
      "save the same names, sizes and values on every rank; plain parameters that differ between ranks have to be made "
      "equal first, with DistributedDataParallel or broadcast_");
}

}  // namespace serried::checkpoint::detail
