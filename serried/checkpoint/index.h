// index.json: what a checkpoint has beside its tensors, and the hashes of its files.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "serried/checkpoint/blocks.h"

namespace serried::checkpoint::detail {

inline constexpr const char* kIndexName = "index.json";
inline constexpr const char* kValuesEntry = "values";  // the tensors among the user's values
inline constexpr int64_t kFormatVersion = 3;           // 2: blocks have no leaves

struct IndexedFile {
  std::string name;
  int64_t num_bytes = 0;
  std::vector<uint64_t> hashes = {};  // of its blocks
};

struct IndexedEntry {
  std::vector<std::string> files = {};              // in the order of tensors
  std::map<std::string, std::string> aliases = {};  // names of tensors that stand under another one
  nlohmann::json values = nullptr;
  nlohmann::json per_rank = nullptr;
};

struct Index {
  std::string checksum = {};  // of the text that it was read from; not written as it is
  int64_t world_size = 1;
  int64_t saved_at = 0;  // nanoseconds since 1970 on the clock of rank 0
  int64_t block_bytes = 0;
  int64_t leaf_bytes = 0;
  std::map<std::string, IndexedEntry> entries = {};
  nlohmann::json values = nlohmann::json::object();  // the user's
  std::vector<IndexedFile> files = {};
  std::vector<IndexedFile> weight_maps = {};  // which nobody but other readers and `verify` looks at

  BlockGrid grid_of(int64_t file_bytes) const { return {file_bytes, block_bytes, leaf_bytes}; }
};

/// Whether a name that a file gives is that of a file beside it, and leads nowhere else.
bool is_file_name(const std::string& name);

/// "model.safetensors.index.json", as Hugging Face's readers want it.
std::string weight_map_name(const std::string& entry);

/// Failure where it would be too long to be read.
std::string index_text(const Index& index);

/// The text of a JSON object with "checksum", a hash of all bytes behind it, as its first key.
std::string with_checksum(const std::string& text);

/// Failure where the text is damaged, of a newer format, or names files outside of its folder.
Index parse_index(const std::string& text, const std::string& path);

/// The index of the checkpoint in `folder`; Failure that says so where there is none.
Index read_index(const std::string& folder);

/// Whether the folder has one, good or bad.
bool has_index(const std::string& folder);

/// The index, if it is one that checkpoint::save wrote: what may be replaced or removed. Failure where there are too
/// many open files to tell.
std::optional<Index> index_of(const std::string& folder);

/// Its checksum, of which only the first bytes are read; none where there is no index. Failure as above.
std::optional<std::string> checksum_in(const std::string& folder);

/// Names of what is in its folder and is no part of it, sorted.
std::vector<std::string> other_things_in(const std::string& folder, const Index& index);

/// Failure for a name that cannot be part of a file's.
void check_entry_name(const std::string& name);

}  // namespace serried::checkpoint::detail
