// What stands behind a State: what it has to save, and what it wants of a checkpoint.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <nlohmann/json_fwd.hpp>

#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <string>
#include <unordered_map>
#include <vector>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/safetensors.h"

namespace serried::checkpoint::detail {

/// Who has the value of a tensor that is not a DTensor.
enum class Holder {
  all,    // every rank the same, which is checked
  first,  // every rank has one, and rank 0's counts
  owner,  // one rank alone, which names it; the others do not know of it
};

struct Item {
  std::string name;
  at::Tensor tensor;
  Holder holder = Holder::all;
};

/// What one thing saves.
struct Part {
  std::vector<Item> items = {};
  std::map<std::string, std::string> aliases = {};  // other names of the same tensors
  std::shared_ptr<nlohmann::json> values = {};      // the same on all ranks; or null
  std::shared_ptr<nlohmann::json> owned = {};       // an object, of this rank alone: joined with those of the others
  std::shared_ptr<nlohmann::json> per_rank = {};    // of this rank; or null
};

/// What a checkpoint has of one thing.
struct SavedPart {
  std::vector<FileTensor> tensors;  // names and looks; begin and end do not count
  std::map<std::string, std::string> aliases;
  std::shared_ptr<const nlohmann::json> values;    // null where there are none
  std::shared_ptr<const nlohmann::json> per_rank;  // a list, or null
};

/// A tensor of the checkpoint and where it goes.
struct Target {
  std::string saved_name;
  at::Tensor tensor;
};

struct Wanted {
  std::vector<Target> targets = {};
  /// Two tensors of the checkpoint that are one here, the second of which is read: they have to be the same.
  std::vector<std::pair<std::string, std::string>> twins = {};
  std::vector<std::string> missing = {};  // names of ours that the checkpoint does not have
  std::vector<std::string> extra = {};    // names of the checkpoint that nobody wants
  std::function<void()> apply = {};       // when all tensors are read: the values; or null
};

/// Names of parameters that modules of the same call give.
using ParameterNames = std::unordered_map<const c10::TensorImpl*, std::vector<std::pair<std::string, std::string>>>;

struct CallContext {
  const ParameterNames* names = nullptr;  // (entry, name), by parameter
  int rank = 0;
  int world_size = 1;
};

class Source {
 public:
  virtual ~Source() = default;
  virtual Part collect(const CallContext& call) = 0;
  virtual Wanted want(const SavedPart& saved, const LoadOptions& options, const CallContext& call) = 0;
  /// Null unless the source is a module.
  virtual const torch::nn::Module* module() const { return nullptr; }
  /// Null unless the source is an optimizer.
  virtual torch::optim::Optimizer* optimizer() const { return nullptr; }
};

/// Gives names by the rules of `renames`. Failure for one that is no regular expression, and for names too long for
/// one.
class Renamer {
 public:
  explicit Renamer(const std::vector<Rename>& renames);
  std::string operator()(const std::string& name) const;

 private:
  std::vector<std::pair<std::regex, std::string>> rules_;
};

/// Parameters and buffers by name, in order, each tensor once; other names of it are aliases.
Part part_of_module(const torch::nn::Module& module);
/// For a module that is a DistributedDataParallel the one inside.
const torch::nn::Module& unwrapped(const torch::nn::Module& module);
/// Which tensors of `saved` go into which of `part`, by names.
Wanted match_names(const Part& part, const SavedPart& saved, const LoadOptions& options);

/// What the ranks that have an entry say of it as one: the same on all of them, or, of optimizers with different
/// parameters, what each has. Failure that shows both where two ranks say different things of one parameter.
nlohmann::json joined_values(const std::string& entry, const std::vector<std::pair<int, nlohmann::json>>& of_ranks);

std::shared_ptr<Source> optimizer_source(torch::optim::Optimizer& optimizer);

}  // namespace serried::checkpoint::detail
