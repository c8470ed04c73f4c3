// Builds a value event by event: nlohmann's parser with a callback looks at all children again whenever one ends.
#include "serried/checkpoint/parse_json.h"

#include <c10/util/StringUtil.h>

#include <vector>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/limits.h"

namespace serried::checkpoint::detail {
namespace {

using nlohmann::json;

constexpr size_t kMaxNesting = 100;

class JsonBuilder : public nlohmann::json_sax<json> {
 public:
  explicit JsonBuilder(const std::string& what) : what_(what) {}

  json result() && { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(number_integer_t value) override { return put(value); }
  bool number_unsigned(number_unsigned_t value) override { return put(value); }
  bool number_float(number_float_t value, const string_t&) override { return put(value); }
  bool string(string_t& value) override { return put(std::move(value)); }
  bool binary(binary_t&) override { refuse("is no JSON"); }

  bool key(string_t& name) override {
    const auto [place, is_new] = open_.back()->emplace(name, nullptr);
    if (!is_new) refuse("has the key \"" + serried::detail::printable(name) + "\" twice");
    place_of_key_ = &*place;
    return true;
  }
  bool start_object(size_t) override { return open(json::object()); }
  bool start_array(size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { refuse("is no JSON"); }

 private:
  [[noreturn]] void refuse(const std::string& why) const {
    fail(what_ + " " + why, "the file is damaged: use another checkpoint");
  }

  json& place_for(json value) {
    if (++num_values_ > format_limits().json_values) refuse(c10::str("has more than ", num_values_ - 1, " values"));
    if (open_.empty()) return root_ = std::move(value);
    if (open_.back()->is_object()) return *place_of_key_ = std::move(value);
    return open_.back()->emplace_back(std::move(value));
  }

  bool put(json value) {
    place_for(std::move(value));
    return true;
  }

  bool open(json container) {
    if (open_.size() == kMaxNesting) refuse("is nested too deeply");
    open_.push_back(&place_for(std::move(container)));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  const std::string& what_;
  json root_;
  std::vector<json*> open_ = {};  // objects and lists that have not ended: none moves before those inside have
  json* place_of_key_ = nullptr;
  int64_t num_values_ = 0;
};

}  // namespace

json parse_json(const std::string& text, const std::string& what) {
  JsonBuilder builder(what);
  json::sax_parse(text, &builder);
  return std::move(builder).result();
}

}  // namespace serried::checkpoint::detail
