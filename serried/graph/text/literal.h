// Constants of a graph as text that reads back to the last bit, and the cursor that reads them.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/DimVector.h>
#include <c10/util/StringUtil.h>

#include <cctype>
#include <string>
#include <string_view>

#include "serried/base/error.h"

namespace serried::graph {

/// A place in one line of text. Spaces between words do not count.
class Cursor {
 public:
  Cursor(std::string_view line, size_t line_number) : rest_(line), line_number_(line_number) {}

  bool at_end() {
    skip_spaces();
    return rest_.empty();
  }

  bool next_is(std::string_view text) {
    skip_spaces();
    return rest_.starts_with(text);
  }

  bool accept(std::string_view text) {
    if (!next_is(text)) return false;
    rest_.remove_prefix(text.size());
    return true;
  }

  void expect(std::string_view text) {
    if (!accept(text)) fail(c10::str("expected ", text, " before \"", rest_, "\""));
  }

  /// The next characters that are letters, digits or among `others`; an error where there are none.
  std::string_view word(std::string_view others = "_.:+-") {
    skip_spaces();
    size_t length = 0;
    while (length < rest_.size() && (std::isalnum(static_cast<unsigned char>(rest_[length])) != 0 ||
                                     others.find(rest_[length]) != std::string_view::npos)) {
      ++length;
    }
    if (length == 0) fail(c10::str("expected a word or a number before \"", rest_, "\""));
    const std::string_view found = rest_.substr(0, length);
    rest_.remove_prefix(length);
    return found;
  }

  /// One character, spaces included.
  char take() {
    if (rest_.empty()) fail("the line ends in the middle of a string");
    const char c = rest_[0];
    rest_.remove_prefix(1);
    return c;
  }

  /// What is left of the line.
  std::string_view rest() const { return rest_; }

  [[noreturn]] void fail(const std::string& what, const std::string& fix = kUnchanged) const {
    raise<c10::ValueError>({"graph", c10::str("line ", line_number_, ": ", what), fix});
  }

  static constexpr const char* kUnchanged = "give it what serried::graph::to_text wrote, unchanged and whole";

 private:
  void skip_spaces() {
    while (!rest_.empty() && rest_[0] == ' ') rest_.remove_prefix(1);
  }

  std::string_view rest_;
  size_t line_number_;
};

/// Reads "a, b, c" up to `close`; `read` reads one.
template <class Read>
void read_list(Cursor& in, std::string_view close, Read read) {
  while (!in.accept(close)) {
    read();
    if (in.accept(",")) continue;
    in.expect(close);
    return;
  }
}

/// What an argument's literals are read as: numbers that stand for a dtype, layout or memory format have that type.
c10::TypePtr literal_type(const c10::Argument& declared);

/// "1", "1.0", "nan", "true", "none", "[1, 2]", "\"text\"", "f32", "cpu", "sum", "premul_sum(0.5)". A number is written
/// as the name that it stands for only where `type` says so.
std::string literal_text(const c10::IValue& constant, const c10::TypePtr& type = nullptr);

/// What has no text: generators of the user's, storages, other objects.
bool has_literal(const c10::IValue& constant);

/// What literal_text wrote.
c10::IValue read_literal(Cursor& in, const c10::TypePtr& type);

/// With quotes around it.
std::string quoted_text(std::string_view text);
std::string read_quoted(Cursor& in);

/// "[2, 3]"
std::string numbers_text(c10::IntArrayRef numbers);
c10::DimVector read_numbers(Cursor& in);

/// That of a tensor: a number that stands for none fails.
at::ScalarType read_dtype(Cursor& in);
at::Device read_device(Cursor& in);
int64_t read_int(Cursor& in);

}  // namespace serried::graph
