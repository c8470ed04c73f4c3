// Enumerates what is spread, and finds places for what comes.
#include "serried/elastic/spread_state.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <map>
#include <set>

#include "serried/checkpoint/collect.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/values.h"
#include "serried/comm/collectives/watch.h"
#include "serried/elastic/what_travels.h"
#include "serried/parallel/zero/optimizer.h"
#include "serried/tensor/parts.h"

namespace serried::detail {
namespace {

using checkpoint::Contents;
using checkpoint::Entry;
using checkpoint::detail::CallContext;
using checkpoint::detail::fail;
using checkpoint::detail::Holder;
using checkpoint::detail::Item;
using checkpoint::detail::ParameterNames;
using checkpoint::detail::Part;
using checkpoint::detail::Region;
using checkpoint::detail::SavedPart;
using checkpoint::detail::Source;
using checkpoint::detail::Wanted;
using nlohmann::json;

// Where `tensor` lies; nothing where another mesh has it.
std::optional<SpreadPart> part_of_tensor(const std::string& entry, const std::string& name, const at::Tensor& tensor) {
  SpreadPart part{.entry = entry, .name = name, .dtype = tensor.scalar_type(), .tensor = tensor};
  const SpecPtr spec = spec_of(tensor);
  if (spec && !spec->mesh.contains_this_rank()) return std::nullopt;
  part.region = spec ? Region::of(*spec) : Region::whole(tensor.sizes());
  return part;
}

void add_item(SpreadState& state, const std::string& entry, const Item& item) {
  checkpoint::detail::check_can_save(entry, item.name, item.tensor);
  check_utf8(entry, item);
  auto part = part_of_tensor(entry, item.name, item.tensor);
  if (!part) return;
  part->is_buffer = item.holder == Holder::first;
  state.parts.push_back(std::move(*part));
}

// Of an optimizer that deals its parameters out: those that this rank has, whether they have a state yet or not.
json names_dealt_to_this_rank(const ZeroOptimizer& optimizer, const json& values) {
  json names = json::array();
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    std::set<const c10::TensorImpl*> seen;
    for (const at::Tensor& parameter : optimizer.param_groups()[g].params()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
      if (optimizer.owner_of(parameter) != optimizer.process_group()->getRank()) continue;
      names.push_back(values.at("groups").at(g).at("params").at(seen.size() - 1));
    }
  }
  return names;
}

void add_source(SpreadState& state, const std::string& entry, Source& source, const CallContext& call) {
  const Part part = source.collect(call);
  check_not_per_rank(entry, part);
  for (const Item& item : part.items) add_item(state, entry, item);
  state.values[entry] = part.values ? *part.values : json();
  state.aliases[entry] = part.aliases;
  if (!part.owned) return;
  state.owned[entry] = *part.owned;
  if (const auto* zero = dynamic_cast<const ZeroOptimizer*>(source.optimizer())) {
    state.owners[entry] = names_dealt_to_this_rank(*zero, *part.values);
  }
}

SavedPart saved_part(const SpreadState& whole, const std::string& entry) {
  SavedPart saved;
  for (const SpreadPart& part : whole.parts) {
    if (part.entry != entry) continue;
    saved.tensors.push_back({.name = part.name, .dtype = part.dtype, .sizes = part.region.sizes});
  }
  saved.aliases = whole.aliases.value(entry, std::map<std::string, std::string>());
  const json& values = whole.values.at(entry);
  if (!values.is_null()) saved.values = std::make_shared<const json>(values);
  return saved;
}

void check_wanted(const std::string& entry, const Wanted& wanted) {
  if (!wanted.missing.empty()) {
    fail(c10::str("\"", entry,
                  "\" has names that no other rank has: ", checkpoint::detail::list_of_names(wanted.missing)),
         "build the same modules and optimizers whenever ranks change");
  }
  if (wanted.twins.empty()) return;
  fail(c10::str("\"", wanted.twins[0].first, "\" and \"", wanted.twins[0].second, "\" of \"", entry,
                "\" are one tensor here and were two before"),
       "tie the same weights whenever ranks change");
}

void check_looks(const SpreadPart& mine, const SpreadPart& theirs) {
  if (mine.dtype == theirs.dtype && mine.region.sizes == theirs.region.sizes) return;
  fail(c10::str("\"", mine.full_name(), "\" is ", watch::describe_tensor(mine.tensor), " here, and was ",
                c10::toString(theirs.dtype), " of sizes ", c10::IntArrayRef(theirs.region.sizes), " before"),
       "build the same modules and optimizers whenever ranks change");
}

}  // namespace

void to_json(json& to, const SpreadPart& part) {
  json spans = json::array();
  for (const auto& of_dim : part.region.spans) {
    json& each = spans.emplace_back(json::array());
    for (const Span& span : of_dim) each.push_back({span.begin, span.size});
  }
  to = {{"entry", part.entry},        {"name", part.name}, {"dtype", int(part.dtype)},
        {"sizes", part.region.sizes}, {"spans", spans},    {"is_buffer", part.is_buffer}};
}

void from_json(const json& from, SpreadPart& part) {
  part = {.entry = from.at("entry"), .name = from.at("name"), .dtype = c10::ScalarType(from.at("dtype").get<int>())};
  part.region.sizes = from.at("sizes").get<std::vector<int64_t>>();
  for (const json& of_dim : from.at("spans")) {
    auto& spans = part.region.spans.emplace_back();
    for (const json& span : of_dim) spans.push_back({span.at(0), span.at(1)});
  }
  part.is_buffer = from.at("is_buffer");
}

SpreadState spread_state(const Contents& contents) {
  const ParameterNames names = checkpoint::detail::parameter_names(contents);
  const CallContext call{&names};
  SpreadState state;
  for (const Entry& entry : contents) {
    if (auto* source = checkpoint::detail::source_of(entry.value)) {
      add_source(state, entry.name, *source, call);
      continue;
    }
    std::vector<Item> items;
    state.values[entry.name] = checkpoint::detail::json_of(entry.value, entry.name, items);
    for (const Item& item : items) add_item(state, entry.name, item);
  }
  return state;
}

SpreadState copy_of(const SpreadState& state) {
  const at::NoGradGuard no_grad;
  SpreadState copy = state;
  for (SpreadPart& part : copy.parts) part.tensor = part_of(part.tensor).detach().clone();
  return copy;
}

json description_of(const SpreadState& state) {
  return {{"parts", state.parts},
          {"values", state.values},
          {"aliases", state.aliases},
          {"owned", state.owned},
          {"owners", state.owners}};
}

SpreadState described(const json& description) {
  return {.parts = description.at("parts").get<std::vector<SpreadPart>>(),
          .values = description.at("values"),
          .aliases = description.at("aliases"),
          .owned = description.at("owned"),
          .owners = description.at("owners")};
}

SpreadPlaces places_for(const Contents& contents, const SpreadState& whole) {
  const ParameterNames names = checkpoint::detail::parameter_names(contents);
  const CallContext call{&names};
  std::map<std::pair<std::string, std::string>, const SpreadPart*> there;
  for (const SpreadPart& part : whole.parts) there[{part.entry, part.name}] = &part;
  SpreadPlaces places;
  for (const Entry& entry : contents) {
    if (!whole.values.contains(entry.name)) {
      fail(c10::str("\"", entry.name, "\" is new: no rank has a state of it"),
           "return the same names from rebuild() whenever ranks change");
    }
    Wanted wanted;
    if (auto* source = checkpoint::detail::source_of(entry.value)) {
      wanted = source->want(saved_part(whole, entry.name), {}, call);
    } else {
      checkpoint::detail::want_value(entry.value, entry.name, whole.values.at(entry.name), wanted);
    }
    check_wanted(entry.name, wanted);
    for (const auto& target : wanted.targets) {
      auto part = part_of_tensor(entry.name, target.saved_name, target.tensor);
      const auto theirs = there.find({entry.name, target.saved_name});
      if (!part || theirs == there.end()) continue;
      check_looks(*part, *theirs->second);
      part->is_buffer = theirs->second->is_buffer;
      places.parts.push_back(std::move(*part));
    }
    for (const std::string& name : wanted.extra) places.unwanted.emplace_back(entry.name, name);
    if (wanted.apply) places.apply.push_back(std::move(wanted.apply));
  }
  return places;
}

}  // namespace serried::detail
