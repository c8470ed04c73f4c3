// Asks each thing of a call for what it saves, and refuses what cannot be written.
#include "serried/checkpoint/collect.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/values.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/parts.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

void check_placements(const std::string& entry, const std::string& name, const Spec& spec) {
  for (const Placement& placement : spec.placements) {
    if (!placement.is_partial()) continue;
    fail(c10::str("\"", entry, ".", name, "\" is ", spec.to_string(), ": no rank holds values of the whole"),
         "redistribute it to Replicate or Shard first");
  }
}

size_t number_of(const DeviceMesh& mesh, std::vector<DeviceMesh>& meshes) {
  const auto found = std::find(meshes.begin(), meshes.end(), mesh);
  if (found != meshes.end()) return size_t(found - meshes.begin());
  meshes.push_back(mesh);
  return meshes.size() - 1;
}

void add(Collected& all, const std::string& entry, Item item) {
  check_can_save(entry, item.name, item.tensor);
  if (!is_utf8(item.name)) {
    fail(c10::str("a name of \"", entry, "\" is not UTF-8: \"", serried::detail::printable(item.name), "\""),
         "give it another name: the format takes no other");
  }
  const SpecPtr spec = spec_of(item.tensor);
  const size_t mesh = spec ? number_of(spec->mesh, all.meshes) : 0;
  (item.holder == Holder::owner ? all.owned : all.items).push_back({entry, std::move(item), spec, mesh});
}

void add(Collected& all, const std::string& entry, Part part) {
  for (Item& item : part.items) add(all, entry, std::move(item));
  if (!part.aliases.empty()) all.aliases[entry] = std::move(part.aliases);
  all.entry_values[entry] = part.values ? *part.values : json();
  if (part.owned) all.entry_owned[entry] = *part.owned;
  if (part.per_rank) all.per_rank[entry] = *part.per_rank;
}

}  // namespace

void check_can_save(const std::string& entry, const std::string& name, const at::Tensor& tensor) {
  // Made only where it is needed: there may be many thousands.
  const auto what = [&] {
    return c10::str("\"", entry, entry.empty() ? "" : ".", name, "\", ", watch::describe_tensor(tensor), ",");
  };
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
      add(all, entry.name, source->collect(call));
      continue;
    }
    std::vector<Item> items;
    all.values[entry.name] = json_of(entry.value, entry.name, items);
    for (Item& item : items) add(all, kValuesEntry, std::move(item));
  }
  return all;
}

}  // namespace serried::checkpoint::detail
