// First writer wins; later ones compare.
#include "serried/comm/agree/agree.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::detail {

std::string first_text(c10d::Store& store, const std::string& key, const std::string& mine) {
  const std::vector<uint8_t> text =
      store.compareSet(key, std::vector<uint8_t>{}, std::vector<uint8_t>(mine.begin(), mine.end()));
  return {text.begin(), text.end()};
}

void agree(c10d::Store& store, const std::string& key, std::string_view where, const std::string& mine) {
  const std::string other = first_text(store, key, mine);
  if (other == mine) return;
  raise<c10::ValueError>({where, c10::str("this rank passes ", mine, ", another rank passed ", other),
                          "make the same groups in the same order on every rank"});
}

}  // namespace serried::detail
