// One flag per thread, and the home key out of the way.
#include "serried/tensor/dispatch/local_only.h"

#include <utility>

#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

thread_local bool local_only = false;

}  // namespace

LocalOnly::LocalOnly() : was_local_only_(std::exchange(local_only, true)) {
  // The home key leads to a recorder as well.
  if (!tape::is_recording()) below_home_.emplace(kHomeKey);
}

LocalOnly::~LocalOnly() {
  local_only = was_local_only_;
}

bool is_local_only() {
  return local_only;
}

}  // namespace serried::detail
