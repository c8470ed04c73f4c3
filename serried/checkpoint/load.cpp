// load: compare names and looks on all ranks, then read; read_value.
#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

#include "serried/base/trace.h"
#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/load_names.h"
#include "serried/checkpoint/plan.h"
#include "serried/checkpoint/reader.h"
#include "serried/checkpoint/save_job.h"
#include "serried/checkpoint/values.h"
#include "serried/tensor/parts.h"

namespace serried::checkpoint {
namespace detail {
namespace {

using nlohmann::json;

// Everything that a load reads and does.
struct LoadPlan {
  std::vector<Reading> readings = {};
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
           "pass {.only = \"layers.0\"}: names are those of the module, without that of the entry");
    }
    return std::move(plan_);
  }

 private:
  Wanted wanted_value(const Entry& entry) {
    const json& values = checkpoint_.index().values;
    if (!values.contains(entry.name)) checkpoint_.entry(entry.name);  // says what there is
    Wanted wanted;
    if (values.contains(entry.name)) want_value(entry.value, entry.name, values[entry.name], wanted);
    return wanted;
  }

  void add(const std::string& name, Wanted wanted, const std::string& entry) {
    check_names(name, wanted, options_.strict);
    std::unordered_map<std::string, std::pair<std::shared_ptr<TensorFile>, const FileTensor*>> found;
    for (const auto& file : checkpoint_.files(entry)) {
      for (const FileTensor& tensor : file->header().tensors) found[tensor.name] = {file, &tensor};
    }
    for (const Target& target : wanted.targets) {
      const auto place = found.find(target.saved_name);
      if (place == found.end()) {
        fail(c10::str(checkpoint_.folder(), " lacks the tensor \"", target.saved_name, "\" of \"", name, "\""),
             "use another checkpoint");
      }
      const Reading reading{place->second.first, place->second.second, target.tensor};
      check_looks(reading, {options_.convert, entry == kValuesEntry ? "" : name + "."});
      plan_.readings.push_back(reading);
    }
    if (wanted.apply) plan_.apply.push_back(std::move(wanted.apply));
  }

  Checkpoint& checkpoint_;
  const LoadOptions& options_;
  const CallContext& call_;
  LoadPlan plan_;
};

// Parts in short runs are moved between ranks, so that all must read the same DTensors.
std::string order_of_readings(const LoadPlan& plan) {
  std::string text;
  for (const Reading& reading : plan.readings) {
    if (spec_of(reading.to)) text += reading.from->name + "\n";
  }
  return std::to_string(hash_of(text.data(), int64_t(text.size())));
}

// `files`: what tells one checkpoint from another.
void check_same_files(const std::vector<std::string>& files, const std::string& path) {
  for (size_t rank = 1; rank < files.size(); ++rank) {
    if (files[rank] == files[0]) continue;
    fail(c10::str("rank ", rank, " loads another checkpoint than rank 0; this rank loads ", path),
         "choose it on one rank and broadcast the name, or pass the same path on every rank");
  }
}

void check_same_order(const std::vector<std::string>& orders) {
  for (size_t rank = 1; rank < orders.size(); ++rank) {
    if (orders[rank] == orders[0]) continue;
    fail(c10::str("rank ", rank, " loads other DTensors than rank 0"), "load the same contents on every rank");
  }
}

}  // namespace
}  // namespace detail

void load(const std::string& path, const Contents& contents, LoadOptions options) {
  const trace::Span span("checkpoint::load", trace::kSetup);
  detail::refuse_recording("checkpoint::load");
  const detail::Ranks ranks(detail::chosen_group(options.process_group));
  try {
    detail::wait_for_saving(ranks.group());
    std::unique_ptr<detail::Checkpoint> checkpoint;
    detail::LoadPlan plan;
    const detail::ParameterNames names = detail::parameter_names(contents);
    const detail::CallContext call{&names, ranks.rank(), ranks.size()};
    detail::check_same_files(ranks.together([&] {
      checkpoint = std::make_unique<detail::Checkpoint>(path);
      const std::string index = detail::index_text(checkpoint->index());
      return std::to_string(detail::hash_of(index.data(), int64_t(index.size())));
    }),
                             path);
    detail::check_same_order(ranks.together([&] {
      plan = detail::LoadPlanner(*checkpoint, options, call).plan(contents);
      return detail::order_of_readings(plan);
    }));
    ranks.together([&] {
      detail::read_all(plan.readings);
      for (const auto& apply : plan.apply) apply();
      return std::string();
    });
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::load", failure);
  }
}

namespace detail {
namespace {

// "run.seed" inside {"run": {"seed": 1}}; null where there is none.
const nlohmann::json* find_value(const nlohmann::json& values, const std::string& name) {
  const auto whole = values.find(escaped_key(name));
  if (whole != values.end()) return &*whole;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    const auto outer = values.find(escaped_key(name.substr(0, dot)));
    if (outer == values.end() || !outer->is_object()) continue;
    if (const nlohmann::json* inner = find_value(*outer, name.substr(dot + 1))) return inner;
  }
  return nullptr;
}

at::Tensor read_value_tensor(Checkpoint& checkpoint, const std::string& name) {
  for (const auto& file : checkpoint.files(kValuesEntry)) {
    for (const FileTensor& tensor : file->header().tensors) {
      if (tensor.name == name) return read_whole(*file, tensor);
    }
  }
  fail(c10::str(checkpoint.folder(), " lacks the tensor \"", name, "\""), "use another checkpoint");
}

c10::IValue read_value_of(const std::string& path, const std::string& name) {
  Checkpoint checkpoint(path);
  const nlohmann::json* found = find_value(checkpoint.index().values, name);
  if (found == nullptr) {
    std::vector<std::string> there;
    for (const auto& [known, value] : checkpoint.index().values.items()) there.push_back(known);
    fail(c10::str(path, " has no value \"", name, "\"; it has: ", list_of_names(there)), "read one that is there");
  }
  return value_of(*found, [&](const std::string& tensor) { return read_value_tensor(checkpoint, tensor); });
}

}  // namespace
}  // namespace detail

c10::IValue read_value(const std::string& path, const std::string& name) {
  try {
    return detail::read_value_of(path, name);
  } catch (const detail::Failure& failure) {
    detail::raise_failure("checkpoint::read_value", failure);
  }
}

}  // namespace serried::checkpoint
