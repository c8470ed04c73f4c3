// Compares what ranks have: names by one hash where they are the same, contents by a hash of all bytes.
#include "serried/checkpoint/holders.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <unordered_map>

#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/packed.h"
#include "serried/checkpoint/runs.h"
#include "serried/checkpoint/writer.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/parts.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

constexpr uint64_t kWhole = 1;

constexpr const char* kFixNames =
    "save the same names, sizes and values on every rank; ranks whose modules are different parts of a model, as the "
    "stages of a pipeline are, need names that tell these apart";

[[noreturn]] void fail_for_names(const std::string& entry, const std::string& name) {
  fail(c10::str("two tensors of \"", entry, "\" have the name \"", name, "\""), "give them different names");
}

// What a rank says of each of its items, in order, first those that others may have as well.
struct ItemKey {
  uint64_t part;
  uint64_t mesh;
};

uint64_t text_hash(const std::string& text) {
  return hash_of(text.data(), int64_t(text.size()));
}

void append_spans(std::vector<int64_t>& numbers, const Region& region) {
  for (const std::vector<Span>& spans : region.spans) {
    numbers.push_back(int64_t(spans.size()));
    for (const Span& span : spans) numbers.insert(numbers.end(), {span.begin, span.size});
  }
}

uint64_t part_of_spec(const Spec& spec) {
  if (!spec.mesh.contains_this_rank()) return kHoldsNothing;
  std::vector<int64_t> numbers;
  append_spans(numbers, Region::of(spec));
  const Placements rows = rows_instead(spec);
  if (!rows.empty()) append_spans(numbers, Region::of(spec, rows));
  return std::max(hash_of(numbers.data(), int64_t(numbers.size() * sizeof(int64_t))), kWhole);
}

// Specs are interned: of many tensors there are few.
class SpecTexts {
 public:
  struct Known {
    std::string text;
    uint64_t part;
  };
  const Known& of(const Spec& spec) {
    const auto found = known_.find(&spec);
    if (found != known_.end()) return found->second;
    return known_.emplace(&spec, Known{spec.to_string(), part_of_spec(spec)}).first->second;
  }

 private:
  std::unordered_map<const Spec*, Known> known_;
};

std::string looks_of(const CollectedItem& collected, SpecTexts& specs) {
  std::string text = collected.spec ? specs.of(*collected.spec).text
                                    : watch::dtype_name(collected.item.tensor.scalar_type()) +
                                          serried::detail::sizes_text(collected.item.tensor.sizes());
  if (collected.item.holder == Holder::first) text += ", a buffer";
  return text;
}

// A line for each value, two levels deep.
void append_values(std::string& text, const std::string& name, const json& value, int depth) {
  if (!value.is_object() || depth == 0) {
    text.append(name).append(" = ").append(value.dump()).append("\n");
    return;
  }
  for (const auto& [key, inner] : value.items()) append_values(text, name + "." + key, inner, depth - 1);
}

std::string text_of_values(const Collected& mine) {
  std::string text;
  for (const auto& [name, value] : mine.values.items()) append_values(text, name, value, 2);
  return text;
}

// What is the same on all ranks unless they are stages of a pipeline.
std::string text_of_names(const Collected& mine, SpecTexts& specs) {
  std::string text;
  for (const CollectedItem& each : mine.items) {
    text.append(each.entry).append(".").append(each.item.name).append(" ").append(looks_of(each, specs)).append("\n");
  }
  return text + mine.entry_values.dump() + json(mine.aliases).dump();
}

json list_of(const std::vector<CollectedItem>& items) {
  SpecTexts specs;
  json list = json::array();
  for (const CollectedItem& each : items) {
    const at::Tensor& tensor = each.item.tensor;
    list.push_back({each.entry, each.item.name, int(tensor.scalar_type()), tensor.sizes().vec(), int(each.item.holder),
                    looks_of(each, specs)});
  }
  return list;
}

// What the others need to know where names differ.
json names_of(const Collected& mine) {
  return {{"items", list_of(mine.items)}, {"entry_values", mine.entry_values}, {"aliases", mine.aliases}};
}

// What a rank has said.
struct Said {
  json head;
  std::vector<ItemKey> keys;
};

std::vector<Said> parsed(const std::vector<std::string>& messages) {
  std::vector<Said> said;
  for (const std::string& message : messages) {
    const size_t end = message.find('\n');
    said.push_back({json::parse(message.substr(0, end)), unpacked<ItemKey>(message.substr(end + 1))});
  }
  return said;
}

bool agree_on(const std::vector<Said>& said, const char* what) {
  return std::all_of(said.begin(), said.end(), [&](const Said& each) { return each.head[what] == said[0].head[what]; });
}

Shared shared_by_all(const Collected& mine, const std::vector<Said>& said) {
  Shared shared;
  for (size_t i = 0; i < mine.items.size(); ++i) {
    const Item& item = mine.items[i].item;
    SharedItem& each = shared.items.emplace_back(
        SharedItem{mine.items[i].entry, item.name, item.tensor.scalar_type(), item.tensor.sizes().vec(), item.holder});
    each.held.reserve(said.size());
    for (size_t rank = 0; rank < said.size(); ++rank) each.held.push_back({int(rank), i, said[rank].keys.at(i).part});
  }
  shared.aliases = mine.aliases;
  shared.entry_values = mine.entry_values;
  return shared;
}

// A rank that forgot something looks like this; stages of a pipeline do not.
void check_none_has_less(const std::vector<json>& names) {
  std::map<std::set<std::string>, size_t> kinds;  // the first rank of each
  for (size_t rank = 0; rank < names.size(); ++rank) {
    std::set<std::string> mine;
    for (const json& item : names[rank]["items"]) {
      mine.insert(item[0].get<std::string>() + "." + item[1].get<std::string>());
    }
    for (const auto& [entry, values] : names[rank]["entry_values"].items()) mine.insert(entry);
    kinds.emplace(std::move(mine), rank);
  }
  for (const auto& [less, rank] : kinds) {
    for (const auto& [more, other] : kinds) {
      if (rank == other || !std::includes(more.begin(), more.end(), less.begin(), less.end())) continue;
      std::vector<std::string> lacking;
      std::set_difference(more.begin(), more.end(), less.begin(), less.end(), std::back_inserter(lacking));
      fail(c10::str("ranks save different things: rank ", other, " has \"", lacking[0], "\", and rank ", rank,
                    " does not, nor anything that rank ", other, " lacks"),
           kFixNames);
    }
  }
}

// Builds the union, rank by rank.
class NameJoiner {
 public:
  /// `first` is the number of the first item among that rank's.
  void add_items(int rank, const json& items, const std::vector<ItemKey>& keys, size_t first) {
    for (size_t i = 0; i < items.size(); ++i) add_item({rank, first + i, keys.at(first + i).part}, items[i]);
  }

  void add_entries(int rank, const json& names) {
    for (const auto& [entry, values] : names["entry_values"].items()) values_[entry].emplace_back(rank, values);
    for (const auto& [entry, aliases] : names["aliases"].items()) {
      for (const auto& [alias, name] : aliases.items()) {
        aliases_[{entry, alias}].push_back({rank, name.get<std::string>()});
      }
    }
  }

  Shared result() && {
    for (const auto& [name, said] : aliases_) {
      const auto item = places_.find(name);
      item == places_.end() ? add_alias(name, said) : hold_by_alias(item->second, said);
    }
    for (const auto& [entry, of_ranks] : values_) shared_.entry_values[entry] = joined_values(entry, of_ranks);
    return std::move(shared_);
  }

 private:
  using EntryAndName = std::pair<std::string, std::string>;
  struct AliasOf {
    int rank;
    std::string name;
  };

  void add_alias(const EntryAndName& alias, const std::vector<AliasOf>& said) {
    for (const AliasOf& each : said) {
      if (each.name == said[0].name) continue;
      fail(c10::str("\"", alias.first, ".", alias.second, "\" is \"", said[0].name, "\" on rank ", said[0].rank,
                    ", and \"", each.name, "\" on rank ", each.rank),
           kFixNames);
    }
    shared_.aliases[alias.first][alias.second] = said[0].name;
  }

  // What one rank has under another name is the only name of it elsewhere, as of an embedding that the last stage of a
  // pipeline has as well: then the ranks hold it together.
  void hold_by_alias(size_t place, const std::vector<AliasOf>& said) {
    SharedItem& item = shared_.items[place];
    for (const AliasOf& each : said) {
      const size_t theirs = places_.at({item.entry, each.name});
      compare_looks(place, item.held[0].rank, theirs, each.rank);
      const auto is_theirs = [&](const HeldBy& held) { return held.rank == each.rank; };
      const std::vector<HeldBy>& held = shared_.items[theirs].held;
      item.held.push_back(*std::find_if(held.begin(), held.end(), is_theirs));
    }
    std::sort(item.held.begin(), item.held.end(), [](const HeldBy& a, const HeldBy& b) { return a.rank < b.rank; });
  }

  void compare_looks(size_t place, int first, size_t other, int rank) const {
    if (looks_[place] != looks_[other]) fail_for_looks(shared_.items[place], looks_[place], first, looks_[other], rank);
  }

  [[noreturn]] static void fail_for_looks(const SharedItem& item, const std::string& looks, int first,
                                          const std::string& others, int rank) {
    fail(c10::str("ranks save different things: \"", item.entry, ".", item.name, "\" is ", looks, " on rank ", first,
                  ", and ", others, " on rank ", rank),
         kFixNames);
  }

  void add_item(const HeldBy& held, const json& item) {
    const auto entry = item[0].get<std::string>(), name = item[1].get<std::string>(),
               looks = item[5].get<std::string>();
    const auto [place, is_new] = places_.emplace(std::pair(entry, name), shared_.items.size());
    if (is_new) {
      shared_.items.push_back({entry, name, c10::ScalarType(item[2].get<int>()), item[3].get<std::vector<int64_t>>(),
                               Holder(item[4].get<int>())});
      looks_.push_back(looks);
    } else if (looks_[place->second] != looks) {
      const SharedItem& first = shared_.items[place->second];
      fail_for_looks(first, looks_[place->second], first.held[0].rank, looks, held.rank);
    }
    std::vector<HeldBy>& all = shared_.items[place->second].held;
    if (!all.empty() && all.back().rank == held.rank) fail_for_names(entry, name);
    all.push_back(held);
  }

  Shared shared_;
  std::map<EntryAndName, size_t> places_;
  std::map<EntryAndName, std::vector<AliasOf>> aliases_;
  std::vector<std::string> looks_;
  std::map<std::string, std::vector<std::pair<int, json>>> values_;
};

// Ranks with the same names have copies of one stage, whose buffers may differ, and the first counts. Of different
// stages none is the first.
void compare_buffers_of_stages(Shared& shared, const std::vector<json>& names) {
  std::vector<std::string> stages;
  for (const json& each : names) stages.push_back(each["items"].dump());
  for (SharedItem& item : shared.items) {
    const auto is_elsewhere = [&](const HeldBy& held) {
      return stages[size_t(held.rank)] != stages[size_t(item.held[0].rank)];
    };
    if (std::any_of(item.held.begin(), item.held.end(), is_elsewhere)) item.holder = Holder::all;
  }
}

Shared shared_by_some(const Collected& mine, const std::vector<Said>& said, const Ranks& ranks) {
  std::vector<json> names;
  for (const std::string& text : ranks.together([&] { return names_of(mine).dump(); })) {
    names.push_back(json::parse(text));
  }
  NameJoiner joiner;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    joiner.add_items(int(rank), names[rank]["items"], said[rank].keys, 0);
    joiner.add_entries(int(rank), names[rank]);
  }
  check_none_has_less(names);
  Shared shared = std::move(joiner).result();
  compare_buffers_of_stages(shared, names);
  return shared;
}

// Of several owners, as of groups of ranks that each have all of it, each has a copy.
void add_owned(Shared& shared, const std::vector<Said>& said) {
  NameJoiner joiner;
  for (size_t rank = 0; rank < said.size(); ++rank) {
    const json& owned = said[rank].head["owned"];
    joiner.add_items(int(rank), owned, said[rank].keys, said[rank].keys.size() - owned.size());
  }
  for (SharedItem& item : std::move(joiner).result().items) shared.items.push_back(std::move(item));
}

// Of the ranks of a mesh all take part, each as often as there are copies.
void check_mesh_ranks(const std::map<std::vector<int64_t>, std::vector<int64_t>>& here, const std::string& name) {
  for (const auto& [list, present] : here) {
    const auto copies = std::count(present.begin(), present.end(), present[0]);
    for (int64_t rank : list) {
      if (std::count(present.begin(), present.end(), rank) == copies) continue;
      fail(c10::str("rank ", rank, " of the mesh of \"", name, "\" does not take part"),
           "save on every rank, inside of a ProcessGroupGuard or with a .process_group that has all ranks of the mesh");
    }
  }
}

void check_meshes(const Shared& shared, const std::vector<Said>& said) {
  std::set<std::vector<uint64_t>> seen;  // few items have a set of meshes that none before has had
  std::vector<uint64_t> meshes, last;
  for (const SharedItem& item : shared.items) {
    meshes.clear();
    for (const HeldBy& held : item.held) {
      meshes.insert(meshes.end(), {uint64_t(held.rank), said[size_t(held.rank)].keys[held.number].mesh});
    }
    if (meshes == last) continue;
    last = meshes;
    if (!seen.insert(meshes).second) continue;
    std::map<std::vector<int64_t>, std::vector<int64_t>> here;  // by the ranks of a mesh: who of them is here
    for (const HeldBy& held : item.held) {
      const Said& theirs = said[size_t(held.rank)];
      const uint64_t number = theirs.keys[held.number].mesh;
      if (number == 0 || held.part == kHoldsNothing) continue;
      const json& mesh = theirs.head["meshes"].at(number - 1);
      here[mesh["ranks"].get<std::vector<int64_t>>()].push_back(mesh["rank"].get<int64_t>());
    }
    check_mesh_ranks(here, item.entry + "." + item.name);
  }
}

bool has_copies(const SharedItem& item) {
  if (item.holder == Holder::first || item.held.size() < 2) return false;
  if (item.held[0].part == item.held[1].part && item.held[0].part != kHoldsNothing) return true;
  if (item.held.size() == 2) return false;
  std::vector<uint64_t> parts;
  for (const HeldBy& held : item.held) parts.push_back(held.part);
  std::sort(parts.begin(), parts.end());
  const auto first = std::upper_bound(parts.begin(), parts.end(), kHoldsNothing);
  return std::adjacent_find(first, parts.end()) != parts.end();
}

uint64_t hash_of_part(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const serried::detail::LocalOnly local_only;
  const at::Tensor bytes = bytes_to_write(part_of(tensor));
  return hash_of(bytes.const_data_ptr(), int64_t(bytes.nbytes()));
}

// `hash_on(held)` is what that rank has found.
template <class HashOn>
void check_copies(const SharedItem& item, const HashOn& hash_on) {
  std::map<uint64_t, std::pair<int, uint64_t>> first;  // by part: a rank and its hash
  std::vector<int> others;
  int one = 0;
  for (const HeldBy& held : item.held) {
    const uint64_t hash = hash_on(held);
    const auto [known, is_new] = first.emplace(held.part, std::pair(held.rank, hash));
    if (is_new || known->second.second == hash || held.part == kHoldsNothing) continue;
    if (others.empty()) one = known->second.first;
    if (known->second.first == one) others.push_back(held.rank);
  }
  if (others.empty()) return;
  fail(c10::str("\"", item.entry, ".", item.name, "\", ", watch::dtype_name(item.dtype),
                serried::detail::sizes_text(item.sizes), ", has other values on ", serried::detail::rank_list(others),
                " than on rank ", one),
       "make copies equal first, with DistributedDataParallel or broadcast_; what is no copy needs another name, as in "
       "the stages of a pipeline");
}

void compare_copies(const Shared& shared, const Collected& mine, const Ranks& ranks) {
  std::vector<const SharedItem*> copied;
  for (const SharedItem& item : shared.items) {
    if (has_copies(item)) copied.push_back(&item);
  }
  if (copied.empty()) return;
  const auto texts = ranks.together([&] {
    std::vector<uint64_t> hashes;
    for (const SharedItem* item : copied) {
      for (const HeldBy& held : item->held) {
        if (held.rank == ranks.rank()) hashes.push_back(hash_of_part(mine.item(held.number).item.tensor));
      }
    }
    return packed(hashes);
  });
  std::vector<std::vector<uint64_t>> hashes;
  for (const std::string& text : texts) hashes.push_back(unpacked<uint64_t>(text));
  std::vector<size_t> next(hashes.size(), 0);
  for (const SharedItem* item : copied) {
    check_copies(*item, [&](const HeldBy& held) {
      const auto rank = size_t(held.rank);
      return hashes[rank].at(next[rank]++);
    });
  }
}

}  // namespace

std::string message_of(const Collected& mine) {
  json meshes = json::array();
  for (const DeviceMesh& mesh : mine.meshes) {
    meshes.push_back({{"rank", mesh.get_rank()}, {"ranks", mesh.rank_list()}});
  }
  SpecTexts specs;
  const json head = {{"meshes", meshes},
                     {"owned", list_of(mine.owned)},
                     {"entry_owned", mine.entry_owned},
                     {"per_rank", mine.per_rank},
                     {"names", text_hash(text_of_names(mine, specs))},
                     {"values", text_hash(text_of_values(mine))}};
  std::vector<ItemKey> keys;
  for (size_t i = 0; i < mine.items.size() + mine.owned.size(); ++i) {
    const CollectedItem& each = mine.item(i);
    keys.push_back({each.spec ? specs.of(*each.spec).part : kWhole, each.spec ? each.mesh + 1 : 0});
  }
  return head.dump() + "\n" + packed(keys);
}

Shared shared_of(const Collected& mine, const std::vector<std::string>& messages, const Ranks& ranks) {
  std::vector<Said> said = parsed(messages);
  if (!agree_on(said, "values")) ranks.compare(text_of_values(mine));
  Shared shared = agree_on(said, "names") ? shared_by_all(mine, said) : shared_by_some(mine, said, ranks);
  add_owned(shared, said);
  check_meshes(shared, said);
  if (ranks.size() > 1) compare_copies(shared, mine, ranks);
  for (Said& each : said) shared.messages.push_back(std::move(each.head));
  return shared;
}

}  // namespace serried::checkpoint::detail
