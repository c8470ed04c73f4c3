// A safetensors file: its header is refused, or comes back as it was when it is written again.
#include "serried/checkpoint/safetensors.h"

#include <algorithm>

#include "serried/checkpoint/failure.h"
#include "tests/fuzz/target.h"

namespace serried::fuzz {

void run_safetensors(std::string_view bytes) {
  using namespace checkpoint::detail;
  succeeds<Failure>([&] {
    const int64_t length = header_length(bytes, int64_t(bytes.size()));
    const int64_t data_bytes = int64_t(bytes.size()) - 8 - length;
    const FileHeader header = parse_header(bytes.substr(8, size_t(length)), data_bytes);
    int64_t end = 0;
    for (const FileTensor& tensor : header.tensors) {
      require(tensor.begin == end && tensor.end >= end, "a tensor that does not begin where the one before ends");
      end = tensor.end;
    }
    require(end == data_bytes, "tensors that do not fill the file");
    const FileHeader again = parse_header(std::string_view(header_text(header)).substr(8), data_bytes);
    require(again.tensors.size() == header.tensors.size(), "another number of tensors");
    require(again.metadata == header.metadata, "other metadata");
    for (size_t i = 0; i < header.tensors.size(); ++i) {
      require(again.tensors[i].end == header.tensors[i].end && again.tensors[i].sizes == header.tensors[i].sizes,
              "another tensor");
    }
  });
}

}  // namespace serried::fuzz
