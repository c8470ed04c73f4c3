// Checkpoints: what training is made of, in files that outlive it and that any number of ranks can go on from.
#pragma once

#include <ATen/core/ivalue.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "serried/checkpoint/state.h"
#include "serried/comm/groups/group.h"

namespace serried::checkpoint {

struct SaveOptions {
  Group process_group = {};  // the ranks that save together; default: the current group, alone where there is none
  /// After this save, of checkpoints in the same folder whose names differ from this one's only in the number at the
  /// end, as step100 and step200 do, the others are removed: all but the `keep_last` that were saved last, and those
  /// whose number `keep_every` divides. 0: nothing is removed. One that cannot be removed is a warning.
  int64_t keep_last = 0;
  int64_t keep_every = 0;
};

/// Writes a folder `path`. All ranks call it with the same names, sizes and values, else a ValueError shows the first
/// difference. Ranks may have modules with names of their own, as the stages of a pipeline: then all of them are saved,
/// and what two ranks have under one name has to be the same. Tensors are written whole into safetensors files, each
/// byte by one of the ranks that hold it; nothing is gathered. The folder appears when all of it is on the disk, and
/// takes the place of an older checkpoint in one moment: whoever is killed, and whenever, the old one or the new one is
/// there. What is at the path and is no checkpoint, or has more in it than one, is a ValueError. If one rank cannot
/// write, all raise.
///     checkpoint::save("ckpt/step100", {{"model", checkpoint::state_of(*net)}, {"optim", checkpoint::state_of(opt)},
///                                       {"step", 100}});
void save(const std::string& path, const Contents& contents, SaveOptions options = {});

/// A save that goes on while training does.
class Saving {
 public:
  class Job;

  Saving() = default;  // of nothing: it is done
  explicit Saving(std::shared_ptr<Job> job) : job_(std::move(job)) {}

  /// Whether it has come to its end, well or not.
  bool done() const;
  /// Returns when it has; raises what `save` would have raised. The last copy that is dropped waits, and logs an error
  /// that nobody asked for.
  void wait() const;

 private:
  std::shared_ptr<Job> job_;
};

/// The same, but returns when this rank's part is copied; a thread writes it. The memory for the copies is used again
/// by the next one. The next save or load of this rank, with whatever group, waits until this one is done.
///     checkpoint::Saving saving = checkpoint::async_save("ckpt/step200", {{"model", checkpoint::state_of(*net)}});
///     train_on();
///     saving.wait();
[[nodiscard]] Saving async_save(const std::string& path, const Contents& contents, SaveOptions options = {});

/// Names of a checkpoint, rewritten: each match of the regular expression becomes `to`, as std::regex_replace has it.
/// Tensors whose names have more than 4096 letters cannot be renamed.
struct Rename {
  std::string pattern;
  std::string to;
};

struct LoadOptions {
  Group process_group = {};         // as for save
  bool strict = true;               // whether names that only one side has are an error
  bool convert = false;             // floating point numbers may have another dtype than they were saved with
  std::vector<Rename> rename = {};  // of tensors and parameters, one after the other
  std::string only = {};            // names that do not begin with it stay as they are
  bool verify = true;               // blocks that ranks read in parts are compared, too
};

/// Reads a checkpoint into what `contents` names, which may be less than there is, under any mesh, placements and
/// number of ranks: each rank reads the bytes that it holds. Writes into the tensors that are there, so that modules,
/// optimizers and captured steps see it. Before anything is written, names, sizes and dtypes are compared: ValueError
/// on all ranks with both sides. One entry may go into several things, as into a model and its average. All ranks call
/// it.
///     checkpoint::load("ckpt/step100", {{"model", checkpoint::state_of(*net)}, {"step", &step}});
void load(const std::string& path, const Contents& contents, LoadOptions options = {});

struct ExistsOptions {
  Group process_group = {};  // as for save
};

/// Whether `load` finds a checkpoint at the path: there, or where a save that was killed has set it aside. One that is
/// damaged counts, so that a training does not begin anew in silence. Rank 0 looks, and all ranks that call it get the
/// same answer.
///     if (checkpoint::exists("ckpt")) checkpoint::load("ckpt", contents);
bool exists(const std::string& path, ExistsOptions options = {});

struct LatestOptions {
  Group process_group = {};  // as for save
};

/// The path of the checkpoint in `folder` that was saved last; none where there is no such folder or no checkpoint in
/// it. Those that were never finished do not count. Rank 0 looks, and all ranks that call it get the same answer.
///     if (const auto path = checkpoint::latest("ckpt")) checkpoint::load(*path, contents);
std::optional<std::string> latest(const std::string& folder, LatestOptions options = {});

/// A value that was saved beside the states: a number, a text, a tensor, a list or a dict. One inside another is named
/// by the path, "run.seed". Every rank may call it, or only one.
///     int64_t step = checkpoint::read_value("ckpt/step200", "step").toInt();
c10::IValue read_value(const std::string& path, const std::string& name);

}  // namespace serried::checkpoint

namespace serried {

/// Places the state of `optimizer` that was made before its parameters became DTensors like these: the next step would
/// refuse it. Every rank has all of it, so that nothing is communicated.
void place_like_parameters(torch::optim::Optimizer& optimizer);

struct SaveSafetensorsOptions {
  std::vector<std::pair<std::string, std::string>> metadata = {};  // goes to the file's __metadata__
};

/// Parameters and buffers of a plain module as one safetensors file, which is there whole or not at all. One of several
/// tensors that are the same, as tied weights are, is written; __metadata__ names the others, as Python's
/// safetensors.torch.save_model has it. ValueError for DTensors.
void save_safetensors(const std::string& path, const torch::nn::Module& module, SaveSafetensorsOptions options = {});

struct LoadSafetensorsOptions {
  bool strict = true;
  bool convert = false;
  std::vector<checkpoint::Rename> rename = {};
};

/// Reads a safetensors file, whoever wrote it, or a folder as Hugging Face has it (`model.safetensors`, or several
/// files and `model.safetensors.index.json`), into parameters and buffers of the same names. Of DTensors, and of
/// parameters that fully_shard has cut, each rank reads what it holds: all ranks of their meshes call it.
void load_safetensors(const std::string& path, const torch::nn::Module& module, LoadSafetensorsOptions options = {});

}  // namespace serried
