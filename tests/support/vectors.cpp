// Reading the conformance vectors: a zip of pickles as torch.save writes them, one per overload.
#include "tests/support/vectors.h"

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

namespace serried::testing {
namespace {

namespace fs = std::filesystem;
constexpr const char* kSuffix = ".pt";

c10::IValue read_pickle(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  TORCH_CHECK(file, "no vectors at ", path.string());
  const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
  return torch::pickle_load(bytes);
}

// A complex number is ("__complex__", real, imaginary): the unpickler knows none.
bool is_complex_number(const c10::IValue& value) {
  if (!value.isTuple()) return false;
  const auto& parts = value.toTupleRef().elements();
  return parts.size() == 3 && parts[0].isString() && parts[0].toStringRef() == "__complex__";
}

c10::IValue typed(const c10::IValue& value, const c10::TypePtr& type);

template <class T, class Convert>
c10::IValue typed_list(c10::ArrayRef<c10::IValue> values, Convert convert) {
  c10::List<T> list;
  for (const c10::IValue& value : values) list.push_back(convert(value));
  return list;
}

double to_double(const c10::IValue& value) {
  return value.isInt() ? double(value.toInt()) : value.toDouble();
}

c10::IValue typed_list(const c10::IValue& value, const c10::TypePtr& element) {
  if (!value.isList()) return value.isInt() ? c10::IValue(c10::List<int64_t>({value.toInt()})) : value;
  const c10::ArrayRef<c10::IValue> values = value.toListRef();
  switch (element->kind()) {
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: return typed_list<int64_t>(values, [](const auto& v) { return v.toInt(); });
    case c10::TypeKind::FloatType: return typed_list<double>(values, to_double);
    case c10::TypeKind::BoolType: return typed_list<bool>(values, [](const auto& v) { return v.toBool(); });
    case c10::TypeKind::TensorType: return typed_list<at::Tensor>(values, [](const auto& v) { return v.toTensor(); });
    case c10::TypeKind::NumberType: return typed_list<at::Scalar>(values, [](const auto& v) { return v.toScalar(); });
    case c10::TypeKind::OptionalType:
      return typed_list<std::optional<at::Tensor>>(values,
                                                   [](const auto& v) { return v.template toOptional<at::Tensor>(); });
    default: break;
  }
  c10::impl::GenericList list(element);
  for (const c10::IValue& item : values) list.push_back(typed(item, element));
  return list;
}

at::Tensor wrapped_number(const at::Scalar& number) {
  at::Tensor tensor = at::scalar_to_tensor(number);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// What a pickle holds, as the schema wants it.
c10::IValue typed(const c10::IValue& value, const c10::TypePtr& type) {
  if (value.isNone()) return value;
  if (is_complex_number(value)) {
    const auto& parts = value.toTupleRef().elements();
    return c10::complex<double>(parts[1].toDouble(), parts[2].toDouble());
  }
  switch (type->kind()) {
    case c10::TypeKind::OptionalType: return typed(value, type->expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::ListType: return typed_list(value, type->expectRef<c10::ListType>().getElementType());
    case c10::TypeKind::TensorType: return value.isScalar() ? wrapped_number(value.toScalar()) : value;
    case c10::TypeKind::DeviceObjType: return value.isString() ? c10::Device(value.toStringRef()) : value;
    case c10::TypeKind::FloatType:
      if (value.isInt()) return double(value.toInt());
      return value.isBool() ? c10::IValue(double(value.toBool())) : value;
    default: return value;
  }
}

VectorCase make_case(const c10::IValue& value, const c10::FunctionSchema& schema) {
  const auto fields = value.toGenericDict();
  VectorCase made;
  made.id = fields.at("id").toStringRef();
  const auto arguments = fields.at("args").toListRef();
  for (size_t i = 0; i < arguments.size(); ++i) {
    made.arguments.push_back(typed(arguments[i], schema.arguments().at(i).type()));
  }
  for (const c10::IValue& output : fields.at("outs").toListRef()) made.outputs.push_back(output);
  for (const c10::IValue& pair : fields.at("mut").toListRef()) {
    const auto both = pair.toListRef();
    made.mutated.emplace_back(both[0].toInt(), both[1]);
  }
  return made;
}

}  // namespace

bool VectorCase::mutates(size_t argument) const {
  return std::any_of(mutated.begin(), mutated.end(), [&](const auto& pair) { return pair.first == int64_t(argument); });
}

std::string vectors_folder() {
  return SERRIED_VECTORS;
}

std::vector<std::string> vector_names(const std::string& folder) {
  std::vector<std::string> names;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() == kSuffix) names.push_back(entry.path().stem());
  }
  std::sort(names.begin(), names.end());
  return names;
}

VectorFile load_vectors(const std::string& name, const std::string& folder) {
  const c10::IValue root = read_pickle(fs::path(folder) / (name + kSuffix));
  const auto fields = root.toGenericDict();
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
      fields.at("op").toStringRef().c_str(), fields.at("overload").toStringRef().c_str());
  VectorFile file{name, op, {}};
  for (const c10::IValue& value : fields.at("cases").toListRef()) file.cases.push_back(make_case(value, op.schema()));
  return file;
}

}  // namespace serried::testing
