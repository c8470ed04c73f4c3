// The failure of one rank thread, told again by the caller's.
#pragma once

#include <exception>

namespace serried::detail {

/// Whether `error` may be the consequence of another rank's failure: a collective or a store that broke off.
bool is_communication_error(const std::exception_ptr& error);

/// Throws `error` again with "rank 2: " before its text. c10's types are kept, any other becomes a c10::Error.
[[noreturn]] void rethrow_with_rank(const std::exception_ptr& error, int rank);

}  // namespace serried::detail
