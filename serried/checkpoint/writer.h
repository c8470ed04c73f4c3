// This rank's bytes of a checkpoint, from tensors into files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "serried/checkpoint/blocks.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/files.h"
#include "serried/checkpoint/plan.h"

namespace serried::checkpoint::detail {

/// Takes bytes for a place in a file; files come one after the other, in any order, each from its begin to its end.
using TakeBytes = std::function<void(size_t file, int64_t offset, const char* data, int64_t size)>;

/// Bytes that this rank writes into each file, headers included.
std::vector<int64_t> planned_bytes_of(const SavePlan& plan, bool is_first);

/// Shows all of them. Parts that lie in short runs are brought to rows first: all ranks of a mesh call it. Calls `take`
/// only with memory that is gone afterwards. What goes wrong on this rank alone is kept until it has taken part in what
/// all do, then thrown as a Failure.
void for_each_piece(const SavePlan& plan, bool is_first, const TakeBytes& take);

/// Writes pieces. An error is kept until the end, so that a rank with a full disk still takes part in what all do.
class Writer {
 public:
  Writer(std::string folder, const SavePlan& plan);

  void take(size_t file, int64_t offset, const char* data, int64_t size) noexcept;

  struct Hash {
    int64_t file;
    int64_t block;
    uint64_t hash;
  };
  /// Returns when all is on the disk: the hashes of blocks that this rank has written alone.
  std::vector<Hash> finish();

 private:
  void open(size_t file);
  void close_file();
  void write(int64_t offset, const char* data, int64_t size);
  void write_now(int64_t offset, const char* data, int64_t size);
  void flush();

  const std::string folder_;
  const SavePlan& plan_;
  std::optional<Failure> failure_;
  std::optional<size_t> current_;
  std::optional<File> file_;
  std::optional<BlockHasher> hasher_;
  std::string buffer_;  // short pieces that touch
  int64_t buffer_begin_ = 0;
  int64_t unstarted_ = 0, unstarted_begin_ = 0;  // bytes that are written since the disk was told to begin
  std::vector<Hash> hashes_;
};

/// Bytes of a tensor as they go into a file: row-major, on the host. Shares memory where it can.
at::Tensor bytes_to_write(const at::Tensor& part);

}  // namespace serried::checkpoint::detail
