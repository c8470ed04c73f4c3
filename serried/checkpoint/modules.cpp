// State of modules: parameters and buffers by name.
#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/source.h"
#include "serried/parallel/ddp/ddp.h"

namespace serried::checkpoint {
namespace detail {
namespace {

class ModuleSource final : public Source {
 public:
  explicit ModuleSource(const torch::nn::Module& module) : module_(unwrapped(module)) {}
  Part collect(const CallContext&) override { return part_of_module(module_); }
  Wanted want(const SavedPart& saved, const LoadOptions& options, const CallContext&) override {
    return match_names(part_of_module(module_), saved, options);
  }
  const torch::nn::Module* module() const override { return &module_; }

 private:
  const torch::nn::Module& module_;
};

bool begins_with(const std::string& name, const std::string& prefix) {
  return name.compare(0, prefix.size(), prefix) == 0;
}

// By the name that it has here: the name that it has in the checkpoint. Several names may be of one tensor.
std::map<std::string, std::string> names_here(const SavedPart& saved, const LoadOptions& options) {
  std::map<std::string, std::string> here;
  const Renamer renamed(options.rename);
  const auto add = [&](const std::string& name, const std::string& tensor) {
    const std::string mine = renamed(name);
    if (!begins_with(mine, options.only)) return;
    if (here.emplace(mine, tensor).second) return;
    fail(c10::str("renamed, both \"", here[mine], "\" and \"", name, "\" are \"", mine, "\""),
         "change the pattern so that names stay different");
  };
  for (const FileTensor& tensor : saved.tensors) add(tensor.name, tensor.name);
  for (const auto& [name, tensor] : saved.aliases) add(name, tensor);
  return here;
}

}  // namespace

Renamer::Renamer(const std::vector<Rename>& renames) {
  for (const Rename& rename : renames) {
    try {
      rules_.emplace_back(std::regex(rename.pattern), rename.to);
    } catch (const std::regex_error& error) {
      fail(c10::str("\"", rename.pattern, "\" is no regular expression: ", error.what()),
           "use the notation of ECMAScript");
    }
  }
}

std::string Renamer::operator()(const std::string& name) const {
  constexpr size_t kMaxLetters = 4096, kShown = 60;
  std::string result = name;
  for (const auto& [pattern, to] : rules_) {
    // std::regex calls itself for each letter, and ends where the stack does.
    if (result.size() > kMaxLetters) {
      fail(c10::str("the name \"", serried::detail::printable(result.substr(0, kShown)), "...\" has ", result.size(),
                    " letters, and may have ", kMaxLetters, " where names are changed by {.rename}"),
           "load without .rename, into a module with the names that were saved");
    }
    result = std::regex_replace(result, pattern, to);
  }
  return result;
}

const torch::nn::Module& unwrapped(const torch::nn::Module& module) {
  if (dynamic_cast<const DataParallelBase*>(&module) == nullptr) return module;
  return *module.children().at(0);
}

Part part_of_module(const torch::nn::Module& module) {
  Part part;
  std::unordered_map<const c10::TensorImpl*, std::string> seen;
  const auto add = [&](const std::string& name, const at::Tensor& tensor, Holder holder) {
    if (!tensor.defined()) return;
    const auto [found, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), name);
    if (is_new) {
      part.items.push_back({name, tensor, holder});
    } else if (found->second != name) {
      part.aliases.emplace(name, found->second);
    }
  };
  for (const auto& item : module.named_parameters()) add(item.key(), item.value(), Holder::all);
  for (const auto& item : module.named_buffers()) add(item.key(), item.value(), Holder::first);
  return part;
}

Wanted match_names(const Part& part, const SavedPart& saved, const LoadOptions& options) {
  const std::map<std::string, std::string> there = names_here(saved, options);
  std::map<std::string, std::string> unused = there;
  std::map<std::string, std::string> taken;  // by name here: which tensor of the checkpoint
  std::unordered_map<std::string, at::Tensor> tensors;
  std::unordered_set<std::string> found_by_alias;
  for (const Item& item : part.items) tensors.emplace(item.name, item.tensor);
  Wanted wanted;
  for (const Item& item : part.items) {
    if (!begins_with(item.name, options.only)) continue;
    const auto found = there.find(item.name);
    if (found == there.end()) {
      wanted.missing.push_back(item.name);
      continue;
    }
    wanted.targets.push_back({found->second, item.tensor});
    taken[item.name] = found->second;
    unused.erase(item.name);
  }
  // Another name of a tensor that is here counts as found, also where only that name is in the checkpoint.
  for (const auto& [alias, name] : part.aliases) {
    const auto found = there.find(alias);
    if (found == there.end()) continue;
    unused.erase(alias);
    const auto [first, is_new] = taken.emplace(name, found->second);
    if (!is_new && first->second != found->second) wanted.twins.emplace_back(found->second, first->second);
    if (!is_new) continue;
    found_by_alias.insert(name);
    wanted.targets.push_back({found->second, tensors.at(name)});
  }
  std::erase_if(wanted.missing, [&](const std::string& name) { return found_by_alias.contains(name); });
  std::set<std::string> used;
  for (const Target& target : wanted.targets) used.insert(target.saved_name);
  for (const auto& [name, tensor] : unused) {
    if (used.count(tensor) == 0) wanted.extra.push_back(name);
  }
  return wanted;
}

}  // namespace detail

State state_of(const torch::nn::Module& module) {
  return State(std::make_shared<detail::ModuleSource>(module));
}

}  // namespace serried::checkpoint
