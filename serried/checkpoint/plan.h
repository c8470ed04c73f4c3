// What a save writes where: the same on every rank, and what of it this rank writes.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/ranks.h"
#include "serried/checkpoint/safetensors.h"
#include "serried/checkpoint/source.h"
#include "serried/tensor/spec.h"

namespace serried::checkpoint::detail {

/// A tensor on its way into a file.
struct PlannedTensor {
  std::string entry;
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes = {};
  at::Tensor tensor = {};  // undefined where another rank has it
  SpecPtr spec = {};       // of a DTensor
  /// How many ranks have what this one has, and the number of this one among them; -1: it has nothing to write. Of the
  /// blocks of a file each writes every num_replicas-th.
  int64_t num_replicas = 1;
  int64_t replica = 0;
  Placements rows =
      {};  // that it has to be brought to first, by all ranks of its mesh; empty: it is written as it lies
  size_t file = 0;
  int64_t begin = 0;  // in the file
};

struct PlannedFile {
  std::string name;
  std::string entry;
  std::string header = {};
  int64_t num_bytes = 0;
};

struct SavePlan {
  std::vector<PlannedTensor> tensors;  // by file, ascending
  std::vector<PlannedFile> files = {};
  Index index = {};       // without hashes
  size_t first_file = 0;  // that this rank begins with: two that write to one file at a time wait for each other
};

/// All ranks call it; nothing but names, meshes and hashes is exchanged. Failure on all of them where one cannot save
/// what it has, or where they have different things.
SavePlan make_plan(const Contents& contents, const Ranks& ranks, const SaveOptions& options = {});

/// How long blocks with a hash are where files have so many bytes in all: short, since a block that ranks share is read
/// again to be checked, but not so many that the index is long.
///     block_bytes_for(4 GiB)  ->  32 KiB;   64 GiB  ->  512 KiB;   from 512 GiB on  ->  4 MiB
int64_t block_bytes_for(int64_t num_bytes);

/// Gives every tensor its file and place: by entry, large elements first so that all are aligned, files of limited
/// size.
void lay_out(SavePlan& plan, const std::map<std::string, std::map<std::string, std::string>>& aliases);

}  // namespace serried::checkpoint::detail
