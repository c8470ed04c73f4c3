// Which exceptions may come from the failure of another rank.
#pragma once

#include <exception>

namespace serried::detail {

/// Whether `error` may be the consequence of another rank's failure: a collective or a store that broke off.
bool is_communication_error(const std::exception_ptr& error);

}  // namespace serried::detail
