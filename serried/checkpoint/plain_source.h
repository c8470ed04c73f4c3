// Tensors that any tool has written: one safetensors file, or a folder of several as Hugging Face has it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "serried/checkpoint/reader.h"

namespace serried::checkpoint::detail {

/// The file of each tensor, as the text of a `model.safetensors.index.json` at `index` has it. Failure for anything
/// else.
std::map<std::string, std::string> parse_weight_map(const std::string& text, const std::string& index);

class PlainSource {
 public:
  /// A file, the folder of `model.safetensors` or `model.safetensors.index.json`, or that index itself. Failure where
  /// there is none of them, or the index names what is not there.
  explicit PlainSource(const std::string& path);

  /// All names, and those that stand for others.
  SavedPart part() const;
  /// The tensor of a name, to be read into `into`.
  Reading reading(const std::string& name, const at::Tensor& into) const;

 private:
  struct Place {
    std::shared_ptr<TensorFile> file;
    const FileTensor* tensor;
  };

  using Places = std::map<std::string, Place>;  // by the tensor's name

  Places open(const std::string& path);
  Places open_files_of(const std::string& index);

  Places places_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace serried::checkpoint::detail
