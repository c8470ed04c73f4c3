// How two checkpoints differ: values, what optimizers have of each parameter, tensors.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>

#include "serried/base/text.h"
#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/inspect.h"
#include "serried/checkpoint/inspect_names.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;
using serried::detail::printable;

std::set<std::string> keys_of(const json& first, const json& second) {
  std::set<std::string> keys;
  for (const json* each : {&first, &second}) {
    for (const auto& [key, value] : each->items()) keys.insert(key);
  }
  return keys;
}

bool are_lists_of_objects(const json& first, const json& second) {
  const auto is_object = [](const json& each) { return each.is_object(); };
  return first.is_array() && second.is_array() && first.size() == second.size() &&
         std::all_of(first.begin(), first.end(), is_object) && std::all_of(second.begin(), second.end(), is_object);
}

void compare_values(const std::string& name, const json& first, const json& second, std::vector<std::string>& lines) {
  if (first == second) return;
  // Tensors among values are compared with all the others.
  if (names_tensor(first) && (second.is_null() || names_tensor(second))) return;
  if (names_tensor(second) && first.is_null()) return;
  const auto inside = [&](const std::string& key) { return name.empty() ? key : name + "." + key; };
  if (first.is_object() && second.is_object()) {
    for (const std::string& key : keys_of(first, second)) {
      compare_values(inside(key), first.value(key, json()), second.value(key, json()), lines);
    }
  } else if (are_lists_of_objects(first, second)) {
    for (size_t i = 0; i < first.size(); ++i) compare_values(inside(std::to_string(i)), first[i], second[i], lines);
  } else {
    lines.push_back(c10::str(printable(name), ": ", shown_value(first), " and ", shown_value(second)));
  }
}

// What an optimizer has of its parameters: what differs in the same way, as the number of steps does, is one line.
void compare_parameters(const std::string& entry, const json& first, const json& second,
                        std::vector<std::string>& lines) {
  std::map<std::pair<std::string, std::string>, std::vector<std::string>> by_text;  // names, by field and difference
  const std::string kWhole = "";                                                    // no field: all of its state
  for (const std::string& name : keys_of(first, second)) {
    if (!first.contains(name) || !second.contains(name)) {
      by_text[{kWhole, first.contains(name) ? "only in the first" : "only in the second"}].push_back(name);
      continue;
    }
    for (const std::string& field : keys_of(first[name], second[name])) {
      const json one = first[name].value(field, json()), other = second[name].value(field, json());
      if (one != other) by_text[{field, shown_value(one) + " and " + shown_value(other)}].push_back(name);
    }
  }
  for (const auto& [what, names] : by_text) {
    const auto& [field, text] = what;
    const std::string one = printable(entry + "." + names[0] + (field == kWhole ? "" : "." + field));
    const std::string all = c10::str(printable(entry), ": ", field == kWhole ? "state" : printable(field), " of ",
                                     names.size(), " parameters");
    lines.push_back((names.size() == 1 ? one : all) + ": " + text);
  }
}

void compare_entries(const std::string& name, json first, json second, std::vector<std::string>& lines) {
  const auto has_parameters = [](const json& values) {
    if (!values.is_object() || !values.contains("groups") || !values.contains("owned")) return false;
    const json& owned = values["owned"];
    return owned.is_object() &&
           std::all_of(owned.begin(), owned.end(), [](const json& each) { return each.is_object(); });
  };
  if (has_parameters(first) && has_parameters(second)) {
    compare_parameters(name, first["owned"], second["owned"], lines);
    first.erase("owned");
    second.erase("owned");
  }
  compare_values(name, first, second, lines);
}

// Names of tensors that stand under another one: what is one tensor in one of them may be two in the other.
void compare_aliases(const std::string& entry, const IndexedEntry& first, const IndexedEntry& second,
                     std::vector<std::string>& lines) {
  const auto shown = [&](const std::string& name) { return printable(whole_name(entry, name)); };
  const auto say = [&](const auto&... parts) { lines.push_back(c10::str(parts...)); };
  for (const auto& [name, one] : first.aliases) {
    const auto other = second.aliases.find(name);
    if (other == second.aliases.end()) {
      say(shown(name), ": is ", shown(one), " in the first alone");
    } else if (other->second != one) {
      say(shown(name), ": is ", shown(one), ", and ", shown(other->second));
    }
  }
  for (const auto& [name, other] : second.aliases) {
    if (first.aliases.count(name) == 0) say(shown(name), ": is ", shown(other), " in the second alone");
  }
}

// Random states, of each rank or of one for all.
void compare_ranks(const std::string& name, const json& first, const json& second, std::vector<std::string>& lines) {
  if (first == second || !first.is_array() || !second.is_array()) return;
  const auto whose = [](const json& list) {
    return list.size() == 1 ? std::string("of one rank for all") : c10::str("of each of ", list.size(), " ranks");
  };
  if (first.size() != second.size()) {
    lines.push_back(c10::str(printable(name), ": ", whose(first), ", and ", whose(second)));
    return;
  }
  const auto rank = std::mismatch(first.begin(), first.end(), second.begin()).first - first.begin();
  lines.push_back(c10::str(printable(name), ": what each rank has differs first on rank ", rank));
}

// Which elements have other bytes.
at::Tensor elements_that_differ(const at::Tensor& a, const at::Tensor& b) {
  const auto bytes = [](const at::Tensor& t) {
    return at::from_blob(t.mutable_data_ptr(), {t.numel(), t.element_size()}, at::kByte);
  };
  return bytes(a).ne(bytes(b)).any(1);
}

std::string compare_contents(const FoundTensor& first, const FoundTensor& second) {
  const at::Tensor a = read_whole(*first.file, *first.tensor), b = read_whole(*second.file, *second.tensor);
  if (hash_of(a.const_data_ptr(), int64_t(a.nbytes())) == hash_of(b.const_data_ptr(), int64_t(b.nbytes()))) return "";
  const at::Tensor which = elements_that_differ(a, b);
  const auto wide = c10::isComplexType(a.scalar_type()) ? at::kComplexDouble : at::kDouble;
  const at::Tensor one = a.reshape(-1).to(wide).masked_select(which),
                   other = b.reshape(-1).to(wide).masked_select(which);
  const at::Tensor lack = one.isnan().logical_xor(other.isnan());
  const at::Tensor by = (one - other).abs().masked_fill(one.isnan().logical_or(other.isnan()), 0);
  const std::string text = c10::str(which.sum().item<int64_t>(), " of ", a.numel(), " elements differ, ");
  const auto num_lack = lack.sum().item<int64_t>();
  if (num_lack > 0) return c10::str(text, num_lack, " of them NaN on one side");
  return c10::str(text, "by at most ", by.max().item<double>());
}

void compare_tensors(Checkpoint& first, Checkpoint& second, const OnBytes& on_bytes, std::vector<std::string>& lines) {
  const TensorNames mine = tensors_of(first), theirs = tensors_of(second);
  int64_t total = 0, done = 0;
  for (const auto& [place, found] : mine) total += found.tensor->end - found.tensor->begin;
  for (const auto& [place, found] : mine) {
    const std::string name = printable(whole_name(place.first, place.second));
    if (on_bytes) on_bytes(done, total, name);
    done += found.tensor->end - found.tensor->begin;
    const auto other = theirs.find(place);
    if (other == theirs.end()) {
      lines.push_back(name + ": only in the first");
    } else if (looks_of(*found.tensor) != looks_of(*other->second.tensor)) {
      lines.push_back(c10::str(name, ": ", looks_of(*found.tensor), " and ", looks_of(*other->second.tensor)));
    } else if (const std::string text = compare_contents(found, other->second); !text.empty()) {
      lines.push_back(name + ": " + text);
    }
  }
  for (const auto& [place, found] : theirs) {
    if (mine.count(place) == 0) {
      lines.push_back(printable(whole_name(place.first, place.second)) + ": only in the second");
    }
  }
}

std::vector<std::string> differences_between(Checkpoint& a, Checkpoint& b, const OnBytes& on_bytes) {
  std::vector<std::string> lines;
  compare_values("", a.index().values, b.index().values, lines);
  std::set<std::string> entries;
  for (const auto& [name, entry] : a.index().entries) entries.insert(name);
  for (const auto& [name, entry] : b.index().entries) entries.insert(name);
  const auto entry_of = [](const Checkpoint& checkpoint, const std::string& name) {
    const auto found = checkpoint.index().entries.find(name);
    return found == checkpoint.index().entries.end() ? IndexedEntry() : found->second;
  };
  for (const std::string& name : entries) {
    const IndexedEntry mine = entry_of(a, name), theirs = entry_of(b, name);
    compare_entries(name, mine.values, theirs.values, lines);
    compare_ranks(name, mine.per_rank, theirs.per_rank, lines);
    compare_aliases(name, mine, theirs, lines);
  }
  compare_tensors(a, b, on_bytes, lines);
  return lines;
}

}  // namespace

std::vector<std::string> differences(const std::string& first, const std::string& second, const OnBytes& on_bytes) {
  const auto a = std::make_unique<Checkpoint>(first), b = std::make_unique<Checkpoint>(second);
  return from_one(a, [&] { return from_one(b, [&] { return differences_between(*a, *b, on_bytes); }); });
}

}  // namespace serried::checkpoint::detail
