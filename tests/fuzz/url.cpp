// Urls of a rendezvous, and the launcher's host:port.
#include "tests/fuzz/target.h"

#include <c10/util/Exception.h>

#include "serried/comm/rendezvous/launch_environment.h"
#include "serried/comm/rendezvous/url.h"
#include "serried/launch/error.h"
#include "serried/launch/options.h"

namespace serried::fuzz {

void run_url(std::string_view bytes) {
  const std::string text(bytes);
  succeeds<c10::ValueError>([&] {
    const detail::Url url = detail::parse_url(text);
    require(url.text == text, "a url that forgets its text");
    require(url.scheme.find("://") == std::string::npos, "a scheme with its mark");
    require(url.path.empty() || url.path.front() == '/', "a path without a slash");
    require(url.host.find('/') == std::string::npos && url.port.find('/') == std::string::npos, "a host with a path");
    size_t length = url.scheme.size() + url.host.size() + url.port.size() + url.path.size();
    for (const auto& [key, value] : url.query) length += key.size() + value.size();
    require(length <= text.size(), "parts that are longer than the whole");
  });
  succeeds<launch::LaunchError>([&] {
    const launch::Address address = launch::parse_address(text);
    require(!address.host.empty() && address.port > 0 && address.port < 65536, "an address without host or port");
  });
  if (const auto number = detail::parse_integer(text)) {
    require(detail::parse_integer(std::to_string(*number)) == number, "a number that does not come back from text");
  }
  require(detail::first_host(text).size() <= text.size(), "a host that is longer than the list");
}

}  // namespace serried::fuzz
