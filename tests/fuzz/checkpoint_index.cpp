// The index of a checkpoint: it is refused, or comes back as it was when it is written again. And that of files that
// others wrote: it is refused, or names files beside it.
#include "serried/checkpoint/index.h"

#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/plain_source.h"
#include "serried/checkpoint/values.h"
#include "tests/fuzz/target.h"

namespace serried::fuzz {

void run_checkpoint_index(std::string_view bytes) {
  using namespace checkpoint::detail;
  succeeds<Failure>([&] { parse_index(std::string(bytes), "index.json"); });
  succeeds<Failure>([&] {
    for (const auto& [name, file] : parse_weight_map(std::string(bytes), "model.safetensors.index.json")) {
      require(file.find('/') == std::string::npos && file != "..", "a file elsewhere");
    }
  });
  succeeds<Failure>([&] {
    // Its checksum fits: what stands behind it is to be looked at.
    const Index index = parse_index(with_checksum(std::string(bytes)), "index.json");
    const std::string text = index_text(index);
    require(index_text(parse_index(text, "index.json")) == text, "an index that changes when it is written");
    for (const auto& [name, value] : index.values.items()) {
      succeeds<Failure>([&, &value = value] { value_of(value, [](const std::string&) { return at::Tensor(); }); });
    }
  });
}

}  // namespace serried::fuzz
