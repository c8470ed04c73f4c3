// Errors of a store that is gone, in words: c10d's say neither call nor rank.
#pragma once

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <string_view>

#include "serried/base/error.h"

namespace serried::detail {

/// What `fn` gives, which talks to the store where ranks meet on behalf of the call `where`.
template <class Fn>
auto through_store(std::string_view where, Fn&& fn) {
  try {
    return fn();
  } catch (const c10::DistNetworkError& error) {
    const std::string& text = error.msg();
    if (text.starts_with('[')) throw;  // one of ours
    raise<c10::DistNetworkError>(
        {where, c10::str("the store where the ranks meet is gone: ", text.substr(0, text.find('\n'))),
         "look at why the rank that serves it, rank 0 unless you made the store, has ended; then start the job again"});
  }
}

}  // namespace serried::detail
