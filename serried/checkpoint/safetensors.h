// The header of a safetensors file: which tensors it has, and where.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace serried::checkpoint::detail {

/// A tensor of a file, row-major in the bytes [begin, end) behind the header.
struct FileTensor {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<int64_t> sizes = {};
  int64_t begin = 0;
  int64_t end = 0;
};

struct FileHeader {
  std::vector<FileTensor> tensors;  // as they lie
  std::map<std::string, std::string> metadata = {};
  int64_t num_bytes = 0;  // of the header itself, with the number in front of it
};

inline constexpr int64_t kMaxHeaderBytes = 100'000'000;

/// "F32", "BF16"; nothing for dtypes that the format does not have.
std::optional<std::string_view> safetensors_dtype(c10::ScalarType dtype);

/// Bytes of a tensor; Failure where they do not fit into 63 bits or a size is negative.
int64_t bytes_of(c10::ScalarType dtype, const std::vector<int64_t>& sizes);

/// What a file begins with: the length, the JSON, spaces up to a multiple of 64 bytes.
std::string header_text(const FileHeader& header);

/// The length that the first 8 bytes of a file say; Failure where such a header cannot be in a file of `file_bytes`.
int64_t header_length(std::string_view first_bytes, int64_t file_bytes);

/// The header of a file that has `data_bytes` behind it. The text may come from anywhere: Failure for whatever is not
/// exactly the format, tensors that overlap, leave gaps or do not fill the file included.
FileHeader parse_header(std::string_view json, int64_t data_bytes);

}  // namespace serried::checkpoint::detail
