// Collects what is saved, compares it between ranks, and finds out who else has it.
#include "serried/checkpoint/plan.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/limits.h"
#include "serried/checkpoint/values.h"
#include "serried/checkpoint/writer.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/parts.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

constexpr int64_t kHashedWhole = int64_t(64) << 10;
constexpr int64_t kPage = 4096;
constexpr int64_t kHashedOfPage = 256;

// Ranks that train apart differ nearly everywhere, so that of large tensors a part of each page tells enough.
uint64_t fingerprint(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  const bool is_ready = tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
  const at::Tensor bytes = is_ready ? tensor : bytes_to_write(tensor);
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  const int64_t size = int64_t(bytes.nbytes());
  if (size <= kHashedWhole) return hash_of(data, size);
  uint64_t hash = 0;
  for (int64_t at = 0; at < size; at += kPage) {
    hash = hash * 0x9e3779b97f4a7c15ull + hash_of(data + at, std::min(kHashedOfPage, size - at));
  }
  return hash;
}

void check_placements(const std::string& entry, const std::string& name, const Spec& spec) {
  for (const Placement& placement : spec.placements) {
    if (!placement.is_partial()) continue;
    fail(c10::str("\"", entry, ".", name, "\" is ", spec.to_string(), ": no rank holds values of the whole"),
         "redistribute it to Replicate or Shard first");
  }
}

void check_can_save(const std::string& entry, const std::string& name, const at::Tensor& tensor) {
  // Made only where it is needed: there may be many thousands.
  const auto what = [&] { return c10::str("\"", entry, ".", name, "\", ", watch::describe_tensor(tensor), ","); };
  const DistMeta* meta = dist_meta(tensor.unsafeGetTensorImpl());
  if (meta != nullptr && dtensor_meta(tensor) == nullptr) {
    fail(c10::str(what(), " is a ", meta->kind->name), c10::str("save ", meta->kind->to_plain, " of it"));
  }
  if (tensor.layout() != at::kStrided) {
    fail(c10::str(what(), " has the layout ", tensor.layout()), "save it dense: x.to_dense()");
  }
  if (tensor.device().is_meta()) fail(what() + " is on the meta device and has no data", "give it memory first");
  if (!safetensors_dtype(tensor.scalar_type())) {
    fail(c10::str(what(), " has the dtype ", tensor.scalar_type(), ", which safetensors does not have"),
         "save it in another one, a complex one as at::view_as_real(x)");
  }
  if (const SpecPtr spec = spec_of(tensor)) check_placements(entry, name, *spec);
}

struct CollectedItem {
  std::string entry;
  Item item;
  size_t mesh = 0;  // number, of a DTensor
};

// What this rank has.
struct Collected {
  std::vector<CollectedItem> items = {};  // of all ranks
  std::vector<CollectedItem> owned = {};  // of this one alone
  std::vector<DeviceMesh> meshes = {};
  std::map<std::string, std::map<std::string, std::string>> aliases = {};
  json values = json::object();  // the user's
  json entry_values = json::object();
  json entry_owned = json::object();
  json per_rank = json::object();

  size_t number_of(const DeviceMesh& mesh) {
    for (size_t i = 0; i < meshes.size(); ++i) {
      if (meshes[i] == mesh) return i;
    }
    meshes.push_back(mesh);
    return meshes.size() - 1;
  }

  void add(const std::string& entry, Item item) {
    check_can_save(entry, item.name, item.tensor);
    const SpecPtr spec = spec_of(item.tensor);
    const size_t mesh = spec ? number_of(spec->mesh) : 0;
    (item.holder == Holder::owner ? owned : items).push_back({entry, std::move(item), mesh});
  }

  void add(const std::string& entry, Part part) {
    for (Item& item : part.items) add(entry, std::move(item));
    if (!part.aliases.empty()) aliases[entry] = std::move(part.aliases);
    entry_values[entry] = part.values ? *part.values : json();
    if (part.owned) entry_owned[entry] = *part.owned;
    if (part.per_rank) per_rank[entry] = *part.per_rank;
  }
};

Collected collect(const Contents& contents, const Ranks& ranks) {
  const ParameterNames names = parameter_names(contents);
  const CallContext call{&names, ranks.rank(), ranks.size()};
  Collected all;
  for (const Entry& entry : contents) {
    check_entry_name(entry.name);
    if (all.values.contains(entry.name) || all.entry_values.contains(entry.name)) {
      fail(c10::str("the name \"", entry.name, "\" is there twice"), "give each thing a name of its own");
    }
    if (Source* source = source_of(entry.value)) {
      all.add(entry.name, source->collect(call));
      continue;
    }
    std::vector<Item> items;
    all.values[entry.name] = json_of(entry.value, entry.name, items);
    for (Item& item : items) all.add(kValuesEntry, std::move(item));
  }
  return all;
}

// Of a hot loop: plain appends, no streams.
void append_looks(std::string& text, const CollectedItem& collected, bool with_content) {
  const at::Tensor& tensor = collected.item.tensor;
  text.append(collected.entry).append(".").append(collected.item.name).append(" ");
  if (const SpecPtr spec = spec_of(tensor)) {
    text.append(spec->to_string()).append(", its mesh number ").append(std::to_string(collected.mesh));
  } else {
    text.append(watch::dtype_name(tensor.scalar_type())).append(serried::detail::sizes_text(tensor.sizes()));
    const bool is_compared = with_content && collected.item.holder == Holder::all;
    if (is_compared) text.append(" of content ").append(std::to_string(fingerprint(tensor)));
  }
  text += '\n';
}

// A line for each value, two levels deep: of an optimizer the parameter that differs is named.
void append_values(std::string& text, const std::string& name, const json& value, int depth) {
  if (!value.is_object() || depth == 0) {
    text.append(name).append(" = ").append(value.dump()).append("\n");
    return;
  }
  for (const auto& [key, inner] : value.items()) append_values(text, name + "." + key, inner, depth - 1);
}

// Line by line what must be the same on all ranks.
std::string common_text(const Collected& all, bool with_content) {
  std::string text;
  for (const CollectedItem& item : all.items) append_looks(text, item, with_content);
  for (const auto& [name, value] : all.values.items()) append_values(text, name, value, 2);
  for (const auto& [entry, value] : all.entry_values.items()) append_values(text, entry, value, 2);
  return text;
}

// What the other ranks need to know of this one.
std::string message_of(const Collected& all) {
  json meshes = json::array();
  for (const DeviceMesh& mesh : all.meshes) {
    meshes.push_back({{"rank", mesh.get_rank()}, {"ranks", mesh.rank_list()}});
  }
  json owned = json::array();
  for (const CollectedItem& each : all.owned) {
    owned.push_back({each.entry, each.item.name, int(each.item.tensor.scalar_type()), each.item.tensor.sizes().vec()});
  }
  return json({{"meshes", meshes}, {"owned", owned}, {"entry_owned", all.entry_owned}, {"per_rank", all.per_rank}})
      .dump();
}

// The sets of ranks that each have a whole copy on a mesh of one number: sub-meshes of a larger one differ by rank.
struct MeshCopies {
  int64_t count = 0;
  int64_t mine = -1;
};

MeshCopies copies_of(size_t number, const DeviceMesh& mesh, const std::vector<json>& messages) {
  std::map<std::vector<int64_t>, std::vector<int64_t>> members;  // by ranks of the mesh: who of them is here
  std::vector<std::vector<int64_t>> order;
  for (const json& message : messages) {
    const json& theirs = message["meshes"].at(number);
    const auto list = theirs["ranks"].get<std::vector<int64_t>>();
    if (members.count(list) == 0) order.push_back(list);
    members[list].push_back(theirs["rank"].get<int64_t>());
  }
  for (const std::vector<int64_t>& list : order) {
    const std::vector<int64_t>& here = members[list];
    for (int64_t rank : list) {
      if (std::count(here.begin(), here.end(), rank) == 1) continue;
      fail(c10::str("rank ", rank, " of ", mesh.to_string(), " does not take part"),
           "save with a process_group that has all ranks of the mesh");
    }
  }
  const auto mine = std::find(order.begin(), order.end(), mesh.rank_list());
  return {int64_t(order.size()), int64_t(mine - order.begin())};
}

// Which of those that hold the same part this rank is.
void find_replica(PlannedTensor& tensor, const MeshCopies& copies) {
  const Spec& spec = *tensor.spec;
  const auto coordinate = spec.mesh.get_coordinate();
  int64_t count = 1, number = 0;
  for (size_t axis = 0; axis < spec.placements.size(); ++axis) {
    if (!spec.placements[axis].is_replicate()) continue;
    const int64_t size = spec.mesh.size(int64_t(axis));
    number = number * size + (coordinate ? (*coordinate)[axis] : 0);
    count *= size;
  }
  tensor.num_replicas = copies.count * count;
  tensor.replica = coordinate ? copies.mine * count + number : -1;
}

PlannedTensor planned(const CollectedItem& collected, const Ranks& ranks) {
  const at::Tensor& tensor = collected.item.tensor;
  PlannedTensor result{.entry = collected.entry,
                       .name = collected.item.name,
                       .dtype = tensor.scalar_type(),
                       .sizes = tensor.sizes().vec(),
                       .tensor = tensor,
                       .spec = spec_of(tensor)};
  if (result.spec) return result;
  const bool is_shared = collected.item.holder == Holder::all;
  result.num_replicas = is_shared ? ranks.size() : 1;
  result.replica = is_shared ? ranks.rank() : collected.item.holder == Holder::owner || ranks.is_first() ? 0 : -1;
  return result;
}

// Of several owners, as of groups of ranks that each have all of it, the first writes.
void add_owned(SavePlan& plan, const Collected& all, const std::vector<json>& messages, const Ranks& ranks) {
  std::set<std::pair<std::string, std::string>> seen;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const json& owned = messages[rank]["owned"];
    for (size_t i = 0; i < owned.size(); ++i) {
      if (!seen.emplace(owned[i][0].get<std::string>(), owned[i][1].get<std::string>()).second) continue;
      if (int(rank) == ranks.rank()) {
        plan.tensors.push_back(planned(all.owned[i], ranks));
        continue;
      }
      plan.tensors.push_back({.entry = owned[i][0].get<std::string>(),
                              .name = owned[i][1].get<std::string>(),
                              .dtype = c10::ScalarType(owned[i][2].get<int>()),
                              .sizes = owned[i][3].get<std::vector<int64_t>>(),
                              .replica = -1});
    }
  }
}

// What each rank alone knows, as one value of the checkpoint.
void add_values(SavePlan& plan, const Collected& all, const std::vector<json>& messages) {
  plan.index.values = all.values;
  for (const auto& [entry, values] : all.entry_values.items()) {
    IndexedEntry& indexed = plan.index.entries[entry];
    indexed.values = values;
    const auto aliases = all.aliases.find(entry);
    if (aliases != all.aliases.end()) indexed.aliases = aliases->second;
    for (const json& message : messages) {
      const json& owned = message["entry_owned"];
      if (owned.contains(entry)) indexed.values["owned"].update(owned[entry]);
      const json& per_rank = message["per_rank"];
      if (!per_rank.contains(entry)) continue;
      if (indexed.per_rank.is_null()) indexed.per_rank = json::array();
      indexed.per_rank.push_back(per_rank[entry]);
    }
    // One for all where ranks agree: any number of them can load that.
    const json& list = indexed.per_rank;
    const bool agree =
        list.is_array() && std::all_of(list.begin(), list.end(), [&](const json& v) { return v == list[0]; });
    if (agree) indexed.per_rank = json::array({json(list[0])});
  }
}

void check_names_differ(const SavePlan& plan) {
  std::unordered_set<std::string> seen;
  for (const PlannedTensor& tensor : plan.tensors) {
    if (tensor.name == "__metadata__" || tensor.name.empty()) {
      fail(c10::str("a tensor of \"", tensor.entry, "\" has the name \"", tensor.name, "\""), "give it another name");
    }
    if (seen.insert(tensor.entry + "/" + tensor.name).second) continue;
    fail(c10::str("two tensors of \"", tensor.entry, "\" have the name \"", tensor.name, "\""),
         "give them different names");
  }
}

}  // namespace

ParameterNames parameter_names(const Contents& contents) {
  ParameterNames names;
  const bool is_asked = std::any_of(contents.begin(), contents.end(), [](const Entry& entry) {
    const Source* source = source_of(entry.value);
    return source != nullptr && source->module() == nullptr;
  });
  if (!is_asked) return names;
  for (const Entry& entry : contents) {
    const Source* source = source_of(entry.value);
    if (source == nullptr || source->module() == nullptr) continue;
    for (const auto& item : source->module()->named_parameters()) {
      names[item.value().unsafeGetTensorImpl()].emplace_back(entry.name, item.key());
    }
  }
  return names;
}

Source* source_of(const Value& value) {
  const auto* state = std::get_if<State>(&value.content().content);
  return state == nullptr ? nullptr : state->source().get();
}

SavePlan make_plan(const Contents& contents, const Ranks& ranks) {
  Collected all;
  std::string text;
  std::vector<json> messages;
  const auto tell = [&] {
    all = collect(contents, ranks);
    text = common_text(all, ranks.size() > 1);
    return message_of(all);
  };
  for (const std::string& message : ranks.together(tell)) messages.push_back(json::parse(message));
  ranks.compare(text);
  SavePlan plan;
  plan.index.world_size = ranks.size();
  plan.index.block_bytes = format_limits().block_bytes;
  std::vector<MeshCopies> copies;
  for (size_t i = 0; i < all.meshes.size(); ++i) copies.push_back(copies_of(i, all.meshes[i], messages));
  for (const CollectedItem& item : all.items) {
    plan.tensors.push_back(planned(item, ranks));
    if (plan.tensors.back().spec) find_replica(plan.tensors.back(), copies[item.mesh]);
  }
  add_owned(plan, all, messages, ranks);
  add_values(plan, all, messages);
  check_names_differ(plan);
  lay_out(plan, all.aliases);
  return plan;
}

}  // namespace serried::checkpoint::detail
