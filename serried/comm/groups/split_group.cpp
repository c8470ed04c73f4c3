// Groups made of the ranks of a group.
#include "serried/comm/groups/group.h"

#include <algorithm>
#include <set>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/agree/says_that_it_meets.h"
#include "serried/comm/groups/live_groups.h"
#include "serried/comm/groups/named_group.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried {
namespace {

using detail::GroupRecord;

// A group that plain c10d code made tells at least its backend's name.
GroupRecord record_of(c10d::ProcessGroup& parent) {
  if (auto record = detail::find_record(parent)) return *record;
  GroupRecord record;
  record.backend = parent.getDefaultBackend()->getBackendName();
  record.timeout = parent.getStore()->getTimeout();
  record.device = at::Device(parent.getDeviceTypes().front().type());
  return record;
}

void check_parent(const c10d::ProcessGroup* parent) {
  if (parent != nullptr && parent->getStore()) return;
  raise<c10::ValueError>({"split_group", parent == nullptr ? "the parent is null" : "the parent has no store",
                          "pass a group that new_group or split_group made"});
}

void check_parts(const std::vector<std::vector<int>>& parts, int size) {
  std::set<int> seen;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i].empty()) {
      raise<c10::ValueError>({"split_group", c10::str("part ", i, " is empty"), "leave the empty part out"});
    }
    for (int rank : parts[i]) {
      if (rank < 0 || rank >= size) {
        raise<c10::ValueError>({"split_group", c10::str("rank ", rank, " in part ", i, " is not in 0..", size - 1),
                                "list ranks of the parent group, not of the world"});
      }
      if (!seen.insert(rank).second) {
        raise<c10::ValueError>(
            {"split_group", c10::str("rank ", rank, " is listed twice"), "list each rank in one part, once"});
      }
    }
  }
}

std::string to_text(const std::vector<std::vector<int>>& parts) {
  std::string text;
  for (const auto& part : parts) text += c10::str(text.empty() ? "{" : ", {", c10::Join(", ", part), "}");
  return text;
}

// The parent's name without the mark of a rank that is a thread. Unlike the desc it differs between the parts of one
// split, so that parts of parts have names of their own too.
std::string base_name(const c10d::ProcessGroup& parent) {
  const std::string name = parent.getGroupName();
  return name.substr(0, name.find('@'));
}

// Names and keys that all members of one part agree on.
struct Part {
  std::vector<int> ranks;
  std::string prefix;  // in the parent's store
  std::string name;
  std::string desc;
};

Group make_part(c10d::ProcessGroup& parent, const GroupRecord& record, const Part& part) {
  const auto mine = std::find(part.ranks.begin(), part.ranks.end(), parent.getRank());
  FactoryArgs args{.store = c10::make_intrusive<c10d::PrefixStore>(part.prefix, parent.getStore()),
                   .rank = int(mine - part.ranks.begin()),
                   .world_size = int(part.ranks.size()),
                   .timeout = record.timeout,
                   .device = record.device,
                   .options = record.options,
                   .name = {},
                   .desc = part.desc};
  args.name = detail::reserve_name(part.name, parent.getRank(), detail::is_process_local(parent.getStore()));
  Group group = detail::create_group("split_group", record.backend, args);
  detail::note_group(group);
  return group;
}

Group make_own_part(const Group& parent, const std::vector<std::vector<int>>& parts) {
  const GroupRecord record = record_of(*parent);
  record.home.require("split_group");
  const auto store = parent->getStore();
  const int64_t index = store->add(c10::str("serried/splits/", parent->getRank()), 1);
  // A fake group's peers do not exist, so they cannot disagree either; every other parent's must not.
  detail::agree(*store, c10::str("serried/split/", index), "split_group", to_text(parts));
  for (size_t i = 0; i < parts.size(); ++i) {
    if (std::find(parts[i].begin(), parts[i].end(), parent->getRank()) == parts[i].end()) continue;
    const std::string desc = c10::str(parent->getGroupDesc(), ":split:", index);
    return make_part(*parent, record,
                     {parts[i], c10::str("serried/split/", index, "/", i),
                      c10::str(base_name(*parent), ":split:", index, ".", i), desc});
  }
  return nullptr;
}

}  // namespace

Group split_group(const Group& parent, const std::vector<std::vector<int>>& parts) {
  const trace::Span span("split_group", trace::kSetup);
  check_parent(parent.get());
  check_parts(parts, parent->getSize());
  const detail::SaysThatItMeets says("split_group");
  return detail::through_store("split_group", [&] { return make_own_part(parent, parts); });
}

Group detail::NamedGroup::splitGroup(const std::vector<int>& ranks,
                                     const std::optional<std::chrono::milliseconds>& timeout,
                                     const std::optional<c10::intrusive_ptr<c10d::Backend::Options>>&,
                                     const std::optional<std::string>& name, const std::optional<std::string>& desc,
                                     const std::optional<std::vector<c10::Device>>&) {
  check_parts({ranks}, getSize());
  std::vector<int> sorted = ranks;  // as c10d's own splitGroup orders them
  std::sort(sorted.begin(), sorted.end());
  if (!std::binary_search(sorted.begin(), sorted.end(), getRank())) return nullptr;
  GroupRecord record = record_of(*this);
  record.home.require("split_group");
  record.timeout = timeout.value_or(record.timeout);
  // Only members call, so each set of ranks counts for itself.
  const std::string key = c10::str("serried/subset/", c10::Join(",", sorted));
  const int64_t index = getStore()->add(c10::str(key, "/calls/", getRank()), 1);
  const std::string tail = c10::str(":split:", c10::Join(",", sorted), ".", index);
  return make_part(*this, record,
                   {sorted, c10::str(key, "/", index), name.value_or(base_name(*this) + tail),
                    desc.value_or(getGroupDesc() + tail)});
}

}  // namespace serried
