// Elements one by one, as the shortest text that gives the same number again.
#include "serried/checkpoint/tensor_text.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "serried/checkpoint/values.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

constexpr int64_t kMostElements = 1000;  // that are shown without being asked for
constexpr int64_t kShownAtEnds = 3;

template <class Number>
std::string number_text(Number number) {
  char text[64];
  return {text, std::to_chars(text, text + sizeof text, number).ptr};
}

// The elements of a tensor of any dtype, by their place in row-major order.
class Elements {
 public:
  explicit Elements(const at::Tensor& tensor) : values_(widened(tensor).contiguous()) {}

  std::string text(int64_t place) const {
    switch (values_.scalar_type()) {
      case at::kDouble: return number_text(element<double>(place));
      case at::kFloat: return number_text(element<float>(place));
      case at::kBool: return element<bool>(place) ? "true" : "false";
      case at::kUInt64: return number_text(element<uint64_t>(place));
      case at::kComplexFloat: {
        const auto value = element<c10::complex<float>>(place);
        const std::string imaginary = number_text(value.imag());
        return number_text(value.real()) + (imaginary.front() == '-' ? "" : "+") + imaginary + "i";
      }
      default: return number_text(element<int64_t>(place));
    }
  }

  json as_json(int64_t place) const {
    switch (values_.scalar_type()) {
      case at::kDouble: return number_json(element<double>(place));
      case at::kFloat: return json_of_float(element<float>(place));
      case at::kBool: return element<bool>(place);
      case at::kUInt64: return element<uint64_t>(place);
      case at::kComplexFloat: {
        const auto value = element<c10::complex<float>>(place);
        return {json_of_float(value.real()), json_of_float(value.imag())};
      }
      default: return element<int64_t>(place);
    }
  }

 private:
  // Into one of a few dtypes that hold the same values.
  static at::Tensor widened(const at::Tensor& tensor) {
    const at::ScalarType dtype = tensor.scalar_type();
    if (dtype == at::kDouble || dtype == at::kBool || dtype == at::kUInt64) return tensor;
    if (c10::isComplexType(dtype)) return tensor.to(at::kComplexFloat);
    return tensor.to(c10::isFloatingType(dtype) ? at::kFloat : at::kLong);
  }

  template <class Number>
  Number element(int64_t place) const {
    return values_.const_data_ptr<Number>()[place];
  }

  // As many digits as a float has, not those of the double that JSON makes of it.
  static json json_of_float(float value) {
    if (!std::isfinite(value)) return number_json(value);
    const std::string text = number_text(value);
    double same = 0;
    std::from_chars(text.data(), text.data() + text.size(), same);
    return same;
  }

  const at::Tensor values_;
};

// Brackets around what `show_element` writes.
class Brackets {
 public:
  Brackets(c10::IntArrayRef sizes, bool is_excerpt, const Elements& elements)
      : sizes_(sizes), is_excerpt_(is_excerpt), elements_(elements) {}

  std::string text() && {
    show(0, 0);
    return std::move(text_);
  }

 private:
  // What lies at `place` of dim `dim` and those behind it.
  void show(size_t dim, int64_t place) {
    if (dim == sizes_.size()) {
      text_ += elements_.text(place);
      return;
    }
    const int64_t size = sizes_[dim];
    const bool has_gap = is_excerpt_ && size > 2 * kShownAtEnds + 1;
    text_ += "[";
    for (int64_t i = 0; i < size; ++i) {
      if (i > 0) separate(dim);
      if (has_gap && i == kShownAtEnds) {
        text_ += "...";
        i = size - kShownAtEnds - 1;
        continue;
      }
      show(dim + 1, place * size + i);
    }
    text_ += "]";
  }

  // A new line for each row, and an empty one between blocks of rows.
  void separate(size_t dim) {
    const size_t inner = sizes_.size() - dim - 1;
    text_ += ",";
    if (inner == 0) {
      text_ += " ";
    } else {
      text_ += std::string(inner, '\n') + std::string(dim + 1, ' ');
    }
  }

  const c10::IntArrayRef sizes_;
  const bool is_excerpt_;
  const Elements& elements_;
  std::string text_;
};

json nested(c10::IntArrayRef sizes, const Elements& elements, int64_t place) {
  if (sizes.empty()) return elements.as_json(place);
  json list = json::array();
  for (int64_t i = 0; i < sizes[0]; ++i) list.push_back(nested(sizes.slice(1), elements, place * sizes[0] + i));
  return list;
}

}  // namespace

std::string tensor_text(const at::Tensor& tensor, bool all) {
  const Elements elements(tensor);
  int64_t num_shown = 1;  // brackets without anything in them count, too
  for (int64_t size : tensor.sizes()) num_shown *= std::max<int64_t>(size, 1);
  return Brackets(tensor.sizes(), !all && num_shown > kMostElements, elements).text();
}

json tensor_json(const at::Tensor& tensor) {
  return nested(tensor.sizes(), Elements(tensor), 0);
}

}  // namespace serried::checkpoint::detail
