// Laying out the shared memory.
#include "serried/comm/backends/shm/segment.h"

#include <sys/mman.h>

#include "serried/base/error.h"

#include <c10/util/StringUtil.h>

namespace serried::shm {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kMaxHeapBytesOfAll = int64_t(1) << 46;  // more than a machine has, small enough to add up

// What readers without LibTorch take a record for.
static_assert(sizeof(watch::Record) == sizeof(watch_page::Call) &&
              offsetof(watch::Record, sequence) == offsetof(watch_page::Call, sequence) &&
              offsetof(watch::Record, kind) == offsetof(watch_page::Call, kind) &&
              offsetof(watch::Record, dtype) == offsetof(watch_page::Call, dtype) &&
              offsetof(watch::Record, reduce_op) == offsetof(watch_page::Call, reduce_op) &&
              offsetof(watch::Record, num_dims) == offsetof(watch_page::Call, num_dims) &&
              offsetof(watch::Record, root) == offsetof(watch_page::Call, root) &&
              offsetof(watch::Record, num_elements) == offsetof(watch_page::Call, num_elements) &&
              offsetof(watch::Record, sizes) == offsetof(watch_page::Call, sizes) &&
              offsetof(watch::Record, part_of) == offsetof(watch_page::Call, part_of) &&
              offsetof(watch::Record, sizes_of_all) == offsetof(watch_page::Call, sizes_of_all) &&
              offsetof(watch::Record, captured) == offsetof(watch_page::Call, captured) &&
              offsetof(watch::Record, same_size) == offsetof(watch_page::Call, same_size));
static_assert(offsetof(RankInfo, page) == 0 && offsetof(Header, page) == 0 && sizeof(Header) <= kPage);

int64_t round_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::string SegmentShape::problem() const {
  if (heap_bytes < 0 || heap_bytes > kMaxHeapBytesOfAll / world_size)
    return c10::str("a heap of ", heap_bytes, " bytes");
  if (round_bytes < 64 || round_bytes > kStageBytes || round_bytes % 64 != 0) {
    return c10::str("rounds of ", round_bytes, " bytes");
  }
  return "";
}

Segment::Offsets Segment::lay_out(const SegmentShape& shape) {
  const int64_t n = shape.world_size;
  Offsets at{};
  int64_t end = round_up(sizeof(Header), kPage);
  const auto take = [&end](int64_t bytes, int64_t unit) {
    const int64_t begin = round_up(end, unit);
    end = begin + bytes;
    return begin;
  };
  at.lines = take(n * sizeof(RankLine), kPage);
  at.infos = take(n * sizeof(RankInfo), kPage);
  at.bells = take(n * sizeof(Bell), kPage);
  at.tables = take(n * 2 * n * sizeof(Piece), kPage);
  at.ring_stride = round_up(offsetof(Ring, data) + Ring::kCapacity, kPage);
  at.rings = take(n * n * at.ring_stride, kPage);
  at.arrivals = take(n * 2 * shape.arrival_bytes, kPage);
  // slots, stages and the result chunk of one rank lie together: one rank, one run of pages.
  at.rank_stride = 2 * SegmentShape::kSlotBytes + 3 * SegmentShape::kStageBytes;
  at.ranks = take(n * at.rank_stride, kPage);
  at.heaps = take(n * shape.heap_bytes, kHugePage);
  at.total = round_up(end, kPage);
  return at;
}

Segment Segment::create(const SegmentShape& shape) {
  Segment segment(shape);
  const int64_t bytes = segment.offsets_.total;
  segment.memory_ = detail::SharedMemory::make(watch_page::kSegmentName, bytes);
  if (!segment.memory_.has_file()) {
    raise<c10::DistBackendError>(
        {"shm", c10::str("cannot make ", bytes, " bytes of shared memory: ", segment.memory_.problem()),
         "lower SERRIED_SHM_HEAP_MB, or use new_group(\"gloo\")"});
  }
  segment.use_memory();
  segment.describe_layout();
  return segment;
}

void Segment::describe_layout() {
  watch_page::Header& page = header().page;
  page.version = watch_page::Header::kVersion;
  page.is_shared = 1;
  page.world_size = shape_.world_size;
  page.rank_stride = sizeof(RankInfo);
  page.ranks = uint64_t(offsets_.infos);
  page.calls = offsetof(RankInfo, records);
  page.call_stride = sizeof(watch::Record);
  page.num_calls = std::tuple_size_v<decltype(RankInfo::records)>;
  page.phases = uint64_t(offsets_.lines) + offsetof(RankLine, phase);
  // Ranks of other hosts have no phases here, but calls.
  page.phase_stride = shape_.arrival_bytes > 0 ? 0 : sizeof(RankLine);
  page.failure = offsetof(Header, reason);
  page.failure_room = sizeof(Header::reason);
  page.magic = watch_page::Header::kMagic;
}

Segment Segment::attach(const SegmentShape& shape, const detail::SharedFilePlace& place) {
  Segment segment(shape);
  segment.memory_ = detail::SharedMemory::open(place, segment.offsets_.total);
  if (!segment.memory_.has_file()) {
    raise<c10::DistBackendError>(
        {"shm", c10::str("the shared memory of rank 0 cannot be used: ", segment.memory_.problem()),
         segment.memory_.is_foreign() ? "find out who writes to the store of this job: rank 0 did not make this"
                                      : "let the ranks share a user and a pid namespace, or use new_group(\"gloo\")"});
  }
  segment.use_memory();
  return segment;
}

void Segment::use_memory() {
  if (memory_.data() == nullptr) {
    raise<c10::DistBackendError>(
        {"shm", c10::str("cannot map ", offsets_.total, " bytes of shared memory: ", memory_.problem()),
         "lower SERRIED_SHM_HEAP_MB, or raise the limit on address space (ulimit -v)"});
  }
  base_ = memory_.data();
  // A hint: where the kernel gives huge pages to shared memory, the heap takes fewer faults.
  madvise(base_ + offsets_.heaps, offsets_.total - offsets_.heaps, MADV_HUGEPAGE);
}

uint64_t PeerMemory::locate(const void* data) const {
  const char* heap = segment_.heap(rank_);
  const char* address = static_cast<const char*>(data);
  if (address >= heap && address < heap + segment_.heap_bytes()) return kHeapBit | uint64_t(address - heap);
  return reinterpret_cast<uint64_t>(address);
}

char* PeerMemory::resolve(int peer, uint64_t location, int64_t bytes) const {
  if ((location & kHeapBit) == 0) return one_process_ ? reinterpret_cast<char*>(location) : nullptr;
  const uint64_t offset = location & ~kHeapBit;
  const uint64_t room = uint64_t(segment_.heap_bytes());
  if (offset > room || uint64_t(bytes) > room - offset) return nullptr;
  return segment_.heap(peer) + offset;
}

}  // namespace serried::shm
