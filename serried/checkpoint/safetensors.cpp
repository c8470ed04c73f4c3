// Reads headers event by event: a hostile one is refused where it first differs from the format, at the cost of what
// was read until then.
#include "serried/checkpoint/safetensors.h"

#include <c10/util/StringUtil.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <unordered_set>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"

namespace serried::checkpoint::detail {
namespace {

using c10::ScalarType;
using nlohmann::json;
using serried::detail::printable;

constexpr int64_t kAlignment = 64;
constexpr size_t kMaxDims = 64;
constexpr size_t kLengthBytes = 8;

struct NamedDtype {
  std::string_view name;
  ScalarType dtype;
};

constexpr std::array<NamedDtype, 16> kDtypes = {{
    {"F64", ScalarType::Double},
    {"F32", ScalarType::Float},
    {"F16", ScalarType::Half},
    {"BF16", ScalarType::BFloat16},
    {"F8_E4M3", ScalarType::Float8_e4m3fn},
    {"F8_E5M2", ScalarType::Float8_e5m2},
    {"I64", ScalarType::Long},
    {"I32", ScalarType::Int},
    {"I16", ScalarType::Short},
    {"I8", ScalarType::Char},
    {"U64", ScalarType::UInt64},
    {"U32", ScalarType::UInt32},
    {"U16", ScalarType::UInt16},
    {"U8", ScalarType::Byte},
    {"BOOL", ScalarType::Bool},
    {"C64", ScalarType::ComplexFloat},
}};

ScalarType dtype_called(const std::string& name, const std::string& tensor) {
  for (const NamedDtype& each : kDtypes) {
    if (each.name == name) return each.dtype;
  }
  fail(c10::str("tensor \"", printable(tensor), "\" has the unknown dtype \"", printable(name), "\""),
       "read the file with the tool that wrote it, and save the tensor in another dtype");
}

[[noreturn]] void fail_header(const std::string& what) {
  fail("the header is not that of a safetensors file: " + what, "the file is damaged or of another format: use a copy");
}

// One object per tensor: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "__metadata__": {...}}.
class HeaderEvents : public nlohmann::json_sax<json> {
 public:
  FileHeader header;

  bool null() override { return refuse("null"); }
  bool boolean(bool) override { return refuse("a truth value"); }
  bool number_integer(number_integer_t) override { return refuse("a negative number"); }
  bool number_float(number_float_t, const string_t&) override { return refuse("a number with a fraction"); }
  bool binary(binary_t&) override { return refuse("binary data"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::shape && place_ != Place::offsets) return refuse("a number");
    if (value > uint64_t(INT64_MAX)) return refuse("a number beyond 63 bits");
    std::vector<int64_t>& list = place_ == Place::shape ? tensor().sizes : offsets_;
    if (list.size() == kMaxDims) return refuse("a list of more than 64 numbers");
    list.push_back(int64_t(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      if (!header.metadata.emplace(key_, value).second) return refuse("the key " + quoted(key_) + " twice");
      return true;
    }
    if (place_ != Place::tensor || key_ != "dtype") return refuse("a text");
    tensor().dtype = dtype_called(value, tensor().name);
    return true;
  }

  bool start_object(size_t) override {
    switch (place_) {
      case Place::outside: place_ = Place::names; return true;
      case Place::names: place_ = key_ == kMetadata ? Place::metadata : Place::tensor; return true;
      default: return refuse("an object");
    }
  }

  bool key(string_t& value) override {
    if (place_ == Place::names) {
      if (!names_.insert(value).second) return refuse("the name " + quoted(value) + " twice");
      if (value != kMetadata) header.tensors.push_back({.name = value});
    } else if (place_ == Place::tensor) {
      bool& seen = value == "dtype" ? seen_[0] : value == "shape" ? seen_[1] : seen_[2];
      if (value != "dtype" && value != "shape" && value != "data_offsets") return refuse("the key " + quoted(value));
      if (seen) return refuse("the key " + quoted(value) + " twice");
      seen = true;
    }
    key_ = value;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::names) {
      place_ = Place::end;
      return true;
    }
    if (place_ == Place::tensor) finish_tensor();
    place_ = Place::names;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::tensor || key_ == "dtype") return refuse("a list");
    place_ = key_ == "shape" ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() override {
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail_header(c10::str("no JSON at byte ", position));
  }

 private:
  enum class Place { outside, names, metadata, tensor, shape, offsets, end };
  static constexpr const char* kMetadata = "__metadata__";

  static std::string quoted(const std::string& text) {
    return c10::str("\"", printable(std::string_view(text).substr(0, 200)), "\"");
  }

  bool refuse(const std::string& what) const { fail_header(what + (key_.empty() ? "" : " at " + quoted(key_))); }

  FileTensor& tensor() { return header.tensors.back(); }

  void finish_tensor() {
    const std::string name = quoted(tensor().name);
    for (bool seen : seen_) {
      if (!seen) fail_header("tensor " + name + " lacks dtype, shape or data_offsets");
    }
    if (offsets_.size() != 2) fail_header(c10::str("tensor ", name, " has ", offsets_.size(), " data_offsets"));
    tensor().begin = offsets_[0];
    tensor().end = offsets_[1];
    offsets_.clear();
    seen_ = {};
  }

  Place place_ = Place::outside;
  std::string key_;
  std::unordered_set<std::string> names_;
  std::array<bool, 3> seen_ = {};
  std::vector<int64_t> offsets_;
};

void check_offsets(std::vector<FileTensor>& tensors, int64_t data_bytes) {
  const auto lies_before = [](const FileTensor& a, const FileTensor& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  };
  std::stable_sort(tensors.begin(), tensors.end(), lies_before);
  int64_t end = 0;
  for (const FileTensor& tensor : tensors) {
    const std::string name = "tensor \"" + printable(std::string_view(tensor.name).substr(0, 200)) + "\"";
    const std::string place = c10::str(name, " lies in bytes ", tensor.begin, " to ", tensor.end);
    if (tensor.begin < end) fail_header(c10::str(place, " and overlaps with the one before, which ends at ", end));
    if (tensor.begin > end) fail_header(c10::str(place, ", behind a gap from ", end));
    const int64_t bytes = bytes_of(tensor.dtype, tensor.sizes);
    if (tensor.end < tensor.begin || tensor.end - tensor.begin != bytes) {
      fail_header(c10::str(place, " and needs ", bytes, " bytes"));
    }
    end = tensor.end;
  }
  if (end == data_bytes) return;
  fail(c10::str("the tensors take ", end, " bytes, and the file has ", data_bytes, " for them"),
       end > data_bytes ? "the file is cut short: use a whole copy" : "the file is damaged: use a copy");
}

std::string dumped(const json& value) {
  try {
    return value.dump();
  } catch (const json::type_error&) {
    fail("a name is not UTF-8: \"" + printable(value.is_string() ? value.get_ref<const std::string&>() : "") + "\"",
         "give it another name");
  }
}

// Nearly all names need no care.
std::string dumped_name(const std::string& name) {
  const bool is_plain =
      std::all_of(name.begin(), name.end(), [](char c) { return c >= ' ' && c <= '~' && c != '"' && c != '\\'; });
  return is_plain ? std::string(1, '"') + name + '"' : dumped(name);
}

}  // namespace

std::optional<std::string_view> safetensors_dtype(ScalarType dtype) {
  for (const NamedDtype& each : kDtypes) {
    if (each.dtype == dtype) return each.name;
  }
  return std::nullopt;
}

int64_t bytes_of(ScalarType dtype, const std::vector<int64_t>& sizes) {
  int64_t bytes = int64_t(c10::elementSize(dtype));
  // An empty tensor may have any other sizes.
  for (int64_t size : sizes) {
    if (size == 0) return 0;
  }
  for (int64_t size : sizes) {
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) {
      fail_header(c10::str("a tensor of sizes [", c10::Join(",", sizes), "]"));
    }
  }
  return bytes;
}

std::string header_text(const FileHeader& header) {
  std::string text = "{";
  if (!header.metadata.empty()) text += "\"__metadata__\":" + dumped(header.metadata) + ",";
  for (const FileTensor& tensor : header.tensors) {
    text += dumped_name(tensor.name);
    text.append(":{\"dtype\":\"").append(*safetensors_dtype(tensor.dtype)).append("\",\"shape\":[");
    for (int64_t size : tensor.sizes) text.append(std::to_string(size)).append(",");
    if (!tensor.sizes.empty()) text.pop_back();
    text.append("],\"data_offsets\":[").append(std::to_string(tensor.begin)).append(",");
    text.append(std::to_string(tensor.end)).append("]},");
  }
  if (text.size() > 1) text.pop_back();
  text += '}';
  while ((int64_t(text.size()) + int64_t(kLengthBytes)) % kAlignment != 0) text += ' ';
  if (int64_t(text.size()) > kMaxHeaderBytes) {
    fail(c10::str("the header of a file with ", header.tensors.size(), " tensors has ", text.size(),
                  " bytes, and may have ", kMaxHeaderBytes),
         "save fewer tensors under one name");
  }
  std::string length(kLengthBytes, '\0');
  for (size_t i = 0; i < kLengthBytes; ++i) length[i] = char(uint64_t(text.size()) >> (8 * i));
  return length + text;
}

int64_t header_length(std::string_view first_bytes, int64_t file_bytes) {
  if (first_bytes.size() < kLengthBytes) {
    fail_header(c10::str("a file of ", file_bytes, " bytes"));
  }
  uint64_t length = 0;
  for (size_t i = 0; i < kLengthBytes; ++i) length |= uint64_t(uint8_t(first_bytes[i])) << (8 * i);
  if (length > uint64_t(kMaxHeaderBytes)) {
    fail_header(c10::str("it would have ", length, " bytes, and may have ", kMaxHeaderBytes));
  }
  if (int64_t(length) > file_bytes - int64_t(kLengthBytes)) {
    fail_header(c10::str("it would have ", length, " bytes in a file of ", file_bytes));
  }
  return int64_t(length);
}

FileHeader parse_header(std::string_view text, int64_t data_bytes) {
  if (text.empty() || text.front() != '{') fail_header("it does not begin with {");
  HeaderEvents events;
  json::sax_parse(text.begin(), text.end(), &events);
  check_offsets(events.header.tensors, data_bytes);
  events.header.num_bytes = int64_t(text.size() + kLengthBytes);
  return std::move(events.header);
}

}  // namespace serried::checkpoint::detail
