// load: compare names and looks on all ranks, then read; read_value.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include "serried/base/trace.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/collect.h"
#include "serried/checkpoint/packed.h"
#include "serried/checkpoint/reader.h"
#include "serried/checkpoint/save_job.h"
#include "serried/checkpoint/shared_blocks.h"
#include "serried/checkpoint/values.h"
#include "serried/tensor/parts.h"

namespace serried::checkpoint {
namespace detail {
namespace {

using nlohmann::json;

// Everything that a load reads and does.
struct LoadPlan {
  std::vector<Reading> readings = {};
  NamesOfEntries names = {};
  std::vector<std::function<void()>> apply = {};
};

class LoadPlanner {
 public:
  LoadPlanner(Checkpoint& checkpoint, const LoadOptions& options, const CallContext& call)
      : checkpoint_(checkpoint), options_(options), call_(call) {}

  LoadPlan plan(const Contents& contents) {
    for (const Entry& entry : contents) {
      if (Source* source = source_of(entry.value)) {
        add(entry.name, source->want(checkpoint_.part(entry.name), options_, call_), entry.name);
      } else {
        add(entry.name, wanted_value(entry), kValuesEntry);
      }
    }
    if (!options_.only.empty() && plan_.readings.empty()) {
      fail(c10::str("no name of these begins with \"", options_.only, "\""),
           "pass the beginning of a name of the module, without that of the entry, as in {.only = \"layers.0\"}");
    }
    return std::move(plan_);
  }

 private:
  Wanted wanted_value(const Entry& entry) {
    const json& values = checkpoint_.index().values;
    if (!values.contains(entry.name)) {
      checkpoint_.entry(entry.name);  // says what there is
      fail(c10::str("\"", entry.name, "\" is a state in the checkpoint, and is loaded into a value"),
           "pass state_of(...) of the same kind of thing");
    }
    Wanted wanted;
    want_value(entry.value, entry.name, values[entry.name], wanted);
    return wanted;
  }

  void add(const std::string& name, Wanted wanted, const std::string& entry) {
    size_t number = 0;
    while (plan_.names.count({name, number}) != 0) ++number;
    plan_.names[{name, number}] = {std::move(wanted.missing), std::move(wanted.extra)};
    std::unordered_map<std::string, std::pair<std::shared_ptr<TensorFile>, const FileTensor*>> found;
    for (const auto& file : checkpoint_.files(entry)) {
      for (const FileTensor& tensor : file->header().tensors) found[tensor.name] = {file, &tensor};
    }
    const auto reading_of = [&](const std::string& saved_name, const at::Tensor& to) -> Reading {
      const auto place = found.find(saved_name);
      if (place != found.end()) return {place->second.first, place->second.second, to};
      fail(c10::str(checkpoint_.folder(), " lacks the tensor \"", saved_name, "\" of \"", name, "\""),
           "use another checkpoint");
    };
    for (const Target& target : wanted.targets) {
      const Reading reading = reading_of(target.saved_name, target.tensor);
      check_looks(reading, {options_.convert, entry == kValuesEntry ? "" : name + "."});
      plan_.readings.push_back(reading);
    }
    for (const auto& [one, other] : wanted.twins) {
      check_twins(reading_of(one, {}), reading_of(other, {}), c10::str("\"", name, "\""));
    }
    if (wanted.apply) plan_.apply.push_back(std::move(wanted.apply));
  }

  Checkpoint& checkpoint_;
  const LoadOptions& options_;
  const CallContext& call_;
  LoadPlan plan_;
};

// Parts in short runs are moved between ranks, so that all ranks of a mesh must read the same DTensors of it: by mesh
// its ranks, this rank among them, and a hash of what they read and how that lies here. Two entries may have the same
// names.
json orders_of(const LoadPlan& plan) {
  std::map<std::vector<int64_t>, std::pair<int64_t, std::string>> texts;
  std::unordered_map<const Spec*, std::string> looks;  // specs are interned: of many tensors there are few
  for (const Reading& reading : plan.readings) {
    const SpecPtr spec = spec_of(reading.to);
    if (!spec || !spec->mesh.contains_this_rank()) continue;
    auto& [rank, text] = texts[spec->mesh.rank_list()];
    rank = spec->mesh.get_rank();
    std::string& look = looks[spec.get()];
    if (look.empty()) look = spec->to_string();
    const std::string& path = reading.file->path();
    text.append(path, path.rfind('/') + 1).append("/").append(reading.from->name).append(" ").append(look) += '\n';
  }
  json orders = json::array();
  for (const auto& [list, text] : texts) {
    orders.push_back({list, text.first, hash_of(text.second.data(), int64_t(text.second.size()))});
  }
  return orders;
}

// What a rank has to say before anything is read.
std::string load_message(const Checkpoint& checkpoint, const LoadPlan& plan, bool strict) {
  json names = json::array();
  for (const auto& [entry, each] : plan.names) names.push_back({entry.first, entry.second, each.missing, each.extra});
  return json({{"checksum", checkpoint.index().checksum},
               {"orders", orders_of(plan)},
               {"names", names},
               {"strict", strict}})
      .dump();
}

void check_same_files(const std::vector<json>& said, const std::string& path) {
  for (size_t rank = 1; rank < said.size(); ++rank) {
    if (said[rank]["checksum"] == said[0]["checksum"]) continue;
    fail(c10::str("rank ", rank, " loads another checkpoint than rank 0; this rank loads ", path),
         "choose it on one rank and broadcast the name, as checkpoint::latest does, or pass the same path on every "
         "rank");
  }
}

// A rank that raises what the others do not leaves them waiting.
void check_same_strictness(const std::vector<json>& said) {
  for (size_t rank = 1; rank < said.size(); ++rank) {
    if (said[rank]["strict"] == said[0]["strict"]) continue;
    fail(c10::str("rank ", rank, " loads with {.strict = ", said[rank]["strict"].dump(),
                  "}, and rank 0 with {.strict = ", said[0]["strict"].dump(), "}"),
         "pass the same on every rank");
  }
}

// Meshes over groups of their own may have the same ranks: then each of these says as many things, and the same.
void check_same_orders(const std::vector<json>& said) {
  std::map<json, std::map<int64_t, std::multiset<uint64_t>>> by_mesh;
  for (const json& rank : said) {
    for (const json& order : rank["orders"])
      by_mesh[order[0]][order[1].get<int64_t>()].insert(order[2].get<uint64_t>());
  }
  for (const auto& [mesh, of_ranks] : by_mesh) {
    for (const auto& [rank, orders] : of_ranks) {
      if (orders == of_ranks.begin()->second) continue;
      fail(c10::str("rank ", rank, " of the mesh of ranks ", mesh.dump(), " loads other DTensors than rank ",
                    of_ranks.begin()->first),
           "load the same contents on every rank of a mesh");
    }
  }
}

void compare_ranks(const std::vector<std::string>& messages, const std::string& path, bool strict) {
  std::vector<json> said;
  std::vector<NamesOfEntries> names;
  for (const std::string& message : messages) {
    said.push_back(json::parse(message));
    NamesOfEntries& mine = names.emplace_back();
    for (const json& each : said.back()["names"]) {
      mine[{each[0].get<std::string>(), each[1].get<size_t>()}] = {each[2].get<std::vector<std::string>>(),
                                                                   each[3].get<std::vector<std::string>>()};
    }
  }
  check_same_files(said, path);
  check_same_strictness(said);
  if (strict) check_names_of_ranks(names);
  check_same_orders(said);
}

// What a rank tells each other one, as numbers.
using Dealt = std::vector<std::vector<int64_t>>;

std::string sizes_text_of(const Dealt& dealt) {
  std::vector<int64_t> sizes;
  for (const std::vector<int64_t>& each : dealt) sizes.push_back(int64_t(each.size()));
  return packed(sizes);
}

// Blocks of which no rank has read all. `sizes`: of what each rank has dealt.
void check_shared_blocks(const std::unique_ptr<Checkpoint>& checkpoint, const Dealt& dealt,
                         const std::vector<std::string>& sizes, const Ranks& ranks) {
  int64_t total = 0;
  for (const std::string& rank : sizes) {
    for (int64_t size : unpacked<int64_t>(rank)) total += size;
  }
  if (total == 0) return;
  const std::vector<int64_t> told = ranks.deal(dealt);
  const auto check = [&] {
    check_blocks_of(*checkpoint, told);
    return std::string();
  };
  ranks.together([&] { return from_one(checkpoint, check); });
}

}  // namespace
}  // namespace detail

void load(const std::string& path, const Contents& contents, LoadOptions options) {
  const trace::Span span("checkpoint::load", trace::kSetup);
  detail::refuse_recording("checkpoint::load");
  const detail::Ranks ranks(detail::chosen_group(options.process_group));
  try {
    detail::wait_for_saving();
    std::unique_ptr<detail::Checkpoint> checkpoint;
    detail::LoadPlan plan;
    const detail::ParameterNames names = detail::parameter_names(contents);
    const detail::CallContext call{&names, ranks.rank(), ranks.size()};
    const auto tell = [&] {
      checkpoint = std::make_unique<detail::Checkpoint>(path);
      plan = detail::LoadPlanner(*checkpoint, options, call).plan(contents);
      return detail::load_message(*checkpoint, plan, options.strict);
    };
    detail::Dealt dealt(static_cast<size_t>(ranks.size()));
    const auto read = [&] {
      detail::read_all(plan.readings);
      if (options.verify) dealt = detail::leaves_for_ranks(*checkpoint, ranks.size());
      if (!options.verify && checkpoint->was_replaced()) detail::fail_for_replaced(checkpoint->folder());
      return detail::sizes_text_of(dealt);
    };
    const auto said = ranks.together([&] { return detail::from_one(checkpoint, tell); });
    detail::compare_ranks(said, path, options.strict);
    const auto sizes = ranks.together([&] { return detail::from_one(checkpoint, read); });
    detail::check_shared_blocks(checkpoint, dealt, sizes, ranks);
    ranks.together([&] {
      for (const auto& apply : plan.apply) apply();
      return std::string();
    });
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::load", failure);
  }
}

namespace detail {
namespace {

at::Tensor read_value_tensor(Checkpoint& checkpoint, const std::string& name) {
  for (const auto& file : checkpoint.files(kValuesEntry)) {
    for (const FileTensor& tensor : file->header().tensors) {
      if (tensor.name == name) return read_whole(*file, tensor);
    }
  }
  fail(c10::str(checkpoint.folder(), " lacks the tensor \"", name, "\""), "use another checkpoint");
}

c10::IValue read_value_of(const std::string& path, const std::string& name) {
  const auto checkpoint = std::make_unique<Checkpoint>(path);
  const nlohmann::json* found = find_value(checkpoint->index().values, name);
  if (found == nullptr) {
    std::vector<std::string> there;
    for (const auto& [known, value] : checkpoint->index().values.items()) there.push_back(known);
    fail(c10::str(path, " has no value \"", name, "\"; it has: ", list_of_names(there)), "read one that is there");
  }
  const auto read_tensor = [&](const std::string& tensor) { return read_value_tensor(*checkpoint, tensor); };
  return from_one(checkpoint, [&] { return value_of(*found, read_tensor); });
}

}  // namespace
}  // namespace detail

c10::IValue read_value(const std::string& path, const std::string& name) {
  try {
    detail::wait_for_saving();
    return detail::read_value_of(path, name);
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::read_value", failure);
  }
}

}  // namespace serried::checkpoint
