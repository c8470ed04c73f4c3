// State of optimizers by the names of their parameters, and its placement.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <c10/util/overloaded.h>

#include <algorithm>
#include <set>

#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/optimizer_kinds.h"
#include "serried/checkpoint/source.h"
#include "serried/checkpoint/values.h"
#include "serried/parallel/zero/optimizer.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/gather_on_use.h"
#include "serried/tensor/meta.h"

namespace serried {
namespace checkpoint::detail {
namespace {

using nlohmann::json;
using serried::detail::ZeroOptimizer;
using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  bool is_named;  // by a module
};

using NamedGroups = std::vector<std::vector<NamedParameter>>;

std::string name_of(const std::pair<std::string, std::string>& entry_and_name, bool with_entry) {
  return with_entry ? entry_and_name.first + "." + entry_and_name.second : entry_and_name.second;
}

// Two modules may have parameters of one name: then all names of this optimizer begin with that of their entry.
bool needs_entries(const Optimizer& optimizer, const ParameterNames& names) {
  std::map<std::string, const c10::TensorImpl*> seen;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      if (found == names.end()) continue;
      const auto [other, is_new] = seen.emplace(found->second[0].second, parameter.unsafeGetTensorImpl());
      if (!is_new && other->second != parameter.unsafeGetTensorImpl()) return true;
    }
  }
  return false;
}

NamedGroups named_groups(const Optimizer& optimizer, const ParameterNames& names) {
  const bool with_entry = needs_entries(optimizer, names);
  NamedGroups groups;
  for (const auto& group : optimizer.param_groups()) {
    std::vector<NamedParameter>& named = groups.emplace_back();
    std::set<const c10::TensorImpl*> seen;
    for (const at::Tensor& parameter : group.params()) {
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;  // tied weights
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      const bool is_named = found != names.end();
      const std::string place = c10::str("group", groups.size() - 1, ".param", named.size());
      named.push_back({is_named ? name_of(found->second[0], with_entry) : place, parameter, is_named});
    }
  }
  return groups;
}

bool are_named(const NamedGroups& groups) {
  return std::all_of(groups.begin(), groups.end(), [](const auto& group) {
    return std::all_of(group.begin(), group.end(), [](const NamedParameter& each) { return each.is_named; });
  });
}

// Tensors of a state by name, numbers into `numbers`.
void save_fields(const std::string& name, const std::vector<StateField>& fields, Holder holder, Part& part,
                 json& numbers) {
  for (const StateField& field : fields) {
    const std::string full = c10::str(name, ".", field.name);
    std::visit(c10::overloaded([&](const int64_t* number) { numbers[field.name] = *number; },
                               [&](const double* number) { numbers[field.name] = number_json(*number); },
                               [&](const at::Tensor* tensor) {
                                 if (tensor->defined()) part.items.push_back({full, *tensor, holder});
                               },
                               [&](const std::deque<at::Tensor>* list) {
                                 for (size_t i = 0; i < list->size(); ++i) {
                                   part.items.push_back({c10::str(full, ".", i), (*list)[i], holder});
                                 }
                               }),
               field.place);
  }
}

using TensorsByName = std::unordered_map<std::string, const FileTensor*>;

// Which parameter of the checkpoint is which of ours.
struct ParameterMatch {
  std::string saved_name;
  NamedParameter mine;
};

class OptimizerSource final : public Source {
 public:
  explicit OptimizerSource(Optimizer& optimizer)
      : optimizer_(optimizer), zero_(dynamic_cast<ZeroOptimizer*>(&optimizer)) {}

  Part collect(const CallContext& call) override {
    const OptimizerKind& kind = kind_of(optimizer_);
    const NamedGroups groups = named_groups(optimizer_, *call.names);
    auto& state = stateful().state();
    const Holder holder = zero_ != nullptr ? Holder::owner : Holder::all;
    Part part;
    json numbers = json::object(), saved_groups = json::array();
    for (size_t g = 0; g < groups.size(); ++g) {
      json names = json::array();
      for (const NamedParameter& parameter : groups[g]) {
        names.push_back(parameter.name);
        const auto found = state.find(parameter.tensor.unsafeGetTensorImpl());
        if (found == state.end()) continue;
        json& mine = numbers[parameter.name] = json::object();
        save_fields(parameter.name, kind.fields(*found->second), holder, part, mine);
      }
      const auto& options = optimizer_.param_groups()[g].options();
      saved_groups.push_back({{"params", std::move(names)}, {"options", kind.options_json(options)}});
    }
    part.values = std::make_shared<json>(json{{"type", kind.name}, {"groups", std::move(saved_groups)}});
    (*part.values)["owned"] = json::object();
    if (zero_ != nullptr) {
      part.owned = std::make_shared<json>(std::move(numbers));
    } else {
      (*part.values)["owned"] = std::move(numbers);
    }
    return part;
  }

  Wanted want(const SavedPart& saved, const LoadOptions& options, const CallContext& call) override {
    const OptimizerKind& kind = kind_of(optimizer_);
    if (!saved.values || !saved.values->contains("groups")) {
      fail("it is no optimizer in the checkpoint", "give it the name that it was saved under");
    }
    const json& values = *saved.values;
    if (values.at("type") != kind.name) {
      fail(c10::str("an optimizer is ", values.at("type").get<std::string>(), " in the checkpoint, and ", kind.name,
                    " here"),
           "load into an optimizer of the same kind");
    }
    const NamedGroups groups = named_groups(optimizer_, *call.names);
    check_groups(groups, values, options);
    Wanted wanted;
    const std::vector<ParameterMatch> matches = match(groups, values, options, wanted);
    TensorsByName tensors;
    for (const FileTensor& tensor : saved.tensors) tensors[tensor.name] = &tensor;
    auto made = std::make_shared<std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>>>();
    for (const ParameterMatch& each : matches) {
      if (zero_ != nullptr && zero_->owner_of(each.mine.tensor) != zero_->process_group()->getRank()) continue;
      made->emplace_back(each.mine.tensor.unsafeGetTensorImpl(),
                         load_state(kind, each, values.at("owned"), tensors, wanted));
    }
    wanted.apply = [this, &kind, made, all_options = values.at("groups")] {
      auto& state = stateful().state();
      for (auto& [parameter, value] : *made) {
        if (value) {
          state[parameter] = std::move(value);
        } else {
          state.erase(parameter);
        }
      }
      auto& mine = optimizer_.param_groups();
      for (size_t g = 0; g < std::min(mine.size(), all_options.size()); ++g) {
        kind.set_options(mine[g].options(), all_options[g].at("options"));
      }
    };
    return wanted;
  }

 private:
  Optimizer& stateful() const { return zero_ != nullptr ? zero_->own_part() : optimizer_; }

  static void check_groups(const NamedGroups& groups, const json& values, const LoadOptions& options) {
    const size_t theirs = values.at("groups").size();
    if (!options.strict || theirs == groups.size()) return;
    fail(c10::str("an optimizer has ", theirs, " groups of parameters in the checkpoint, and ", groups.size(), " here"),
         "make the same groups, or pass {.strict = false}");
  }

  // By name; by place where one side has no names.
  static std::vector<ParameterMatch> match(const NamedGroups& groups, const json& values, const LoadOptions& options,
                                           Wanted& wanted) {
    std::vector<ParameterMatch> matches;
    std::map<std::string, std::string> there;  // renamed -> saved
    bool same_counts = groups.size() == values.at("groups").size();
    bool has_names_there = false;
    for (size_t g = 0; g < values.at("groups").size(); ++g) {
      const json& names = values.at("groups")[g].at("params");
      same_counts = same_counts && names.size() == groups[g].size();
      for (size_t i = 0; i < names.size(); ++i) {
        const auto name = names[i].get<std::string>();
        has_names_there = has_names_there || name != c10::str("group", g, ".param", i);
        there[renamed(name, options.rename)] = name;
      }
    }
    if (same_counts && are_named(groups) != has_names_there) {
      for (size_t g = 0; g < groups.size(); ++g) {
        for (size_t i = 0; i < groups[g].size(); ++i) {
          matches.push_back({values.at("groups")[g].at("params")[i].get<std::string>(), groups[g][i]});
        }
      }
      return matches;
    }
    for (const auto& group : groups) {
      for (const NamedParameter& parameter : group) {
        if (parameter.name.compare(0, options.only.size(), options.only) != 0) continue;
        const auto found = there.find(parameter.name);
        if (found == there.end()) {
          wanted.missing.push_back(parameter.name);
          continue;
        }
        matches.push_back({found->second, parameter});
        there.erase(found);
      }
    }
    for (const auto& [name, saved_name] : there) {
      if (name.compare(0, options.only.size(), options.only) == 0) wanted.extra.push_back(name);
    }
    return matches;
  }

  // Null where the checkpoint has no state of it.
  std::unique_ptr<OptimizerParamState> load_state(const OptimizerKind& kind, const ParameterMatch& each,
                                                  const json& all, const TensorsByName& tensors, Wanted& wanted) {
    if (!all.contains(each.saved_name)) return nullptr;
    const json& numbers = all[each.saved_name];
    auto& state = stateful().state();
    const auto found = state.find(each.mine.tensor.unsafeGetTensorImpl());
    std::unique_ptr<OptimizerParamState> made = found != state.end() ? found->second->clone() : kind.make_state();
    for (StateField& field : kind.fields(*made)) {
      const std::string name = c10::str(each.saved_name, ".", field.name);
      std::visit(
          c10::overloaded([&](int64_t* number) { *number = numbers.at(field.name).get<int64_t>(); },
                          [&](double* number) { *number = number_of(numbers.at(field.name)); },
                          [&](at::Tensor* tensor) { *tensor = target_for(name, *tensor, each, tensors, wanted); },
                          [&](std::deque<at::Tensor>* list) {
                            list->clear();
                            for (at::Tensor next; list->empty() || next.defined();) {
                              next = target_for(c10::str(name, ".", list->size()), {}, each, tensors, wanted);
                              if (!next.defined()) break;
                              list->push_back(next);
                            }
                          }),
          field.place);
    }
    return made;
  }

  // The tensor that a field is read into: the one that is there, where it fits, so that captured steps go on with it.
  static at::Tensor target_for(const std::string& name, const at::Tensor& present, const ParameterMatch& each,
                               const TensorsByName& tensors, Wanted& wanted) {
    const auto place = tensors.find(name);
    if (place == tensors.end()) return {};
    const FileTensor* const found = place->second;
    const at::Tensor& parameter = each.mine.tensor;
    const at::NoGradGuard no_grad;
    const tape::Pause off_tape;
    const c10::IntArrayRef sizes(found->sizes);
    const bool fits = present.defined() && present.sizes() == sizes && is_dtensor(present) == is_dtensor(parameter);
    at::Tensor target = present;
    if (!fits && parameter.sizes() == sizes) target = at::zeros_like(parameter.detach());
    if (!fits && parameter.sizes() != sizes) {
      target = at::zeros(sizes, at::TensorOptions(found->dtype).device(parameter.device()));
    }
    wanted.targets.push_back({name, target});
    return target;
  }

  Optimizer& optimizer_;
  ZeroOptimizer* const zero_;
};

}  // namespace

std::shared_ptr<Source> optimizer_source(Optimizer& optimizer) {
  return std::make_shared<OptimizerSource>(optimizer);
}

}  // namespace checkpoint::detail

checkpoint::State checkpoint::state_of(torch::optim::Optimizer& optimizer) {
  return State(detail::optimizer_source(optimizer));
}

void place_like_parameters(torch::optim::Optimizer& optimizer) {
  using namespace checkpoint::detail;
  const at::NoGradGuard no_grad;
  const tape::Pause off_tape;
  try {
    const OptimizerKind& kind = kind_of(optimizer);
    for (const auto& group : optimizer.param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
        if (!is_dtensor(parameter) || found == optimizer.state().end()) continue;
        const DTensor like(parameter);
        for (const StateField& field : kind.fields(*found->second)) {
          auto* const* tensor = std::get_if<at::Tensor*>(&field.place);
          if (tensor == nullptr || !(*tensor)->defined() || is_dtensor(**tensor)) continue;
          if ((*tensor)->sizes() != parameter.sizes()) continue;
          const DTensor placed =
              distribute_tensor(**tensor, like.device_mesh(), like.placements(), {.source = std::nullopt});
          if (serried::detail::gather_of(parameter) != nullptr) set_use(placed, serried::detail::use_like_parameters());
          **tensor = placed;
        }
      }
    }
  } catch (const Failure& failure) {
    raise_failure("place_like_parameters", failure);
  }
}

}  // namespace serried
