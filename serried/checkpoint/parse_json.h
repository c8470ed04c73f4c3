// JSON from files that anybody may have made.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace serried::checkpoint::detail {

/// Text that is strict JSON, of limited depth and without a key that stands twice; `what` names it in the Failure. Its
/// cost grows with the length of the text, whatever stands in it.
nlohmann::json parse_json(const std::string& text, const std::string& what);

}  // namespace serried::checkpoint::detail
