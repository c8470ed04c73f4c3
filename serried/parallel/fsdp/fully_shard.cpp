// Finds the parameters of a block, checks them, cuts them, and hands them over.
#include "serried/parallel/fsdp/fully_shard.h"

#include <malloc.h>

#include <algorithm>
#include <set>

#include "serried/base/cores.h"
#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/ddp/claim.h"
#include "serried/parallel/ddp/mixed_precision.h"
#include "serried/parallel/fsdp/block.h"
#include "serried/tensor/dtensor.h"
#include "serried/tensor/making/placing.h"
#include "serried/tensor/making/unchecked.h"

namespace serried {
namespace {

using detail::Block;
using detail::BlockMember;
using BlockPtr = std::shared_ptr<Block>;

constexpr const char* kFullyShard = "fully_shard";

struct ModuleParameter {
  std::string name;
  at::Tensor tensor;
  const torch::nn::Module* owner;
};

void collect(const torch::nn::Module& module, const std::string& path, std::vector<ModuleParameter>& found) {
  const std::string prefix = path.empty() ? "" : path + ".";
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    if (item.value().defined()) found.push_back({prefix + item.key(), item.value(), &module});
  }
  for (const auto& item : module.named_children()) collect(*item.value(), prefix + item.key(), found);
}

using Modules = std::vector<const torch::nn::Module*>;

std::vector<ModuleParameter> parameters_of(const Modules& modules) {
  std::vector<ModuleParameter> all;
  for (size_t i = 0; i < modules.size(); ++i) collect(*modules[i], modules.size() == 1 ? "" : std::to_string(i), all);
  return all;
}

bool is_root_of(const torch::nn::Module* module, const Block& block) {
  return std::find(block.roots().begin(), block.roots().end(), module) != block.roots().end();
}

// The blocks inside get their path, which messages show.
std::vector<BlockPtr> blocks_inside(const Modules& modules, const std::vector<ModuleParameter>& parameters) {
  std::vector<BlockPtr> blocks;
  for (const ModuleParameter& parameter : parameters) {
    BlockPtr block = detail::block_of(parameter.tensor);
    if (block && std::find(blocks.begin(), blocks.end(), block) == blocks.end()) blocks.push_back(std::move(block));
  }
  for (const torch::nn::Module* module : modules) {
    for (const auto& item : module->named_modules("", /*include_self=*/false)) {
      for (const BlockPtr& block : blocks) {
        if (is_root_of(item.value().get(), *block)) block->set_path(item.key());
      }
    }
  }
  return blocks;
}

// What is whole together stays so: a call for a part of it would do nothing.
void check_not_inside(const Modules& modules, const Block& block) {
  for (const torch::nn::Module* module : modules) {
    if (!block.contains(module)) continue;
    raise<c10::ValueError>({kFullyShard,
                            c10::str("the module ", module->name(), " is inside of ", block.text(),
                                     ", which has its parameters already and gathers them all at once"),
                            "shard layers before the module around them"});
  }
}

void check_inside(const Modules& modules, const std::vector<ModuleParameter>& parameters) {
  for (const ModuleParameter& parameter : parameters) {
    const BlockPtr block = detail::block_of(parameter.tensor);
    if (!block) continue;
    for (const torch::nn::Module* module : modules) {
      if (!is_root_of(module, *block)) continue;
      raise<c10::ValueError>({kFullyShard, c10::str("the module ", module->name(), " is fully sharded already"),
                              "call it once per module, layers before the module around them"});
    }
    check_not_inside(modules, *block);
    if (block->contains(parameter.owner)) continue;
    raise<c10::ValueError>({kFullyShard,
                            c10::str(parameter.name, " is also a parameter of ", block->text(),
                                     ", which does not contain ", parameter.owner->name()),
                            "shard a module that contains both users of the parameter as one block"});
  }
}

void check_new(const ModuleParameter& parameter) {
  const at::Tensor& t = parameter.tensor;
  if (detail::is_claimed(t)) {
    raise<c10::ValueError>({kFullyShard, parameter.name + " belongs to a DistributedDataParallel, which averages it",
                            "shard the bare module; for replicas of shards pass a mesh (replicate, shard)"});
  }
  if (!t.is_leaf()) {
    raise<c10::ValueError>(
        {kFullyShard,
         c10::str(parameter.name, " ", watch::describe_tensor(t), " is the result of an op that autograd recorded"),
         "shard a module whose parameters are leaves"});
  }
  if (t.grad().defined()) {
    raise<c10::ValueError>({kFullyShard, parameter.name + " has a gradient already, which no rank has averaged",
                            "shard the module before the first backward, or call zero_grad() before"});
  }
}

void check_one_dtype(const std::vector<ModuleParameter>& parameters) {
  for (const ModuleParameter& parameter : parameters) {
    if (parameter.tensor.scalar_type() == parameters[0].tensor.scalar_type() &&
        parameter.tensor.device() == parameters[0].tensor.device()) {
      continue;
    }
    raise<c10::ValueError>(
        {kFullyShard,
         c10::str(parameters[0].name, " is ", parameters[0].tensor.scalar_type(), " on ", parameters[0].tensor.device(),
                  " and ", parameter.name, " ", parameter.tensor.scalar_type(), " on ", parameter.tensor.device(),
                  ": one block is sent by one collective"),
         "shard submodules of one dtype by themselves first, or name one in .ignored_params"});
  }
}

// The parameters that the new block gets, each once.
std::vector<ModuleParameter> own_parameters(const std::vector<ModuleParameter>& all,
                                            const std::vector<at::Tensor>& ignored) {
  std::set<const void*> seen;
  for (const at::Tensor& t : ignored) seen.insert(t.unsafeGetTensorImpl());
  std::vector<ModuleParameter> own;
  for (const ModuleParameter& parameter : all) {
    if (detail::block_of(parameter.tensor) || !seen.insert(parameter.tensor.unsafeGetTensorImpl()).second) continue;
    check_new(parameter);
    own.push_back(parameter);
  }
  if (!own.empty()) check_one_dtype(own);
  return own;
}

// All ranks of the current group are replicas of each other, so that nobody has to name a mesh; not so beside tensor
// parallel, and which other axis is meant cannot be known: there may be stages of a pipeline, too.
[[noreturn]] void raise_needs_mesh(const ModuleParameter& parameter, const Spec& spec) {
  const std::string tp = spec.mesh.to_string();
  const bool has_others = spec.mesh.root_group() == nullptr || spec.mesh.root_group()->getSize() > spec.mesh.size();
  raise<c10::ValueError>(
      {kFullyShard,
       c10::str(parameter.name, " is ", spec.to_string(),
                ", and without .mesh it would be cut over all ranks of the current group, those of ", tp,
                " among them"),
       has_others ? c10::str("pass the axis whose ranks have batches of their own, of the mesh that ", tp,
                             " was taken from: fully_shard(module, {.mesh = mesh[\"dp\"]})")
                  : c10::str("pass the mesh it was born on; for tensor parallel make one mesh with an axis for each, "
                             "init_device_mesh(\"cpu\", {1, ",
                             spec.mesh.size(),
                             "}, {\"dp\", \"tp\"}), and give mesh[\"tp\"] to parallelize_module and mesh[\"dp\"] to "
                             "fully_shard")});
}

DeviceMesh mesh_of_all(const std::vector<ModuleParameter>& parameters) {
  const Group group = current_process_group();
  const std::optional<DeviceMesh> all = group ? std::optional(DeviceMesh::from_group(group)) : std::nullopt;
  for (const ModuleParameter& parameter : parameters) {
    const DTensorMeta* meta = dtensor_meta(parameter.tensor);
    if (meta == nullptr) continue;
    const bool has_style = meta->use != nullptr && meta->use->layouts != nullptr;
    if (has_style || !all.has_value() || !(meta->spec->mesh == *all)) raise_needs_mesh(parameter, *meta->spec);
  }
  return all.has_value() ? *all : DeviceMesh::from_group(require_current_process_group(kFullyShard));
}

DeviceMesh checked_mesh(const FullyShardOptions& options, const std::vector<ModuleParameter>& own) {
  const DeviceMesh mesh = options.mesh ? *options.mesh : mesh_of_all(own);
  detail::check_in_mesh(kFullyShard, mesh);
  if (mesh.ndim() == 1 || mesh.ndim() == 2) return mesh;
  raise<c10::ValueError>({kFullyShard, c10::str(mesh.to_string(), " has ", mesh.ndim(), " axes"),
                          "pass one axis that parameters are cut over, or two: (replicate, shard)"});
}

Placement wanted_cut(const ModuleParameter& parameter, const ShardPlacementFunction& choose) {
  const std::optional<Placement> chosen = choose ? choose(parameter.tensor) : std::nullopt;
  const Placement cut = chosen.value_or(Shard(0));
  if (cut.is_shard() && !cut.is_strided()) return cut;
  raise<c10::ValueError>({kFullyShard,
                          c10::str("shard_placement_fn gives ", to_string(Placements{cut}), " for ", parameter.name),
                          "return Shard(dim), or std::nullopt for Shard(0)"});
}

// How a parameter comes into a block.
struct Cutting {
  BlockMember member;
  at::Tensor part;
};

class Cutter {
 public:
  Cutter(DeviceMesh mesh, const FullyShardOptions& options) : mesh_(std::move(mesh)), options_(options) {}

  Cutting cut(const ModuleParameter& parameter) const {
    const at::Tensor& t = parameter.tensor;
    Placements placements(size_t(mesh_.ndim()));
    if (t.dim() > 0) placements.back() = wanted_cut(parameter, options_.shard_placement_fn);
    placements = detail::resolved_placements(kFullyShard, placements, t.dim(), mesh_, t.scalar_type());
    const DTensorMeta* meta = dtensor_meta(t);
    if (meta == nullptr) return cut_plain(parameter, placements);
    return meta->spec->mesh == mesh_ ? adopt(parameter, placements) : cut_further(parameter, placements);
  }

 private:
  static BlockMember member_of(const ModuleParameter& parameter, SpecPtr spec, c10::IntArrayRef whole_sizes) {
    const Placement cut = spec->placements.back();
    return {.name = parameter.name,
            .parameter = c10::weak_intrusive_ptr<c10::TensorImpl>(parameter.tensor.getIntrusivePtr()),
            .spec = std::move(spec),
            .inner = SpecPtr(),
            .sizes = c10::DimVector(whole_sizes),
            .dim = cut.is_shard() ? cut.dim() : -1};
  }

  at::Tensor part_of(const at::Tensor& plain, const Placements& placements, c10::IntArrayRef local_sizes) const {
    if (plain.is_meta()) return at::empty(local_sizes, plain.options().requires_grad(false));
    return detail::distributed_part(kFullyShard, plain, mesh_, placements, 0);
  }

  Cutting cut_plain(const ModuleParameter& parameter, const Placements& placements) const {
    const at::Tensor& t = parameter.tensor;
    SpecPtr spec = intern_spec(mesh_, placements, t.sizes(), serried::contiguous_strides(t.sizes()), t.scalar_type());
    at::Tensor part = part_of(t, placements, spec->local_sizes());
    return {member_of(parameter, std::move(spec), t.sizes()), std::move(part)};
  }

  // Born sharded.
  Cutting adopt(const ModuleParameter& parameter, const Placements& placements) const {
    const DTensorMeta& meta = *dtensor_meta(parameter.tensor);
    if (meta.use != nullptr && meta.use->layouts != nullptr) {
      raise<c10::ValueError>(
          {kFullyShard,
           c10::str(parameter.name, " ", meta.spec->to_string(),
                    " belongs to tensor parallel over these ranks, who compute parts of one batch"),
           "shard over another axis of one mesh, whose ranks have batches of their own: mesh[\"dp\"]"});
    }
    if (meta.spec->placements == placements) return {member_of(parameter, meta.spec, meta.spec->sizes), meta.local};
    raise<c10::ValueError>(
        {kFullyShard,
         c10::str(parameter.name, " lies as ", meta.spec->to_string(), ", not \"", to_string(placements), "\""),
         "let it be born in that placement, or name it in .ignored_params"});
  }

  DeviceMesh joined_with(const DeviceMesh& inner, const ModuleParameter& parameter) const {
    try {
      return DeviceMesh::concatenate({inner, mesh_});
    } catch (c10::Error& error) {
      error.add_context(c10::str("while fully_shard cut ", parameter.name, " over ", mesh_.to_string()));
      throw;
    }
  }

  // Tensor parallel: the axes it is cut by come first, so that gathering the last gives what it was.
  Cutting cut_further(const ModuleParameter& parameter, const Placements& placements) const {
    const DTensorMeta& meta = *dtensor_meta(parameter.tensor);
    const SpecPtr inner = meta.spec;
    Placements all = inner->placements;
    if (std::any_of(all.begin(), all.end(), [](const Placement& p) { return p.is_partial(); })) {
      raise<c10::ValueError>({kFullyShard, c10::str(parameter.name, " is pending: ", inner->to_string()),
                              "distribute parameters by Shard or Replicate"});
    }
    all.insert(all.end(), placements.begin(), placements.end());
    const DeviceMesh mesh = joined_with(inner->mesh, parameter);
    SpecPtr spec = intern_spec(mesh, all, inner->sizes, inner->strides, inner->dtype);
    at::Tensor part = part_of(meta.local, placements, spec->local_sizes());
    if (part.sizes() != c10::IntArrayRef(spec->local_sizes()) || !meta.local.is_contiguous()) {
      raise<c10::NotImplementedError>({kFullyShard,
                                       c10::str(parameter.name, " ", inner->to_string(), " cannot be cut further by \"",
                                                to_string(placements), "\""),
                                       "place it by plain Shards, or cut another dim by shard_placement_fn"});
    }
    BlockMember member = member_of(parameter, std::move(spec), meta.local.sizes());
    member.inner = inner;
    return {std::move(member), std::move(part)};
  }

  const DeviceMesh mesh_;
  const FullyShardOptions& options_;
};

// A handover to another thread costs, and hides nothing where that thread has no core.
bool has_spare_cores(const Group& group) {
  const int64_t all_ranks = std::max(rank_label().world_size, group->getSize());
  return num_usable_cores() >= 2 * env::maybe_integer("LOCAL_WORLD_SIZE").value_or(all_ranks);
}

BlockPtr make_block(const Modules& modules, const std::vector<ModuleParameter>& parameters, const DeviceMesh& mesh,
                    const FullyShardOptions& options) {
  const at::NoGradGuard no_grad;
  std::vector<BlockMember> members;
  std::vector<at::Tensor> tensors, parts;
  const Cutter cutter(mesh, options);
  for (const ModuleParameter& parameter : parameters) {
    Cutting cutting = cutter.cut(parameter);
    members.push_back(std::move(cutting.member));
    parts.push_back(std::move(cutting.part));
    tensors.push_back(parameter.tensor);
  }
  detail::BlockPlace place{.shard_group = mesh.get_group(mesh.ndim() - 1),
                           .replica_group = mesh.ndim() == 2 ? mesh.get_group(int64_t(0)) : Group(),
                           .precision = options.mixed_precision};
  place.overlaps = options.overlap.has_value() ? *options.overlap : has_spare_cores(place.shard_group);
  const auto block = std::make_shared<Block>(std::move(place), modules, std::move(members));
  block->adopt(tensors, parts);
  return block;
}

void check_modules(const Modules& modules) {
  bool is_right = !modules.empty();
  for (const torch::nn::Module* module : modules) {
    is_right = is_right && module != nullptr && std::count(modules.begin(), modules.end(), module) == 1;
  }
  if (is_right) return;
  raise<c10::ValueError>({kFullyShard,
                          c10::str("the list of ", modules.size(), " modules is empty, or names null or one twice"),
                          "name each module of the block once"});
}

// glibc keeps the memory of parameters that were whole, and before 2.38 does not find it again for aligned tensors:
// half of a model stayed with the process.
void give_memory_back(const Block& block) {
#ifdef __GLIBC__
  constexpr int64_t kMuch = 1 << 20;
  if (block.whole_bytes() >= kMuch) malloc_trim(0);
#endif
}

FullyShardHandle shard(const Modules& modules, const FullyShardOptions& options) {
  detail::check_output_dtype(kFullyShard, options.mixed_precision);
  const std::vector<ModuleParameter> all = parameters_of(modules);
  check_inside(modules, all);
  const std::vector<ModuleParameter> own = own_parameters(all, options.ignored_params);
  const DeviceMesh mesh = checked_mesh(options, own);
  const std::vector<BlockPtr> inside = blocks_inside(modules, all);
  for (const BlockPtr& block : inside) {
    // It is not the outermost after all.
    if (std::exchange(block->setting().is_root, false)) block->setting().reshard_after_forward = true;
  }
  BlockPtr block;
  if (!own.empty()) {
    block = make_block(modules, own, mesh, options);
    block->setting().is_root = !inside.empty() && !options.reshard_after_forward.has_value();
    block->setting().reshard_after_forward = options.reshard_after_forward.value_or(inside.empty());
    give_memory_back(*block);
  }
  return FullyShardHandle(std::move(block), inside);
}

}  // namespace

FullyShardHandle fully_shard(torch::nn::Module& module, FullyShardOptions options) {
  FullyShardHandle handle = shard({&module}, options);
  if (options.mixed_precision.buffer_dtype) detail::cast_buffers(module, {}, *options.mixed_precision.buffer_dtype);
  return handle;
}

FullyShardHandle fully_shard(const std::vector<torch::nn::Module*>& modules, FullyShardOptions options) {
  check_modules({modules.begin(), modules.end()});
  FullyShardHandle handle = shard({modules.begin(), modules.end()}, options);
  const std::optional<at::ScalarType> dtype = options.mixed_precision.buffer_dtype;
  for (torch::nn::Module* module : modules) {
    if (dtype.has_value()) detail::cast_buffers(*module, {}, *dtype);
  }
  return handle;
}

}  // namespace serried
