// State in memory: what a checkpoint would have, as tensors by name.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <map>
#include <string>
#include <vector>

#include "serried/checkpoint/checkpoint.h"

namespace serried::checkpoint {

/// What there is of one thing: tensors by name, and all else as a dict.
struct EntryState {
  std::map<std::string, at::Tensor> tensors = {};
  c10::IValue values = {};
};

/// By the names of `Contents`.
using StateDict = std::map<std::string, EntryState>;

struct GetStateOptions {
  Group process_group = {};  // as for save
  bool full = true;  // whole tensors, each gathered; false: DTensors as they lie, and of ZeRO's state the own part
  bool cpu = false;  // plain tensors come on the CPU
  bool first_rank_only = false;  // rank 0 gets them, the others nothing
};

/// Copies of all that `contents` names, under names that do not depend on how the ranks are arranged: those of
/// parameters and buffers, and for optimizers those of the parameter and the field. All ranks call it.
///     StateDict state = get_state({{"model", state_of(*net)}, {"optim", state_of(opt)}});
///     at::Tensor weight = state["model"].tensors["first.weight"];
StateDict get_state(const Contents& contents, GetStateOptions options = {});

struct SetStateOptions {
  Group process_group = {};
  bool strict = true;
  bool convert = false;
  bool from_first_rank = false;  // rank 0's state counts, the others pass {}: each tensor is sent when it is needed
  std::vector<Rename> rename = {};
};

/// Writes what get_state gave, maybe under another arrangement of ranks, into what `contents` names. Whole tensors are
/// cut, DTensors redistributed. The same errors as for load; all ranks call it.
void set_state(const Contents& contents, const StateDict& state, SetStateOptions options = {});

}  // namespace serried::checkpoint
