// The memory in which a rank keeps its calls, as the launcher reads it: an input is what is written over a box that is
// whole, each time 2 bytes of place in units of 8 and 8 bytes of value. The upper half of the places is in the ring.
#include "tests/fuzz/target.h"

#include <unistd.h>

#include <cstring>

#include "serried/base/text.h"
#include "serried/launch/black_box.h"
#include "serried/launch/seen_json.h"

namespace serried::fuzz {
namespace {

constexpr size_t kStep = 10;

void write_over(int file, std::string_view bytes) {
  for (; bytes.size() >= kStep; bytes.remove_prefix(kStep)) {
    uint16_t place = 0;
    std::memcpy(&place, bytes.data(), sizeof place);
    const bool in_ring = (place & 0x8000) != 0;
    const size_t begin = in_ring ? offsetof(black_box::File, entries) : 0;
    const off_t offset = off_t(begin + size_t(place & 0x7fff) * 8);
    if (size_t(offset) + 8 > sizeof(black_box::File)) continue;
    require(::pwrite(file, bytes.data() + 2, 8, offset) == 8, "the box cannot be written");
  }
}

}  // namespace

void run_black_box(std::string_view bytes) {
  launch::BlackBox box = launch::BlackBox::make(3, "ab12");
  write_over(box.fd(), bytes);
  launch::HostSeen seen{.host = "h", .ranks = {{.rank = 3}}};
  launch::RankSeen& rank = seen.ranks[0];
  rank.groups = box.groups(int64_t(1) << 40, 5);
  rank.calls = box.calls();
  rank.num_calls = box.num_calls();
  require(rank.calls.size() <= black_box::kNumEntries, "more calls than there is room for");
  require(box.job() == detail::printable(box.job()), "a job with control characters");
  static_cast<void>(box.pid());
  require(launch::host_seen_from(launch::to_json(seen)) == seen, "what is read cannot be told");
}

}  // namespace serried::fuzz
