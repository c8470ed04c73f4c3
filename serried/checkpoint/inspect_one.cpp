// One tensor or value of a checkpoint, by any name that a listing or a comparison shows.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <charconv>
#include <sstream>

#include "serried/base/edit_distance.h"
#include "serried/base/text.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/inspect.h"
#include "serried/checkpoint/inspect_names.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/tensor_text.h"
#include "serried/checkpoint/values.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;
using serried::detail::printable;

// Something that a name may stand for: a tensor, or a value.
struct Candidate {
  std::string entry, name;
  FoundTensor tensor = {};
  const json* value = nullptr;
};

// "groups.0.options.lr" inside the values of an entry; null where there is none.
const json* value_at(const json& values, const std::string& path) {
  if (path.empty()) return &values;
  for (size_t dot = std::min(path.find('.'), path.size());; dot = std::min(path.find('.', dot + 1), path.size())) {
    const std::string key = path.substr(0, dot), rest = dot == path.size() ? "" : path.substr(dot + 1);
    const json* inner = nullptr;
    size_t number = 0;
    if (values.is_object() && values.contains(key)) {
      inner = &values[key];
    } else if (values.is_array() && !key.empty() &&
               std::from_chars(key.data(), key.data() + key.size(), number).ptr == key.data() + key.size() &&
               number < values.size()) {
      inner = &values[number];
    }
    if (inner != nullptr) inner = value_at(*inner, rest);
    if (inner != nullptr) return inner;
    if (dot == path.size()) return nullptr;
  }
}

class Names {
 public:
  explicit Names(Checkpoint& checkpoint) : index_(checkpoint.index()), tensors_(tensors_of(checkpoint)) {}

  // What is called `name` in a comparison: by entry and name, with a dot or, where that means two things, a slash.
  std::vector<Candidate> called(const std::string& name) const {
    std::vector<Candidate> found;
    for (size_t at = name.find_first_of("./"); at != std::string::npos; at = name.find_first_of("./", at + 1)) {
      add_in_entry(name.substr(0, at), name.substr(at + 1), found);
      if (name[at] == '/' && !found.empty()) return found;
    }
    add_in_entry(kValuesEntry, name, found);
    const auto entry = index_.entries.find(name);
    if (entry != index_.entries.end() && name != kValuesEntry) found.push_back({name, "", {}, &entry->second.values});
    return found;
  }

  // What stands under `name` in the list of an entry.
  std::vector<Candidate> listed(const std::string& name) const {
    std::vector<Candidate> found;
    for (const auto& [entry, indexed] : index_.entries) add_tensor(entry, name, found);
    return found;
  }

  std::vector<std::string> all() const {
    std::vector<std::string> there;
    for (const auto& [known, value] : index_.values.items()) {
      if (!names_tensor(value)) there.push_back(known);
    }
    for (const auto& [place, tensor] : tensors_) there.push_back(whole_name(place.first, place.second));
    return there;
  }

 private:
  bool add_tensor(const std::string& entry, const std::string& name, std::vector<Candidate>& found) const {
    auto tensor = tensors_.find({entry, name});
    const auto indexed = index_.entries.find(entry);
    if (tensor == tensors_.end() && indexed != index_.entries.end()) {
      const auto alias = indexed->second.aliases.find(name);
      if (alias != indexed->second.aliases.end()) tensor = tensors_.find({entry, alias->second});
    }
    if (tensor == tensors_.end()) return false;
    found.push_back({entry, name, tensor->second});
    return true;
  }

  void add_in_entry(const std::string& entry, const std::string& name, std::vector<Candidate>& found) const {
    if (add_tensor(entry, name, found)) return;
    const json* value = nullptr;
    if (entry == kValuesEntry) {
      value = find_value(index_.values, name);
    } else if (const auto indexed = index_.entries.find(entry); indexed != index_.entries.end()) {
      const json& values = indexed->second.values;
      value = value_at(values, name);
      const bool has_parameters = value == nullptr && values.is_object() && values.contains("owned");
      if (has_parameters) value = value_at(values["owned"], name);
    }
    if (value != nullptr && !names_tensor(*value)) found.push_back({entry, name, {}, value});
  }

  const Index& index_;
  const TensorNames tensors_;
};

// Less where one ends with the other.
size_t distance(const std::string& name, const std::string& known) {
  return known.ends_with("." + name) ? 0 : serried::detail::edit_distance(name, known) + 1;
}

[[noreturn]] void fail_for_name(const std::string& folder, std::vector<std::string> there, const std::string& name) {
  constexpr size_t kFew = 20, kNearest = 5;
  const size_t count = there.size();
  const std::string what = count <= kFew ? "it has: " : c10::str("the nearest of ", count, " names: ");
  if (count > kFew) {
    std::stable_sort(there.begin(), there.end(),
                     [&](const std::string& a, const std::string& b) { return distance(name, a) < distance(name, b); });
    there.resize(kNearest);
  }
  fail(c10::str(folder, " has no \"", printable(name), "\"; ", what, list_of_names(there)),
       "name one of these; serried checkpoint ls shows all");
}

Candidate one_of(const Checkpoint& checkpoint, const Names& names, const std::string& name) {
  std::vector<Candidate> found = names.called(name);
  if (found.empty()) found = names.listed(name);
  if (found.empty()) fail_for_name(checkpoint.folder(), names.all(), name);
  if (found.size() == 1) return found[0];
  std::vector<std::string> there;
  for (const Candidate& each : found) there.push_back(each.entry + "/" + each.name);
  fail(c10::str(checkpoint.folder(), " has ", there.size(), " things called \"", printable(name), "\""),
       "name one by its entry: " + list_of_names(there));
}

std::string text_in(Checkpoint& checkpoint, const std::string& name, const TextOptions& options) {
  const Names names(checkpoint);
  const Candidate one = one_of(checkpoint, names, name);
  std::ostringstream out;
  if (one.tensor.file == nullptr) {
    const bool is_of_user = one.entry == kValuesEntry && !options.as_json;
    is_of_user ? out << read_value(checkpoint.folder(), one.name) : out << printable(one.value->dump(-1, ' ', true));
    out << "\n";
    return out.str();
  }
  const FileTensor& tensor = *one.tensor.tensor;
  const at::Tensor value = read_whole(*one.tensor.file, tensor);
  if (options.as_json) {
    return json{{"looks", looks_of(tensor)}, {"sizes", tensor.sizes}, {"elements", tensor_json(value)}}.dump() + "\n";
  }
  const std::string text = tensor_text(value, options.all);
  out << looks_of(tensor) << "\n" << text << "\n";
  if (text.find("...") != std::string::npos) {
    out << "An excerpt: --all shows all " << std::to_string(value.numel()) << " elements.\n";
  }
  return out.str();
}

}  // namespace

std::string text_of(const std::string& folder, const std::string& name, const TextOptions& options) {
  const auto checkpoint = std::make_unique<Checkpoint>(folder);
  return from_one(checkpoint, [&] { return text_in(*checkpoint, name, options); });
}

}  // namespace serried::checkpoint::detail
