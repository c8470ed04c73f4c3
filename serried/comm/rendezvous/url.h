// The parts of a rendezvous url.
#pragma once

#include <map>
#include <optional>
#include <string>

namespace serried::detail {

struct Url {
  std::string text;    // as given, for messages
  std::string scheme;  // "tcp"; empty where the text has none
  std::string host;    // without the brackets of an IPv6 address
  std::string port;
  std::string path;
  std::map<std::string, std::string> query;
};

/// Splits `text`; parts that are absent stay empty. Checks nothing but the query's form.
Url parse_url(const std::string& text);

/// `text` as a whole number, nullopt if it is none.
std::optional<int64_t> parse_integer(const std::string& text);

/// Why `text` is no rank and no number of ranks; empty where it can be one.
///     not a whole number
std::string why_no_rank(const std::string& text);

}  // namespace serried::detail
