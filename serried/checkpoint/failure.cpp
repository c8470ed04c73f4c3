// From exceptions of other layers to ours, and back.
#include "serried/checkpoint/failure.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <new>

#include "serried/base/error.h"

namespace serried::checkpoint::detail {
namespace {

// Is formatted already: its parts are put into ours.
Failure failure_of(Failure::Kind kind, const std::string& formatted) {
  const size_t fix = formatted.find("\n  fix: ");
  const size_t at = formatted.find("\n  at: ");
  const std::string what = formatted.substr(0, std::min(fix, at));
  if (fix == std::string::npos) return {kind, what, ""};
  return {kind, what, formatted.substr(fix + 8, at == std::string::npos ? at : at - fix - 8)};
}

}  // namespace

Failure current_failure() {
  try {
    throw;
  } catch (const Failure& failure) {
    return failure;
  } catch (const c10::Error& error) {
    return failure_of(Failure::Kind::value, error.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    return {Failure::Kind::system, "out of memory", "free some, or save and load on more ranks, each with less"};
  } catch (const std::exception& error) {
    return failure_of(Failure::Kind::value, error.what());
  }
}

void raise_failure(const char* where, const Failure& failure) {
  if (failure.kind == Failure::Kind::value) raise<c10::ValueError>({where, failure.text, failure.fix});
  raise<c10::Error>({where, failure.text, failure.fix});
}

}  // namespace serried::checkpoint::detail
