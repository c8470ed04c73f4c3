// The message with both lists of names.
#include "serried/checkpoint/load_names.h"

#include <c10/util/StringUtil.h>

#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"

namespace serried::checkpoint::detail {
namespace {

constexpr size_t kShownNames = 20;

}  // namespace

std::string list_of_names(std::vector<std::string> names) {
  for (std::string& name : names) name = serried::detail::printable(name);
  const size_t count = names.size();
  if (count > kShownNames) {
    names.resize(kShownNames);
    names.push_back(c10::str("and ", count - kShownNames, " more"));
  }
  return count == 0 ? "none" : c10::Join(", ", names);
}

void check_names(const std::string& entry, const Wanted& wanted, bool strict) {
  if (!strict || (wanted.missing.empty() && wanted.extra.empty())) return;
  fail(c10::str("\"", entry, "\" has other names in the checkpoint: missing there: ", list_of_names(wanted.missing),
                "; only there: ", list_of_names(wanted.extra)),
       "load into the same model, pass {.rename = {{pattern, to}}}, or {.strict = false} to load what both have");
}

}  // namespace serried::checkpoint::detail
