// Splits rendezvous urls: scheme://host:port/path?key=value&key=value
#include "serried/comm/rendezvous/url.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

// Cuts `rest` at the first `mark`: what stood before it is returned, what stood behind it stays.
std::string cut(std::string& rest, const std::string& mark) {
  const size_t at = std::min(rest.find(mark), rest.size());
  std::string head = rest.substr(0, at);
  rest.erase(0, std::min(at + mark.size(), rest.size()));
  return head;
}

void parse_query(const std::string& query, Url& url) {
  std::string rest = query;
  while (!rest.empty()) {
    std::string value = cut(rest, "&");
    if (value.empty()) continue;
    if (value.find('=') == std::string::npos) {
      raise<c10::ValueError>({"rendezvous", c10::str("\"", value, "\" in ", url.text, " has no value"),
                              "write the query as ?rank=0&world_size=2"});
    }
    const std::string key = cut(value, "=");
    url.query[key] = value;
  }
}

void parse_authority(std::string authority, Url& url) {
  if (authority.starts_with('[')) {
    authority.erase(0, 1);
    url.host = cut(authority, "]");
    cut(authority, ":");
    url.port = authority;
    return;
  }
  url.host = cut(authority, ":");
  url.port = authority;
}

}  // namespace

Url parse_url(const std::string& text) {
  Url url{.text = text, .scheme = {}, .host = {}, .port = {}, .path = {}, .query = {}};
  std::string rest = text;
  if (rest.find("://") == std::string::npos) return url;
  url.scheme = cut(rest, "://");
  std::string place = cut(rest, "?");
  parse_query(rest, url);
  const size_t slash = std::min(place.find('/'), place.size());
  url.path = place.substr(slash);
  parse_authority(place.substr(0, slash), url);
  return url;
}

std::optional<int64_t> parse_integer(const std::string& text) {
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end || text.empty()) return std::nullopt;
  return value;
}

std::string why_no_rank(const std::string& text) {
  const auto value = parse_integer(text);
  if (!value) return "not a whole number";
  const bool fits = *value >= std::numeric_limits<int>::min() && *value <= std::numeric_limits<int>::max();
  return fits ? "" : "not a number of 32 bits";
}

}  // namespace serried::detail
