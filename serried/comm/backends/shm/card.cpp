// Four numbers and the host, separated by spaces.
#include "serried/comm/backends/shm/card.h"

#include <sstream>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/shm/segment.h"

namespace serried::shm {
namespace {

bool makes_sense(const Card& card) {
  return card.memory.pid > 0 && card.memory.fd >= -1 && card.heap_bytes >= 0 && card.heap_bytes <= kMaxHeapBytes &&
         card.round_bytes > 0 && card.round_bytes <= SegmentShape::kStageBytes && !card.host.empty();
}

}  // namespace

std::string Card::text() const {
  return c10::str(memory.text(), " ", heap_bytes, " ", round_bytes, " ", host);
}

Card parse_card(std::string_view where, int rank, const std::string& text) {
  Card card;
  std::istringstream in(text);
  in >> card.memory.pid >> card.memory.fd >> card.heap_bytes >> card.round_bytes;
  // The rest as it is: names of hosts hold spaces.
  if (in && in.get() == ' ') card.host.assign(std::istreambuf_iterator<char>(in), {});
  if (makes_sense(card) && card.text() == text) return card;
  raise<c10::DistBackendError>({where,
                                c10::str("rank ", rank, " says \"", text, "\" where its process and memory should be"),
                                "find out who else writes to the store of this job"});
}

}  // namespace serried::shm
