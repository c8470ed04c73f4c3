// Gathers state, and cuts it again.
#include "serried/checkpoint/state_dict.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <map>
#include <set>
#include <unordered_map>

#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/collect.h"
#include "serried/checkpoint/reader.h"
#include "serried/checkpoint/save_job.h"
#include "serried/checkpoint/values.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/tape/tape.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/parts.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::checkpoint {
namespace detail {
namespace {

using nlohmann::json;
using serried::detail::LocalOnly;

at::Tensor whole_of(const at::Tensor& tensor) {
  const SpecPtr spec = spec_of(tensor);
  if (!spec) return tensor.detach().clone();
  const at::Tensor whole = redistribute_local(part_of(tensor), *spec, Placements(spec->placements.size()));
  const LocalOnly local_only;
  return whole.is_same(part_of(tensor)) ? whole.clone() : whole;
}

// A DTensor of its own, or a plain copy.
at::Tensor copy_of(const at::Tensor& tensor) {
  const SpecPtr spec = spec_of(tensor);
  if (!spec) return tensor.detach().clone();
  const LocalOnly local_only;
  return wrap(part_of(tensor).clone(), spec);
}

// Values beside states stand under this name alone.
constexpr const char* kValue = "value";

bool is_value(const json& values) {
  return values.is_object() && values.size() == 1 && values.contains(kValue);
}

class StateGetter {
 public:
  StateGetter(const Ranks& ranks, const GetStateOptions& options) : ranks_(ranks), options_(options) {}

  void add(const std::string& entry, Part part) {
    for (const Item& item : part.items) {
      if (item.holder != Holder::owner) put(entry, item.name, options_.full ? whole(item) : copy_of(item.tensor));
    }
    add_owned(entry, part);
    EntryState& state = result_[entry];
    for (const auto& [alias, name] : part.aliases) {
      if (state.tensors.count(name) != 0) state.tensors[alias] = state.tensors[name];
    }
    json values = part.values ? *part.values : json::object();
    if (part.per_rank) values["per_rank"] = *part.per_rank;
    const auto tensor_called = [&](const std::string& name) {
      const auto found = state.tensors.find(name);
      return found == state.tensors.end() ? at::Tensor() : found->second;
    };
    // States have names of their own among their values, and no tensors.
    if (is_value(values)) {
      state.values = value_of(values, tensor_called);
    } else {
      state.values = value_of(values, {});
    }
  }

  StateDict result() && { return keeps() ? std::move(result_) : StateDict(); }

 private:
  // Of buffers rank 0's count, as in a file.
  at::Tensor whole(const Item& item) const {
    at::Tensor result = whole_of(item.tensor);
    const bool is_sent = item.holder == Holder::first && !is_dtensor(item.tensor) && ranks_.size() > 1;
    if (is_sent) broadcast_(result, ranks_.group(), {.src = 0});
    return result;
  }

  bool keeps() const { return !options_.first_rank_only || ranks_.is_first(); }

  void put(const std::string& entry, const std::string& name, const at::Tensor& tensor) {
    if (!keeps()) return;
    const bool moves = options_.cpu && !is_dtensor(tensor) && !tensor.device().is_cpu();
    result_[entry].tensors[name] = moves ? tensor.cpu() : tensor;
  }

  // Each owner tells what it has, and sends it where all want all.
  void add_owned(const std::string& entry, Part& part) {
    if (!part.owned) return;
    json mine = {{"numbers", *part.owned}, {"tensors", json::array()}};
    for (const Item& item : part.items) {
      mine["tensors"].push_back({item.name, int(item.tensor.scalar_type()), item.tensor.sizes().vec()});
    }
    const std::vector<std::string> all = ranks_.together([&] { return mine.dump(); });
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const json theirs = json::parse(all[rank]);
      const bool is_mine = int(rank) == ranks_.rank();
      if (options_.full || is_mine) (*part.values)["owned"].update(theirs["numbers"]);
      if (!options_.full && !is_mine) note_elsewhere(*part.values, theirs["numbers"], *part.owned);
      for (size_t i = 0; i < theirs["tensors"].size(); ++i) {
        if (!options_.full && !is_mine) continue;
        const json& looks = theirs["tensors"][i];
        at::Tensor tensor = is_mine
                                ? part.items[i].tensor.detach().clone()
                                : at::empty(looks[2].get<std::vector<int64_t>>(), c10::ScalarType(looks[1].get<int>()));
        if (options_.full && ranks_.size() > 1) broadcast_(tensor, ranks_.group(), {.src = int(rank)});
        put(entry, looks[0].get<std::string>(), tensor);
      }
    }
  }

  // Whoever sets the part of one rank has to know that it is no more.
  static void note_elsewhere(json& values, const json& theirs, const json& mine) {
    for (const auto& [name, numbers] : theirs.items()) {
      if (!mine.contains(name)) values["elsewhere"].push_back(name);
    }
  }

  const Ranks& ranks_;
  const GetStateOptions& options_;
  StateDict result_;
};

// Names are made of paths: those of two tensors inside of one value may read the same.
void check_names_in_value(const std::string& entry, const Part& part) {
  std::set<std::string> seen;
  for (const Item& item : part.items) {
    if (seen.insert(item.name).second) continue;
    fail(c10::str("two tensors of \"", entry, "\" have the name \"", item.name, "\""), "give them different names");
  }
}

// Stages of a pipeline would each get a part and take it for the whole.
void check_same_names(const std::vector<std::pair<std::string, Part>>& parts, const Ranks& ranks) {
  std::string text;
  for (const auto& [entry, part] : parts) {
    for (const Item& item : part.items) {
      if (item.holder != Holder::owner) text += entry + "." + item.name + "\n";
    }
  }
  const auto hashes = ranks.together([&] { return std::to_string(hash_of(text.data(), int64_t(text.size()))); });
  for (size_t rank = 1; rank < hashes.size(); ++rank) {
    if (hashes[rank] == hashes[0]) continue;
    fail(c10::str("rank ", rank, " holds other names than rank 0, as the stages of a pipeline do"),
         "pass {.full = false}, which gives each rank what it holds, or save a checkpoint, which has all of it");
  }
}

StateDict collect_state(const Contents& contents, const Ranks& ranks, const GetStateOptions& options) {
  const tape::Pause off_tape;
  const at::NoGradGuard no_grad;
  const ParameterNames names = parameter_names(contents);
  const CallContext call{&names, ranks.rank(), ranks.size()};
  std::vector<std::pair<std::string, Part>> parts;
  std::set<std::string> entries;
  for (const Entry& entry : contents) {
    if (!entries.insert(entry.name).second) {
      fail(c10::str("the name \"", entry.name, "\" is there twice"), "give each thing a name of its own");
    }
    if (Source* source = source_of(entry.value)) {
      parts.emplace_back(entry.name, source->collect(call));
      continue;
    }
    Part part;
    part.values = std::make_shared<json>(json{{kValue, json_of(entry.value, entry.name, part.items)}});
    check_names_in_value(entry.name, part);
    parts.emplace_back(entry.name, std::move(part));
  }
  if (options.full) check_same_names(parts, ranks);
  StateGetter getter(ranks, options);
  for (auto& [name, part] : parts) getter.add(name, std::move(part));
  return std::move(getter).result();
}

// As collect_state made them: tensors among them have the name of the entry, and of their place in it.
json values_of(const std::string& entry, const c10::IValue& values) {
  std::vector<Item> known;
  const bool is_value =
      values.isGenericDict() && values.toGenericDict().size() == 1 && values.toGenericDict().contains(kValue);
  if (!is_value) return json_of(Value(values), entry, known);
  return {{kValue, json_of(Value(values.toGenericDict().at(kValue)), entry, known)}};
}

// What the others need to know of rank 0's state before its tensors come.
std::string looks_of_state(const StateDict& state, bool is_sent) {
  json object = json::object();
  for (const auto& [entry, content] : state) {
    json tensors = json::object();
    for (const auto& [name, tensor] : content.tensors) {
      if (is_sent && is_dtensor(tensor))
        fail(c10::str("\"", entry, ".", name, "\" is a DTensor on rank 0"),
             "send whole tensors: get_state with {.full = true}");
      tensors[name] = {int(tensor.scalar_type()), tensor.sizes().vec()};
    }
    object[entry] = {{"tensors", tensors}, {"values", values_of(entry, content.values)}};
  }
  return object.dump();
}

SavedPart saved_part(const json& looks) {
  SavedPart part;
  for (const auto& [name, each] : looks.at("tensors").items()) {
    part.tensors.push_back({name, c10::ScalarType(each[0].get<int>()), each[1].get<std::vector<int64_t>>()});
  }
  json values = looks.at("values");
  if (values.is_object() && values.contains("per_rank"))
    part.per_rank = std::make_shared<const json>(json::array({values["per_rank"]}));
  part.values = std::make_shared<const json>(std::move(values));
  return part;
}

struct Assignment {
  std::string entry;
  FileTensor from;
  at::Tensor to;
};

// This rank's part of a whole value, or of a DTensor, as `to` lies.
at::Tensor part_like(const at::Tensor& value, const at::Tensor& to) {
  const SpecPtr spec = spec_of(to);
  if (!spec) return is_dtensor(value) ? DTensor(value).full_tensor() : value;
  if (const SpecPtr theirs = spec_of(value)) {
    if (theirs->mesh == spec->mesh) return redistribute_local(part_of(value), *theirs, spec->placements);
    return part_like(DTensor(value).full_tensor(), to);
  }
  const SpecPtr whole = intern_spec(spec->mesh, Placements(spec->placements.size()), value.sizes(),
                                    serried::contiguous_strides(value.sizes()), value.scalar_type());
  return redistribute_local(value.contiguous(), *whole, spec->placements);
}

class StateSetter {
 public:
  StateSetter(const Ranks& ranks, const SetStateOptions& options) : ranks_(ranks), options_(options) {}

  void plan(const Contents& contents, const json& looks, const StateDict& state) {
    const ParameterNames names = parameter_names(contents);
    const CallContext call{&names, ranks_.rank(), ranks_.size()};
    for (const Entry& entry : contents) {
      if (!looks.contains(entry.name)) fail(c10::str("the state has no \"", entry.name, "\""), "set what is there");
      check_kind(entry, is_value(looks[entry.name].at("values")));
      const SavedPart saved = saved_part(looks[entry.name]);
      if (saved.per_rank && options_.from_first_rank) {
        fail(c10::str("\"", entry.name, "\" is the random state of one rank"),
             "set it on each rank from its own state");
      }
      const Wanted all = wanted(entry, saved, call);
      compare_twins(entry.name, all, state);
      add(entry.name, saved, all);
    }
  }

  void run(const StateDict& state) {
    const tape::Pause off_tape;
    const at::NoGradGuard no_grad;
    options_.from_first_rank&& ranks_.size() > 1 ? receive_all(state) : write_own(state);
    for (const auto& apply : apply_) apply();
  }

 private:
  static void check_kind(const Entry& entry, bool is_value) {
    const bool wants_value = source_of(entry.value) == nullptr;
    if (wants_value == is_value) return;
    fail(c10::str("\"", entry.name, "\" is a ", is_value ? "value" : "state", " there, and is set into a ",
                  wants_value ? "value" : "state"),
         is_value ? "pass a pointer to a variable, or a tensor" : "pass state_of(...) of the same kind of thing");
  }

  // On ranks that have the state; DTensors by what this rank holds.
  static void compare_twins(const std::string& entry, const Wanted& wanted, const StateDict& state) {
    const auto found = state.find(entry);
    if (found == state.end()) return;
    const LocalOnly local_only;
    for (const auto& [one, other] : wanted.twins) {
      const at::Tensor &a = found->second.tensors.at(one), &b = found->second.tensors.at(other);
      const bool look_same = a.scalar_type() == b.scalar_type() && spec_of(a) == spec_of(b);
      const bool are_same = a.is_same(b) || (look_same && at::equal(part_of(a), part_of(b)));
      if (!are_same) fail_for_twins(one, other, c10::str("\"", entry, "\""));
    }
  }

  void write_own(const StateDict& state) const {
    for (const Assignment& each : assignments_) {
      write_part(each.to, part_like(state.at(each.entry).tensors.at(each.from.name), each.to));
    }
  }

  // All tensors go to all ranks, one at a time: with ZeRO ranks want different ones.
  void receive_all(const StateDict& state) const {
    std::map<std::pair<std::string, std::string>, std::vector<const Assignment*>> wanted;
    for (const Assignment& each : assignments_) wanted[{each.entry, each.from.name}].push_back(&each);
    for (const auto& [entry, from] : all_) {
      at::Tensor value =
          ranks_.is_first() ? state.at(entry).tensors.at(from.name).contiguous() : at::empty(from.sizes, from.dtype);
      broadcast_(value, ranks_.group(), {.src = 0});
      const auto found = wanted.find({entry, from.name});
      if (found == wanted.end()) continue;
      for (const Assignment* each : found->second) write_part(each->to, part_like(value, each->to));
    }
  }

  Wanted wanted(const Entry& entry, const SavedPart& saved, const CallContext& call) const {
    if (Source* source = source_of(entry.value))
      return source->want(saved, {.strict = options_.strict, .rename = options_.rename}, call);
    Wanted wanted;
    want_value(entry.value, entry.name, saved.values->at(kValue), wanted);
    return wanted;
  }

  void add(const std::string& entry, const SavedPart& saved, const Wanted& wanted) {
    check_names(entry, wanted, options_.strict);
    std::unordered_map<std::string, const FileTensor*> there;
    for (const FileTensor& tensor : saved.tensors) {
      all_.emplace_back(entry, tensor);
      there.emplace(tensor.name, &tensor);
    }
    for (const Target& target : wanted.targets) {
      const auto found = there.find(target.saved_name);
      if (found == there.end())
        fail(c10::str("the state has no tensor \"", target.saved_name, "\""), "set what is there");
      check_looks({nullptr, found->second, target.tensor}, {options_.convert, entry + "."});
      assignments_.push_back({entry, *found->second, target.tensor});
    }
    if (wanted.apply) apply_.push_back(wanted.apply);
  }

  const Ranks& ranks_;
  const SetStateOptions& options_;
  std::vector<std::pair<std::string, FileTensor>> all_;
  std::vector<Assignment> assignments_;
  std::vector<std::function<void()>> apply_;
};

}  // namespace
}  // namespace detail

StateDict get_state(const Contents& contents, GetStateOptions options) {
  detail::refuse_recording("checkpoint::get_state");
  const detail::Ranks ranks(detail::chosen_group(options.process_group));
  try {
    return detail::collect_state(contents, ranks, options);
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::get_state", failure);
  }
}

void set_state(const Contents& contents, const StateDict& state, SetStateOptions options) {
  detail::refuse_recording("checkpoint::set_state");
  const detail::Ranks ranks(detail::chosen_group(options.process_group));
  try {
    const bool is_asked = !options.from_first_rank || ranks.is_first();
    const std::vector<std::string> looks =
        ranks.together([&] { return detail::looks_of_state(is_asked ? state : StateDict(), options.from_first_rank); });
    const std::string& mine = looks[options.from_first_rank ? 0 : size_t(ranks.rank())];
    detail::StateSetter setter(ranks, options);
    ranks.together([&] {
      setter.plan(contents, nlohmann::json::parse(mine), is_asked ? state : StateDict());
      return std::string();
    });
    setter.run(state);
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::set_state", failure);
  }
}

}  // namespace serried::checkpoint
