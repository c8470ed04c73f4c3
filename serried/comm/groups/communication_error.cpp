// Errors of c10d by type, those of gloo by text.
#include "serried/comm/groups/communication_error.h"

#include <c10/util/Exception.h>

#include <string_view>

namespace serried::detail {

bool is_communication_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::DistError&) {
    return true;
  } catch (const std::exception& other) {
    // Gloo's own exceptions are runtime_errors that begin with the file they come from.
    const std::string_view text = other.what();
    return text.starts_with("[") && text.substr(0, text.find(']')).find("gloo/") != std::string_view::npos;
  } catch (...) {
    return false;
  }
}

}  // namespace serried::detail
