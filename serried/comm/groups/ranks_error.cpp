// The failure of one rank thread, told again by the caller's.
#include "serried/comm/groups/ranks_error.h"

#include <c10/util/Exception.h>

#include <string_view>

namespace serried::detail {
namespace {

std::string prefixed(int rank, const std::string& text) {
  return c10::str("rank ", rank, ": ", text);
}

template <class Exception>
void rethrow_if(const c10::Error& error, int rank) {
  if (dynamic_cast<const Exception*>(&error) == nullptr) return;
  throw Exception(prefixed(rank, error.what_without_backtrace()), error.backtrace());
}

// Types that derive from others of the list come first.
template <class... Exceptions>
[[noreturn]] void rethrow_same_type(const c10::Error& error, int rank) {
  (rethrow_if<Exceptions>(error, rank), ...);
  throw c10::Error(prefixed(rank, error.what_without_backtrace()), error.backtrace());
}

}  // namespace

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

void rethrow_with_rank(const std::exception_ptr& error, int rank) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    rethrow_same_type<c10::IndexError, c10::ValueError, c10::TypeError, c10::NotImplementedError, c10::BufferError,
                      c10::EnforceFiniteError, c10::LinAlgError, c10::OutOfMemoryError, c10::SyntaxError,
                      c10::DistQueueEmptyError, c10::DistStoreError, c10::DistBackendError, c10::DistNetworkError,
                      c10::DistError>(e, rank);
  } catch (const std::exception& e) {
    throw c10::Error(prefixed(rank, e.what()));
  } catch (...) {
    throw c10::Error(prefixed(rank, "an exception that is not a std::exception"));
  }
}

}  // namespace serried::detail
