// The text of the error that a call throws.
#pragma once

#include <c10/util/Exception.h>

#include <string>

namespace serried::testing {

/// The message of the `Exception` that `fn` throws, without backtrace; a sentence where it throws none or another.
template <class Exception, class Fn>
std::string error_text(Fn&& fn) {
  try {
    fn();
  } catch (const Exception& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("another type: ") + error.what();
  }
  return "no error";
}

/// The same without the line that says which rank it was.
template <class Exception, class Fn>
std::string error_text_of_any_rank(Fn&& fn) {
  const std::string text = error_text<Exception>(fn);
  return text.substr(0, text.find("\n  at:  rank "));
}

}  // namespace serried::testing
