// nlohmann's parser over an iterator that counts.
#include "tools/serried/simulate/json_lines.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>
#include <vector>

#include "serried/base/text.h"
#include "tools/serried/simulate/error.h"

namespace serried::simulation {
namespace {

using nlohmann::json;

constexpr size_t kMaxNesting = 4;

// Says how far the parser has read.
class CountingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  CountingIterator(const char* at, const char** farthest) : at_(at), farthest_(farthest) {}
  reference operator*() const { return *at_; }
  CountingIterator& operator++() {
    ++at_;
    *farthest_ = std::max(*farthest_, at_);
    return *this;
  }
  CountingIterator operator++(int) {
    const CountingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const CountingIterator& other) const { return at_ == other.at_; }
  bool operator!=(const CountingIterator& other) const { return at_ != other.at_; }

 private:
  const char* at_;
  const char** farthest_;
};

class Builder : public nlohmann::json_sax<json> {
 public:
  Builder(std::string_view text, const std::string& name) : text_(text), name_(name), farthest_(text.data()) {}

  JsonObject run() {
    const char* const end = text_.data() + text_.size();
    json::sax_parse(CountingIterator(text_.data(), &farthest_), CountingIterator(end, &farthest_), this);
    return std::move(root_);
  }

  bool null() override { refuse_kind("null"); }
  bool boolean(bool) override { refuse_kind("a truth value"); }
  bool number_integer(number_integer_t value) override { return put(double(value)); }
  bool number_unsigned(number_unsigned_t value) override { return put(double(value)); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t&) override { refuse_kind("a text"); }
  bool binary(binary_t&) override { refuse_kind("binary data"); }
  bool start_array(size_t) override { refuse_kind("a list"); }
  bool end_array() override { return true; }

  bool start_object(size_t) override {
    if (open_.empty()) {
      root_.line = line_at(farthest_);
      open_.push_back(&root_);
      return true;
    }
    if (open_.size() == kMaxNesting) fail(entry_->line, "it is nested too deeply", kFix);
    JsonObject& object = entry_->value.emplace<JsonObject>();
    object.line = entry_->line;
    open_.push_back(&object);
    return true;
  }
  bool end_object() override {
    open_.pop_back();
    return true;
  }
  bool key(string_t& key) override {
    const int line = line_at(farthest_);
    const auto [found, is_new] = open_.back()->entries.emplace(key, JsonObject::Entry{line, 0.0});
    if (!is_new) fail(line, "the key \"" + detail::printable(key) + "\" is there twice", "leave one of them out");
    entry_ = &found->second;
    key_ = key;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) override {
    const std::string_view before = text_.substr(0, std::min(position, text_.size()));
    const size_t begin = before.rfind('\n') + 1;  // npos + 1 is 0
    const std::string what = error.what();
    const size_t colon = what.find(": ");
    const std::string why = detail::printable(colon == std::string::npos ? what : what.substr(colon + 2));
    throw SimulationError(name_ + ", line " + std::to_string(line_at(text_.data() + before.size())) + ", column " +
                              std::to_string(before.size() - begin) + ": " + why,
                          "make it JSON");
  }

 private:
  static constexpr const char* kFix = "serried bench --calibrate writes one that fits, docs/simulation.md has one";

  int line_at(const char* place) const { return 1 + int(std::count(text_.data(), place, '\n')); }

  [[noreturn]] void fail(int line, const std::string& what, const std::string& fix) const {
    throw SimulationError(name_ + ", line " + std::to_string(line) + ": " + what, fix);
  }

  [[noreturn]] void refuse_kind(const std::string& what) const {
    if (entry_ == nullptr) fail(1, "it is " + what + ", not an object", kFix);
    fail(entry_->line, "\"" + detail::printable(key_) + "\" is " + what, "write a number or an object there");
  }

  bool put(double number) {
    if (entry_ == nullptr) refuse_kind("a number");
    entry_->value = number;
    return true;
  }

  const std::string_view text_;
  const std::string& name_;
  const char* farthest_;
  JsonObject root_;
  std::vector<JsonObject*> open_ = {};
  JsonObject::Entry* entry_ = nullptr;
  std::string key_ = {};
};

}  // namespace

JsonObject parse_json_lines(std::string_view text, const std::string& name) {
  return Builder(text, name).run();
}

}  // namespace serried::simulation
