// A checkpoint that is there: its index, the headers of its files, and bytes of its tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/files.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/safetensors.h"
#include "serried/checkpoint/source.h"

namespace serried::checkpoint::detail {

/// So many files of one checkpoint stay open while it is read, so that a save that replaces it does no harm; what is
/// more is opened again whenever it is read, since a process may not have many open.
inline constexpr size_t kFilesThatStayOpen = 32;

/// A safetensors file with its header; knows hashes where it is part of a checkpoint.
class TensorFile {
 public:
  /// Alone, as any tool may have written it.
  explicit TensorFile(const std::string& path);
  /// As the index says; Failure where its length is another.
  TensorFile(const std::string& folder, const IndexedFile& indexed, const BlockGrid& grid);

  const FileHeader& header() const { return header_; }
  const std::string& path() const { return path_; }
  /// Opened again where it was closed; Failure where another one is at its path now.
  const File& file();
  /// From now on each `rest()` closes it.
  void close_between_reads();
  /// Is not read for a while.
  void rest();
  /// Which tensor has a byte of the file, for texts: "\"w\" and on".
  std::string tensor_at(int64_t offset) const;
  /// Where a tensor's bytes begin in the file.
  int64_t begin_of(const FileTensor& tensor) const { return header_.num_bytes + tensor.begin; }

  /// Reads, and compares blocks that are read whole with their hashes. Failure that names file, tensor and offset.
  void read(int64_t offset, void* data, int64_t size);

  /// Blocks of which some bytes were read and not all, so that they are not compared yet; none where it has no hashes.
  std::vector<int64_t> blocks_in_parts() const;
  /// What this rank has read of one of them.
  BlockPart part_of_block(int64_t block) const { return hasher_->part(block); }
  int64_t num_leaves(int64_t block) const { return grid_.num_leaves(block); }
  /// Reads what is not known of a block and compares all of it. Failure as for read.
  void check_block(int64_t block, BlockPart known);

 private:
  void read_header();
  void note_read(int64_t offset, const void* data, int64_t size);
  void compare_hash(int64_t block, uint64_t hash) const;
  void read_leaves(int64_t block, int64_t first, int64_t end, BlockPart& known);

  const std::string path_;
  const bool was_there_;  // an index names it
  std::optional<File> file_;
  File::Identity identity_;
  bool closes_ = false;
  FileHeader header_;
  int64_t num_bytes_;
  std::vector<uint64_t> hashes_ = {};
  std::unique_ptr<BlockHasher> hasher_ = {};
  BlockGrid grid_ = {};
  std::set<int64_t> touched_ = {};  // blocks of which bytes were read
};

/// Failure where a file has another length than when it was saved.
void check_length(const File& file, const IndexedFile& indexed);

class Checkpoint {
 public:
  explicit Checkpoint(const std::string& folder);

  const Index& index() const { return index_; }
  /// Whether another save has taken its place since. Failure where there are too many open files to tell.
  bool was_replaced() const;
  const std::string& folder() const { return folder_; }
  /// Failure that lists what there is where there is no such entry.
  const IndexedEntry& entry(const std::string& name) const;
  /// The files of an entry, with headers that are read once.
  std::vector<std::shared_ptr<TensorFile>> files(const std::string& entry);
  std::shared_ptr<TensorFile> file(const std::string& name);
  /// Those that were opened, by name.
  const std::map<std::string, std::shared_ptr<TensorFile>>& open_files() const { return files_; }
  /// Names and looks of what an entry has.
  SavedPart part(const std::string& entry);

 private:
  const std::string folder_;
  const Index index_;
  std::map<std::string, std::shared_ptr<TensorFile>> files_;
};

[[noreturn]] void fail_for_replaced(const std::string& folder);

/// What `read` finds damaged may be parts of two checkpoints: then the Failure says so. None may be open yet.
template <class Read>
auto from_one(const std::unique_ptr<Checkpoint>& checkpoint, const Read& read) {
  try {
    return read();
  } catch (const Failure&) {
    if (checkpoint && checkpoint->was_replaced()) fail_for_replaced(checkpoint->folder());
    throw;
  }
}

struct ReadOptions {
  bool convert = false;
  std::string what = {};  // before names in messages: "model."
};

/// Where a tensor of a file goes.
struct Reading {
  std::shared_ptr<TensorFile> file;
  const FileTensor* from;
  at::Tensor to;
};

/// Failure where sizes or dtypes do not fit.
void check_looks(const Reading& reading, const ReadOptions& options);

/// Reads this rank's bytes of all of them into the tensors that are there: all ranks that share their meshes call it,
/// in the same order. A failure to read is kept until all have taken part, then thrown.
void read_all(std::vector<Reading> readings);

/// Writes this rank's part of `to`, as autograd and whoever gathers it have to know.
void write_part(const at::Tensor& to, const at::Tensor& part);

/// Failure where two tensors, which are one here, differ; `where` is what has them.
void check_twins(const Reading& one, const Reading& other, const std::string& where);
[[noreturn]] void fail_for_twins(const std::string& one, const std::string& other, const std::string& where);

/// A tensor of its own, whole, and compared with its hashes.
at::Tensor read_whole(TensorFile& file, const FileTensor& tensor);

}  // namespace serried::checkpoint::detail
