// Reading an op call: arguments by name, with what is absent told from what is given.
#include "serried/spmd/op_call.h"

#include <algorithm>
#include <numeric>

namespace serried::spmd {

int64_t TensorArg::numel() const {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t(1), std::multiplies<>());
}

const TensorArg* OpCall::tensor(std::string_view name) const {
  const int wanted = index(name);
  for (const TensorArg& tensor : tensors_) {
    if (tensor.argument == wanted && tensor.list_index < 0) return &tensor;
  }
  return nullptr;
}

int OpCall::index(std::string_view name) const {
  const std::vector<c10::Argument>& arguments = schema_->arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == name) return int(i);
  }
  return -1;
}

const c10::IValue* OpCall::value(std::string_view name) const {
  const int i = index(name);
  if (i < 0 || size_t(i) >= arguments_.size() || arguments_[i].isNone()) return nullptr;
  return &arguments_[i];
}

namespace {

std::optional<int64_t> as_integer(const c10::IValue& value) {
  if (value.isInt()) return value.toInt();
  if (value.isBool()) return int64_t(value.toBool());
  if (value.isSymInt()) return value.toSymInt().guard_int(__FILE__, __LINE__);
  return std::nullopt;
}

}  // namespace

int64_t OpCall::integer(std::string_view name, int64_t otherwise) const {
  const c10::IValue* given = value(name);
  return given == nullptr ? otherwise : as_integer(*given).value_or(otherwise);
}

double OpCall::number(std::string_view name, double otherwise) const {
  const c10::IValue* given = value(name);
  if (given == nullptr) return otherwise;
  if (given->isDouble()) return given->toDouble();
  const std::optional<int64_t> integer = as_integer(*given);
  return integer ? double(*integer) : otherwise;
}

bool OpCall::flag(std::string_view name, bool otherwise) const {
  return integer(name, int64_t(otherwise)) != 0;
}

std::optional<std::vector<int64_t>> OpCall::integers(std::string_view name) const {
  const c10::IValue* given = value(name);
  if (given == nullptr) return std::nullopt;
  if (const std::optional<int64_t> one = as_integer(*given)) return std::vector<int64_t>{*one};
  if (!given->isList()) return std::nullopt;
  std::vector<int64_t> result;
  for (const c10::IValue& item : given->toListRef()) {
    const std::optional<int64_t> one = as_integer(item);
    if (!one) return std::nullopt;
    result.push_back(*one);
  }
  return result;
}

std::string_view OpCall::text(std::string_view name) const {
  const c10::IValue* given = value(name);
  return given != nullptr && given->isString() ? std::string_view(given->toStringRef()) : std::string_view();
}

at::Tensor OpCall::tensor_value(std::string_view name) const {
  const c10::IValue* given = value(name);
  return given == nullptr ? at::Tensor() : given->toTensor();
}

bool OpCall::has_out() const {
  const std::vector<c10::Argument>& arguments = schema_->arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& each) { return each.is_out(); });
}

std::vector<int64_t> OpCall::dims(std::string_view name, int64_t ndim) const {
  std::vector<int64_t> result = integers(name).value_or(std::vector<int64_t>());
  if (result.empty()) {
    result.resize(size_t(ndim));
    std::iota(result.begin(), result.end(), int64_t(0));
    return result;
  }
  for (int64_t& dim : result) dim = from_front(dim, ndim);
  return result;
}

}  // namespace serried::spmd
