// Numbers, names and lists: written so that reading needs no guess.
#include "serried/graph/text/literal.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <sstream>

#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/watch.h"
#include "serried/graph/text/custom_class.h"

namespace serried::graph {
namespace {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

// By the number that stands for each.
constexpr std::string_view kLayouts[] = {"strided",    "sparse",     "sparse_csr", "mkldnn",
                                         "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"};
static_assert(std::size(kLayouts) == size_t(at::Layout::NumOptions));
constexpr std::string_view kMemoryFormats[] = {"contiguous", "preserve", "channels_last", "channels_last_3d"};
static_assert(std::size(kMemoryFormats) == size_t(at::MemoryFormat::NumOptions));

constexpr std::string_view kDefaultGenerator = "default_generator";
constexpr std::string_view kPremulSum = "premul_sum(";

TypePtr without_optional(const TypePtr& type) {
  const auto optional = type ? type->cast<c10::OptionalType>() : nullptr;
  return optional ? optional->getElementType() : type;
}

// The name that number `i` stands for; empty where it is just a number.
std::string enum_name(TypeKind kind, int64_t i) {
  if (i < 0) return "";
  if (kind == TypeKind::LayoutType && i < std::ssize(kLayouts)) return std::string(kLayouts[i]);
  if (kind == TypeKind::MemoryFormatType && i < std::ssize(kMemoryFormats)) return std::string(kMemoryFormats[i]);
  if (kind == TypeKind::ScalarTypeType && i < int64_t(at::ScalarType::NumOptions)) {
    return watch::dtype_name(at::ScalarType(i));
  }
  return "";
}

bool is_enum(TypeKind kind) {
  return kind == TypeKind::LayoutType || kind == TypeKind::MemoryFormatType || kind == TypeKind::ScalarTypeType;
}

std::string exact_text(double number) {
  const double plain_nan = std::numeric_limits<double>::quiet_NaN();
  if (std::isnan(number) && std::bit_cast<uint64_t>(number) != std::bit_cast<uint64_t>(plain_nan)) {
    std::ostringstream bits;
    bits << "nan:0x" << std::hex << std::bit_cast<uint64_t>(number);
    return bits.str();
  }
  char text[32];
  const std::string shortest(text, std::to_chars(text, text + sizeof(text), number).ptr);
  return shortest.find_first_of(".en") == std::string::npos ? shortest + ".0" : shortest;
}

std::string reduce_op_text(const c10d::ReduceOp& op) {
  if (op.op_ != c10d::ReduceOp::PREMUL_SUM) return serried::to_string(op.op_);
  const auto& supplement = static_cast<const c10d::PreMulSumSupplement&>(*op.supplement_);
  const at::Tensor& tensor = supplement.tensor_factor;
  std::string text(kPremulSum);
  if (!tensor.defined()) return text + exact_text(supplement.double_factor) + ")";
  // As double: exact for every dtype that a factor has.
  return text + exact_text(tensor.item<double>()) + ", " + watch::dtype_name(tensor.scalar_type()) + ")";
}

std::string elements_text(const IValue& list, const TypePtr& type) {
  const auto declared = type ? type->cast<c10::ListType>() : nullptr;
  const TypePtr element_type = declared ? declared->getElementType() : nullptr;
  std::string text = "[";
  for (const IValue& element : list.toListRef()) {
    text += (text.size() > 1 ? ", " : "") + literal_text(element, element_type);
  }
  return text + "]";
}

std::string object_text(const IValue& constant) {
  if (const c10d::ReduceOp* op = reduce_op_of(constant)) return reduce_op_text(*op);
  if (constant.isCustomClass()) return constant.type()->expectRef<c10::ClassType>().name()->name();
  if (constant.isGenerator()) return std::string(has_literal(constant) ? kDefaultGenerator : "generator");
  if (constant.isStorage()) return "storage";
  std::ostringstream text;
  text << constant;
  return text.str();
}

template <class Number>
Number parse_number(Cursor& in, std::string_view word) {
  Number number{};
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error == std::errc() && end == word.data() + word.size()) return number;
  in.fail(c10::str("\"", word, "\" is no number"));
}

uint64_t parse_hex(Cursor& in, std::string_view digits) {
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number, 16);
  if (error == std::errc() && end == digits.data() + digits.size()) return number;
  in.fail(c10::str("\"", digits, "\" is no hexadecimal number"));
}

double parse_double(Cursor& in, std::string_view word) {
  constexpr std::string_view kBits = "nan:0x";
  if (!word.starts_with(kBits)) return parse_number<double>(in, word);
  return std::bit_cast<double>(parse_hex(in, word.substr(kBits.size())));
}

IValue read_number(Cursor& in) {
  if (in.accept("complex(")) {
    const double real = parse_double(in, in.word());
    in.expect(",");
    const double imaginary = parse_double(in, in.word());
    in.expect(")");
    return c10::complex<double>(real, imaginary);
  }
  const std::string_view word = in.word();
  if (word == "true" || word == "false") return word == "true";
  if (word.find_first_of(".en") != std::string_view::npos) return parse_double(in, word);
  return parse_number<int64_t>(in, word);
}

IValue read_enum(Cursor& in, TypeKind kind) {
  const std::string_view word = in.word();
  if (std::isdigit(static_cast<unsigned char>(word[0])) != 0 || word[0] == '-') return parse_number<int64_t>(in, word);
  for (int64_t i = 0; !enum_name(kind, i).empty(); ++i) {
    if (enum_name(kind, i) == word) return i;
  }
  in.fail(c10::str("unknown ",
                   kind == TypeKind::ScalarTypeType ? "dtype"
                   : kind == TypeKind::LayoutType   ? "layout"
                                                    : "memory format",
                   " \"", word, "\""));
}

// The dtype of a factor that is a tensor.
at::Tensor read_factor(Cursor& in, double factor) {
  const at::ScalarType dtype = read_dtype(in);
  if (!at::isFloatingType(dtype) && !at::isIntegralType(dtype, /*includeBool=*/false)) {
    in.fail(c10::str("a factor cannot be of dtype ", watch::dtype_name(dtype)));
  }
  try {
    return at::scalar_tensor(factor, at::TensorOptions(dtype));
  } catch (const std::exception&) {  // LibTorch's own for a number that overflows is no c10::Error
    in.fail(c10::str("the factor ", factor, " does not fit into ", watch::dtype_name(dtype)));
  }
}

IValue read_reduce_op(Cursor& in) {
  if (!in.accept(kPremulSum)) {
    const std::string_view word = in.word();
    for (int i = 0; i < c10d::ReduceOp::PREMUL_SUM; ++i) {
      const auto op = c10d::ReduceOp::RedOpType(i);
      if (serried::to_string(op) == word) return IValue(c10::make_intrusive<c10d::ReduceOp>(op));
    }
    in.fail(c10::str("unknown reduce op \"", word, "\""));
  }
  const double factor = parse_double(in, in.word());
  c10d::ReduceOp op = c10d::makePreMulSum(factor);
  if (in.accept(",")) op = c10d::makePreMulSum(read_factor(in, factor));
  in.expect(")");
  return IValue(c10::make_intrusive<c10d::ReduceOp>(op));
}

IValue read_elements(Cursor& in, const TypePtr& element_type) {
  in.expect("[");
  c10::impl::GenericList list(element_type);
  read_list(in, "]", [&] { list.push_back(read_literal(in, element_type)); });
  return list;
}

// What follows a backslash.
char read_escape(Cursor& in) {
  const char c = in.take();
  if (c != 'x') return c;
  const char digits[] = {in.take(), in.take()};
  return char(parse_hex(in, {digits, 2}));
}

IValue read_generator(Cursor& in) {
  in.expect(kDefaultGenerator);
  return at::detail::getDefaultCPUGenerator();
}

}  // namespace

TypePtr literal_type(const c10::Argument& declared) {
  const TypePtr real = without_optional(declared.real_type());
  return is_enum(real->kind()) ? real : declared.type();
}

bool has_literal(const IValue& constant) {
  if (constant.isGenerator()) return constant.toGenerator() == at::detail::getDefaultCPUGenerator();
  if (constant.isList()) {
    const auto elements = constant.toListRef();
    return std::all_of(elements.begin(), elements.end(), has_literal);
  }
  if (constant.isCustomClass()) return reduce_op_of(constant) != nullptr;
  return constant.isNone() || constant.isScalar() || constant.isString() || constant.isDevice();
}

std::string literal_text(const IValue& constant, const TypePtr& type) {
  const TypePtr bare = without_optional(type);
  if (constant.isNone()) return "none";
  if (constant.isBool()) return constant.toBool() ? "true" : "false";
  if (constant.isInt()) {
    const std::string name = bare ? enum_name(bare->kind(), constant.toInt()) : "";
    return name.empty() ? std::to_string(constant.toInt()) : name;
  }
  if (constant.isDouble()) return exact_text(constant.toDouble());
  if (constant.isComplexDouble()) {
    const c10::complex<double> number = constant.toComplexDouble();
    return "complex(" + exact_text(number.real()) + ", " + exact_text(number.imag()) + ")";
  }
  if (constant.isString()) return quoted_text(constant.toStringRef());
  if (constant.isDevice()) return constant.toDevice().str();
  if (constant.isList()) return elements_text(constant, bare);
  return object_text(constant);
}

IValue read_literal(Cursor& in, const TypePtr& type) {
  const TypePtr bare = without_optional(type);
  if (in.accept("none")) return {};
  switch (bare->kind()) {
    case TypeKind::ListType: return read_elements(in, bare->castRaw<c10::ListType>()->getElementType());
    case TypeKind::ScalarTypeType:
    case TypeKind::LayoutType:
    case TypeKind::MemoryFormatType: return read_enum(in, bare->kind());
    case TypeKind::StringType: return read_quoted(in);
    case TypeKind::DeviceObjType: return read_device(in);
    case TypeKind::GeneratorType: return read_generator(in);
    case TypeKind::ClassType: return read_reduce_op(in);
    default: return read_number(in);
  }
}

std::string quoted_text(std::string_view text) {
  constexpr const char* kHex = "0123456789abcdef";
  std::string result = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (c >= 0 && c < ' ') {
      result += {'\\', 'x', kHex[c >> 4], kHex[c & 15]};
      continue;
    }
    result += c;
  }
  return result + "\"";
}

std::string read_quoted(Cursor& in) {
  in.expect("\"");
  std::string text;
  while (true) {
    const char c = in.take();
    if (c == '"') return text;
    text += c == '\\' ? read_escape(in) : c;
  }
}

std::string numbers_text(c10::IntArrayRef numbers) {
  return c10::str("[", c10::Join(", ", numbers), "]");
}

c10::DimVector read_numbers(Cursor& in) {
  c10::DimVector numbers;
  in.expect("[");
  read_list(in, "]", [&] { numbers.push_back(read_int(in)); });
  return numbers;
}

at::ScalarType read_dtype(Cursor& in) {
  const int64_t number = read_enum(in, TypeKind::ScalarTypeType).toInt();
  const bool is_known = number >= 0 && number < int64_t(at::ScalarType::NumOptions);
  if (!is_known || at::ScalarType(number) == at::ScalarType::Undefined) in.fail(c10::str("there is no dtype ", number));
  return at::ScalarType(number);
}

at::Device read_device(Cursor& in) {
  const std::string word(in.word());
  try {
    return at::Device(word);
  } catch (const c10::Error&) {
    in.fail(c10::str("unknown device \"", word, "\""));
  }
}

int64_t read_int(Cursor& in) {
  return parse_number<int64_t>(in, in.word());
}

}  // namespace serried::graph
