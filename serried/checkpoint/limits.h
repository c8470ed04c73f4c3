// The numbers of the format that tests make small.
#pragma once

#include <cstdint>

namespace serried::checkpoint::detail {

struct FormatLimits {
  int64_t file_bytes = int64_t(4) << 30;   // of tensors in a file, unless one alone has more
  int64_t block_bytes = int64_t(4) << 20;  // at most, that have a hash; that one of several replicas writes
  int64_t leaf_bytes = int64_t(1) << 10;   // of a block, that ranks which read parts of it tell each other of
  int64_t short_run = int64_t(64) << 10;   // shorter runs of bytes are brought to rows first
  // Of index.json and of others' lists of files: what is parsed takes up to some 100 bytes of memory for each value.
  int64_t json_bytes = int64_t(256) << 20;
  int64_t json_values = int64_t(1) << 24;
};

/// Of this process; changed only while nothing is saved.
inline FormatLimits& format_limits() {
  static FormatLimits limits;
  return limits;
}

}  // namespace serried::checkpoint::detail
