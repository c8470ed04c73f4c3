// State of optimizers by the names of their parameters, and its placement.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <c10/util/overloaded.h>

#include <algorithm>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/optimizer_kinds.h"
#include "serried/checkpoint/optimizer_match.h"
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

NamedGroups named_groups(const Optimizer& optimizer, const ParameterNames& names, bool with_entry) {
  NamedGroups groups;
  std::unordered_map<const c10::TensorImpl*, size_t> group_of;
  for (const auto& group : optimizer.param_groups()) {
    const size_t number = groups.size();
    std::vector<NamedParameter>& named = groups.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const auto found = names.find(parameter.unsafeGetTensorImpl());
      NamedParameter mine{name_by_place(number, named.size()), parameter, found != names.end()};
      if (mine.is_named) {
        mine.name = name_of(found->second[0], with_entry);
        mine.names = found->second;
      }
      const auto [known, is_new] = group_of.emplace(parameter.unsafeGetTensorImpl(), number);
      if (is_new) named.push_back(std::move(mine));
      if (known->second == number) continue;  // tied weights may come twice in one
      fail(c10::str("the parameter \"", mine.name, "\" is in group ", known->second, " and in group ", number,
                    " of an optimizer"),
           "give each parameter to one group: it has one state and would be stepped twice");
    }
  }
  return groups;
}

// Other names of tied weights: whoever has not tied them, or has one of them, finds the state under each. One that two
// parameters would have is none.
json aliases_of(const NamedGroups& groups, bool with_entry) {
  std::set<std::string> first_names, ambiguous;
  std::map<std::string, std::string> aliases;
  for (const auto& group : groups) {
    for (const NamedParameter& each : group) first_names.insert(each.name);
  }
  for (const auto& group : groups) {
    for (const NamedParameter& each : group) {
      for (const auto& name : each.names) {
        const std::string alias = name_of(name, with_entry);
        if (first_names.contains(alias)) continue;
        const auto [known, is_new] = aliases.emplace(alias, each.name);
        if (!is_new && known->second != each.name) ambiguous.insert(alias);
      }
    }
  }
  for (const std::string& alias : ambiguous) aliases.erase(alias);
  return aliases;
}

// Those that names begin with.
std::set<std::string> entries_of(const NamedGroups& groups) {
  std::set<std::string> entries;
  for (const auto& group : groups) {
    for (const NamedParameter& each : group) {
      for (const auto& name : each.names) entries.insert(name.first);
    }
  }
  return entries;
}

// Tensors of a state by name; into `numbers` the numbers, and which tensors there are: true, or how many.
void save_fields(const std::string& name, const std::vector<StateField>& fields, Holder holder, Part& part,
                 json& numbers) {
  for (const StateField& field : fields) {
    const std::string full = c10::str(name, ".", field.name);
    std::visit(c10::overloaded([&](const int64_t* number) { numbers[field.name] = *number; },
                               [&](const double* number) { numbers[field.name] = number_json(*number); },
                               [&](const at::Tensor* tensor) {
                                 if (!tensor->defined()) return;
                                 numbers[field.name] = true;
                                 part.items.push_back({full, *tensor, holder});
                               },
                               [&](const std::deque<at::Tensor>* list) {
                                 numbers[field.name] = list->size();
                                 for (size_t i = 0; i < list->size(); ++i) {
                                   part.items.push_back({full + "." + std::to_string(i), (*list)[i], holder});
                                 }
                               }),
               field.place);
  }
}

using TensorsByName = std::unordered_map<std::string, const FileTensor*>;

// State that was saved for two parameters which are one here: numbers are compared, and tensors will be.
void add_twins(const ParameterMatch& each, const json& states, Wanted& wanted) {
  const json mine = states.value(each.saved_name, json());
  for (const std::string& twin : each.twins) {
    const json theirs = states.value(twin, json());
    if (theirs != mine) {
      fail(c10::str("\"", twin, "\" and \"", each.saved_name,
                    "\" are one parameter here, and an optimizer has the state ", theirs.dump(), " and ", mine.dump(),
                    " for them in the checkpoint"),
           "load into a model that does not tie them");
    }
    for (const auto& [field, value] : mine.items()) {
      if (value == true) wanted.twins.emplace_back(twin + "." + field, each.saved_name + "." + field);
    }
  }
}

// Where a state was taken from one rank of several, which had a part of it.
std::unordered_set<std::string> names_elsewhere(const json& values) {
  std::unordered_set<std::string> names;
  for (const json& name : values.value("elsewhere", json::array())) names.insert(name.get<std::string>());
  return names;
}

void check_has_state(const ParameterMatch& each, const std::unordered_set<std::string>& elsewhere) {
  if (!elsewhere.contains(each.saved_name)) return;
  fail(c10::str("the state of \"", each.saved_name,
                "\" of an optimizer is on another rank than the one that this was taken from"),
       "get_state with {.full = true}, or set it into a ZeroRedundancyOptimizer that deals its parameters out in the "
       "same way");
}

class OptimizerSource final : public Source {
 public:
  explicit OptimizerSource(Optimizer& optimizer)
      : optimizer_(optimizer), zero_(dynamic_cast<ZeroOptimizer*>(&optimizer)) {}

  Part collect(const CallContext& call) override {
    const OptimizerKind& kind = kind_of(optimizer_);
    const bool with_entry = needs_entries(optimizer_, *call.names);
    const NamedGroups groups = named_groups(optimizer_, *call.names, with_entry);
    auto& state = stateful().state();
    const Holder holder = zero_ != nullptr ? Holder::owner : Holder::all;
    Part part;
    json numbers = json::object(), saved_groups = json::array();
    for (size_t g = 0; g < groups.size(); ++g) {
      json names = json::array(), sizes = json::array();
      for (const NamedParameter& parameter : groups[g]) {
        names.push_back(parameter.name);
        sizes.push_back(parameter.tensor.sizes().vec());
        const auto found = state.find(parameter.tensor.unsafeGetTensorImpl());
        if (found == state.end()) continue;
        json& mine = numbers[parameter.name] = json::object();
        save_fields(parameter.name, kind.fields(*found->second), holder, part, mine);
      }
      const auto& options = optimizer_.param_groups()[g].options();
      saved_groups.push_back(
          {{"params", std::move(names)}, {"sizes", std::move(sizes)}, {"options", kind.options_json(options)}});
    }
    part.values = std::make_shared<json>(json{{"type", kind.name},
                                              {"groups", std::move(saved_groups)},
                                              {"entries", with_entry ? entries_of(groups) : std::set<std::string>()},
                                              {"aliases", aliases_of(groups, with_entry)},
                                              {"owned", json::object()}});
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
    const NamedGroups groups = named_groups(optimizer_, *call.names, needs_entries(optimizer_, *call.names));
    Wanted wanted;
    const std::vector<ParameterMatch> matches = match_parameters(groups, values, options, wanted);
    check_sizes(matches);
    if (kind.has_one_state && !values.at("owned").empty()) check_order(kind.name, groups, values.at("groups"), matches);
    const GroupOptions new_options = options_of_groups(matches, values.at("groups"), options.strict);
    TensorsByName tensors;
    for (const FileTensor& tensor : saved.tensors) tensors[tensor.name] = &tensor;
    const std::unordered_set<std::string> elsewhere = names_elsewhere(values);
    auto made = std::make_shared<std::vector<std::pair<void*, std::unique_ptr<OptimizerParamState>>>>();
    for (const ParameterMatch& each : matches) {
      add_twins(each, values.at("owned"), wanted);
      if (zero_ != nullptr && zero_->owner_of(each.mine.tensor) != zero_->process_group()->getRank()) continue;
      check_has_state(each, elsewhere);
      made->emplace_back(each.mine.tensor.unsafeGetTensorImpl(),
                         load_state(kind, each, values.at("owned"), tensors, wanted));
    }
    wanted.apply = [this, &kind, made, new_options] {
      auto& state = stateful().state();
      for (auto& [parameter, value] : *made) {
        if (value) {
          state[parameter] = std::move(value);
        } else {
          state.erase(parameter);
        }
      }
      for (const auto& [group, json] : new_options) kind.set_options(optimizer_.param_groups()[group].options(), json);
    };
    return wanted;
  }

  Optimizer* optimizer() const override { return &optimizer_; }

 private:
  Optimizer& stateful() const { return zero_ != nullptr ? zero_->own_part() : optimizer_; }

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
      const json saved = numbers.value(field.name, json());
      std::visit(
          c10::overloaded([&](int64_t* number) { *number = saved.get<int64_t>(); },
                          [&](double* number) { *number = number_of(saved); },
                          [&](at::Tensor* tensor) {
                            const at::Tensor present = *tensor;
                            tensor->reset();
                            if (saved == true) *tensor = target_for(name, present, each, tensors, wanted);
                          },
                          [&](std::deque<at::Tensor>* list) {
                            list->clear();
                            for (size_t i = 0; i < saved.get<size_t>(); ++i) {
                              list->push_back(target_for(name + "." + std::to_string(i), {}, each, tensors, wanted));
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
    if (place == tensors.end()) {
      fail(c10::str("the checkpoint lacks the tensor \"", name, "\", though the optimizer had it when it was saved"),
           "use another checkpoint");
    }
    const FileTensor* const found = place->second;
    const at::Tensor& parameter = each.mine.tensor;
    const at::NoGradGuard no_grad;
    const c10::InferenceMode normal(false);  // training goes on with it, whoever loads
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
