// Making, mapping and laying out the shared memory.
#include "serried/comm/backends/shm/segment.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "serried/base/error.h"
#include "serried/comm/agree/shared_mapping.h"

#include <c10/util/StringUtil.h>

namespace serried::shm {
namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kHugePage = 2 << 20;
constexpr int64_t kMaxHeapBytes = int64_t(1) << 46;  // of all ranks: more than a machine has, small enough to add up

int64_t round_up(int64_t bytes, int64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

std::string SegmentShape::problem() const {
  if (heap_bytes < 0 || heap_bytes > kMaxHeapBytes / world_size) return c10::str("a heap of ", heap_bytes, " bytes");
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
  // slots, stages and the result chunk of one rank lie together: one rank, one run of pages.
  at.rank_stride = 2 * SegmentShape::kSlotBytes + 3 * SegmentShape::kStageBytes;
  at.ranks = take(n * at.rank_stride, kPage);
  at.heaps = take(n * shape.heap_bytes, kHugePage);
  at.total = round_up(end, kPage);
  return at;
}

Segment::Segment(const SegmentShape& shape, int fd) : shape_(shape), offsets_(lay_out(shape)), fd_(fd) {}

Segment Segment::create(const SegmentShape& shape) {
  Segment segment(shape, -1);
  segment.fd_ = detail::make_shared_file("serried", segment.offsets_.total);
  if (segment.fd_ < 0) {
    raise<c10::DistBackendError>(
        {"shm", c10::str("cannot make ", segment.offsets_.total, " bytes of shared memory: ", std::strerror(errno)),
         "lower SERRIED_SHM_HEAP_MB, or use new_group(\"gloo\")"});
  }
  segment.map();
  return segment;
}

Segment Segment::attach(const SegmentShape& shape, const detail::SharedFilePlace& place) {
  Segment segment(shape, -1);
  const detail::SharedFile file = detail::open_shared_file(place, segment.offsets_.total);
  if (file.fd < 0) {
    raise<c10::DistBackendError>({"shm", c10::str("the shared memory of rank 0 cannot be used: ", file.problem),
                                  file.foreign
                                      ? "find out who writes to the store of this job: rank 0 did not make this"
                                      : "let the ranks share a user and a pid namespace, or use new_group(\"gloo\")"});
  }
  segment.fd_ = file.fd;
  segment.map();
  return segment;
}

void Segment::map() {
  memory_ = detail::map_shared_file(fd_, offsets_.total);
  if (!memory_) {
    raise<c10::DistBackendError>(
        {"shm", c10::str("cannot map ", offsets_.total, " bytes of shared memory: ", std::strerror(errno)),
         "lower SERRIED_SHM_HEAP_MB, or raise the limit on address space (ulimit -v)"});
  }
  base_ = memory_.get();
  // A hint: where the kernel gives huge pages to shared memory, the heap takes fewer faults.
  madvise(base_ + offsets_.heaps, offsets_.total - offsets_.heaps, MADV_HUGEPAGE);
}

Segment::Segment(Segment&& other) noexcept
    : shape_(other.shape_),
      offsets_(other.offsets_),
      memory_(std::move(other.memory_)),
      base_(std::exchange(other.base_, nullptr)),
      fd_(std::exchange(other.fd_, -1)) {}

Segment::~Segment() {
  close_fd();
}

void Segment::close_fd() {
  if (fd_ >= 0) close(std::exchange(fd_, -1));
}

}  // namespace serried::shm
