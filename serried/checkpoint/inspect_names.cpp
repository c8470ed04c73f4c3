// Names and short texts of what a checkpoint has.
#include "serried/checkpoint/inspect_names.h"

#include "serried/base/text.h"
#include "serried/comm/collectives/watch.h"
#include "serried/tensor/spec.h"

namespace serried::checkpoint::detail {

TensorNames tensors_of(Checkpoint& checkpoint) {
  TensorNames found;
  for (const auto& [entry, indexed] : checkpoint.index().entries) {
    for (const auto& file : checkpoint.files(entry)) {
      for (const FileTensor& tensor : file->header().tensors) found[{entry, tensor.name}] = {file, &tensor};
    }
  }
  return found;
}

std::string whole_name(const std::string& entry, const std::string& name) {
  return entry == kValuesEntry ? name : entry + "." + name;
}

std::string looks_of(const FileTensor& tensor) {
  return watch::dtype_name(tensor.dtype) + serried::detail::sizes_text(tensor.sizes);
}

bool names_tensor(const nlohmann::json& value) {
  return value.is_object() && value.contains("$tensor");
}

std::string shown_value(const nlohmann::json& value) {
  const std::string text = serried::detail::printable(value.dump(-1, ' ', true));
  return text.size() <= 200 ? text : text.substr(0, 197) + "...";
}

}  // namespace serried::checkpoint::detail
