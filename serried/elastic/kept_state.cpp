// Enumerates what checkpoint states have, and finds the places of what comes.
#include "serried/elastic/kept_state.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <map>

#include "serried/checkpoint/collect.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/values.h"
#include "serried/comm/collectives/watch.h"
#include "serried/elastic/what_travels.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/parts.h"

namespace serried::detail {
namespace {

using checkpoint::Contents;
using checkpoint::Entry;
using checkpoint::detail::CallContext;
using checkpoint::detail::fail;
using checkpoint::detail::FileTensor;
using checkpoint::detail::Holder;
using checkpoint::detail::Item;
using checkpoint::detail::ParameterNames;
using checkpoint::detail::Part;
using checkpoint::detail::SavedPart;
using checkpoint::detail::Target;
using checkpoint::detail::Wanted;
using nlohmann::json;

constexpr const char* kInstead =
    "keep what every rank has whole; what is spread is built anew for the ranks that are left, in a function for "
    "Elastic::rebuild";

void check_item(const std::string& entry, const Item& item) {
  checkpoint::detail::check_can_save(entry, item.name, item.tensor);
  if (const SpecPtr spec = spec_of(item.tensor)) {
    fail(c10::str("\"", entry, ".", item.name, "\" is ", spec->to_string(),
                  ", bound to the ranks of a mesh: if one is lost, no other rank can go on with its part"),
         kInstead);
  }
  check_utf8(entry, item);
}

void check_part(const std::string& entry, const Part& part) {
  if (part.owned) {
    fail(c10::str("the state of \"", entry, "\" is spread over the ranks, as ZeroRedundancyOptimizer's is"), kInstead);
  }
  check_not_per_rank(entry, part);
}

void add_part(KeptState& state, const std::string& entry, const Part& part) {
  check_part(entry, part);
  for (const Item& item : part.items) {
    check_item(entry, item);
    state.tensors.push_back({entry, item.name, item.tensor, item.holder == Holder::first});
  }
  state.values[entry] = part.values ? *part.values : json();
  state.aliases[entry] = part.aliases;
}

void add_value(KeptState& state, const Entry& entry) {
  std::vector<Item> items;
  state.values[entry.name] = checkpoint::detail::json_of(entry.value, entry.name, items);
  for (const Item& item : items) {
    check_item(entry.name, item);
    state.tensors.push_back({entry.name, item.name, item.tensor});
  }
}

SavedPart saved_part(const json& manifest, const std::string& entry) {
  SavedPart saved;
  for (const json& each : manifest.at("tensors")) {
    if (each.at("entry") != entry) continue;
    saved.tensors.push_back(
        {.name = each.at("name"), .dtype = c10::ScalarType(each.at("dtype").get<int>()), .sizes = each.at("sizes")});
  }
  saved.aliases = manifest.at("aliases").value(entry, std::map<std::string, std::string>());
  const json& values = manifest.at("values").at(entry);
  if (!values.is_null()) saved.values = std::make_shared<const json>(values);
  return saved;
}

void check_wanted(const std::string& entry, const Wanted& wanted, int from) {
  if (!wanted.missing.empty() || !wanted.extra.empty()) {
    fail(c10::str("\"", entry, "\" has other names on rank ", from, ": ",
                  checkpoint::detail::differences_of_names(wanted)),
         "keep the same modules and optimizers on every rank");
  }
  if (wanted.twins.empty()) return;
  fail(c10::str("\"", wanted.twins[0].first, "\" and \"", wanted.twins[0].second, "\" of \"", entry,
                "\" are one tensor here and two on rank ", from),
       "tie the same weights on every rank");
}

void check_looks(const KeptTensor& mine, const json& theirs, int from) {
  const auto dtype = c10::ScalarType(theirs.at("dtype").get<int>());
  const auto sizes = theirs.at("sizes").get<std::vector<int64_t>>();
  if (mine.tensor.scalar_type() == dtype && mine.tensor.sizes() == sizes) return;
  fail(c10::str("\"", mine.full_name(), "\" is ", watch::describe_tensor(mine.tensor), " here and ",
                c10::toString(dtype), " of sizes ", c10::IntArrayRef(sizes), " on rank ", from),
       "build the same modules and optimizers on every rank");
}

}  // namespace

KeptState kept_state(const Contents& contents) {
  const ParameterNames names = checkpoint::detail::parameter_names(contents);
  const CallContext call{&names};
  KeptState state;
  for (const Entry& entry : contents) {
    if (auto* source = checkpoint::detail::source_of(entry.value)) {
      add_part(state, entry.name, source->collect(call));
    } else {
      add_value(state, entry);
    }
  }
  return state;
}

std::string lines_of(const KeptState& state, bool buffers) {
  std::string lines;
  for (const KeptTensor& each : state.tensors) {
    if (each.is_buffer != buffers) continue;
    lines += c10::str(each.full_name(), " ", watch::describe_tensor(each.tensor), " with hash ",
                      hash_of_bytes(bytes_of_tensor(each.tensor)), "\n");
  }
  if (buffers) return lines;
  for (const auto& [entry, values] : state.values.items()) lines += entry + " " + text_of(values) + "\n";
  return lines;
}

json manifest_of(const KeptState& state) {
  json tensors = json::array();
  for (const KeptTensor& each : state.tensors) {
    tensors.push_back({{"entry", each.entry},
                       {"name", each.name},
                       {"dtype", int(each.tensor.scalar_type())},
                       {"sizes", each.tensor.sizes().vec()},
                       {"is_buffer", each.is_buffer}});
  }
  return {{"tensors", std::move(tensors)}, {"values", state.values}, {"aliases", state.aliases}};
}

Incoming incoming_state(const Contents& contents, const json& manifest, int from) {
  const ParameterNames names = checkpoint::detail::parameter_names(contents);
  const CallContext call{&names};
  Incoming incoming;
  std::map<std::pair<std::string, std::string>, at::Tensor> places;
  for (const Entry& entry : contents) {
    Wanted wanted;
    if (auto* source = checkpoint::detail::source_of(entry.value)) {
      wanted = source->want(saved_part(manifest, entry.name), {}, call);
    } else {
      checkpoint::detail::want_value(entry.value, entry.name, manifest.at("values").at(entry.name), wanted);
    }
    check_wanted(entry.name, wanted, from);
    for (const Target& target : wanted.targets) places[{entry.name, target.saved_name}] = target.tensor;
    if (wanted.apply) incoming.apply.push_back(std::move(wanted.apply));
  }
  for (const json& each : manifest.at("tensors")) {
    const KeptTensor mine{each.at("entry"), each.at("name"), places[{each.at("entry"), each.at("name")}]};
    if (!mine.tensor.defined()) {
      fail(c10::str("\"", mine.full_name(), "\" of rank ", from, " has no place here"),
           "keep the same things on every rank");
    }
    check_looks(mine, each, from);
    incoming.tensors.push_back(mine.tensor);
  }
  return incoming;
}

}  // namespace serried::detail
