// Looking at a file before it is opened, and at every number before it is used.
#include "tools/serried/top/pages.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>

#include "serried/launch/fd.h"
#include "tools/serried/top/text.h"

namespace serried::top {
namespace {

using launch::Fd;
using watch_page::Call;
using watch_page::Header;
using watch_page::RankPage;

constexpr uint64_t kMostRanks = 1 << 16;
constexpr uint32_t kMostCalls = 1 << 12;
constexpr uint32_t kMostRoom = 1 << 16;

// Bytes of the file that are there; the fields of a struct are taken out of a copy, since its writer does not wait.
template <size_t size>
class Bytes {
 public:
  bool read(int file, uint64_t offset) { return ::pread(file, data_.data(), size, off_t(offset)) == ssize_t(size); }

  template <class T>
  T at(size_t offset) const {
    T value;
    std::memcpy(&value, data_.data() + offset, sizeof value);
    return value;
  }

  std::string text(size_t offset, size_t room) const {
    return printable({data_.data() + offset, ::strnlen(data_.data() + offset, room)});
  }

 private:
  std::array<char, size> data_{};
};

struct Layout {
  uint64_t bytes = 0;  // of the file
  int32_t world_size = 0;
  uint32_t rank_stride = 0, call_stride = 0, num_calls = 0, phase_stride = 0, failure_room = 0;
  uint64_t ranks = 0, calls = 0, phases = 0, failure = 0;
  bool has_failed = false;

  // Whether every offset that follows from the numbers lies in the file.
  bool makes_sense() const {
    const auto fits = [](uint64_t room, uint64_t begin, uint64_t count, uint64_t stride, uint64_t last) {
      return count > 0 && begin <= room && begin + (count - 1) * stride + last <= room;
    };
    const auto num_ranks = uint64_t(std::max(world_size, 0));
    return num_ranks <= kMostRanks && num_calls <= kMostCalls && failure_room <= kMostRoom &&
           call_stride >= sizeof(Call) && rank_stride >= sizeof(RankPage) &&
           fits(bytes, ranks, num_ranks, rank_stride, rank_stride) &&
           fits(rank_stride, calls, num_calls, call_stride, sizeof(Call)) &&
           (phase_stride == 0 || fits(bytes, phases, num_ranks, phase_stride, sizeof(uint32_t))) &&
           fits(bytes, failure, 1, 0, failure_room);
  }
};

Layout layout_of(const Bytes<sizeof(Header)>& header, uint64_t bytes) {
  Layout layout{.bytes = bytes};
  layout.world_size = header.at<int32_t>(offsetof(Header, world_size));
  layout.rank_stride = header.at<uint32_t>(offsetof(Header, rank_stride));
  layout.call_stride = header.at<uint32_t>(offsetof(Header, call_stride));
  layout.num_calls = header.at<uint32_t>(offsetof(Header, num_calls));
  layout.phase_stride = header.at<uint32_t>(offsetof(Header, phase_stride));
  layout.failure_room = header.at<uint32_t>(offsetof(Header, failure_room));
  layout.ranks = header.at<uint64_t>(offsetof(Header, ranks));
  layout.calls = header.at<uint64_t>(offsetof(Header, calls));
  layout.phases = header.at<uint64_t>(offsetof(Header, phases));
  layout.failure = header.at<uint64_t>(offsetof(Header, failure));
  layout.has_failed = header.at<uint32_t>(offsetof(Header, failed)) != 0;
  return layout;
}

// Of the ring of the rank that begins at `begin`; kind 0 where it is being rewritten, or has been.
Call read_call(int file, const Layout& layout, uint64_t begin, uint64_t sequence) {
  Bytes<sizeof(Call)> bytes;
  if (sequence == 0) return {};
  if (!bytes.read(file, begin + layout.calls + sequence % layout.num_calls * layout.call_stride)) return {};
  const Call call = bytes.template at<Call>(0);
  return call.sequence == sequence ? call : Call{};
}

PageRank read_rank(int file, const Layout& layout, int index) {
  const uint64_t begin = layout.ranks + uint64_t(index) * layout.rank_stride;
  PageRank rank;
  Bytes<sizeof(RankPage)> bytes;
  if (!bytes.read(file, begin)) return rank;
  rank.pid = std::max(0, bytes.at<int32_t>(offsetof(RankPage, pid)));
  rank.rank = bytes.at<int32_t>(offsetof(RankPage, rank));
  rank.has_left = bytes.at<uint32_t>(offsetof(RankPage, left)) != 0;
  rank.newest = bytes.at<uint64_t>(offsetof(RankPage, newest));
  rank.waits_in = bytes.at<uint64_t>(offsetof(RankPage, waits_in));
  rank.waits_since = bytes.at<uint64_t>(offsetof(RankPage, waits_since));
  rank.waits_for = bytes.at<uint32_t>(offsetof(RankPage, waits_for));
  rank.waits_phase = uint32_t(bytes.at<uint64_t>(offsetof(RankPage, waits_phase)));
  rank.num_steps = bytes.at<uint64_t>(offsetof(RankPage, num_steps));
  if (rank.pid == 0) rank.rank = index;
  Bytes<sizeof(uint32_t)> phase;
  if (layout.phase_stride != 0 && phase.read(file, layout.phases + uint64_t(index) * layout.phase_stride)) {
    rank.phase = phase.at<uint32_t>(0);
  }
  rank.call = read_call(file, layout, begin, rank.newest);
  rank.waits_call = read_call(file, layout, begin, rank.waits_in);
  return rank;
}

std::string read_failure(int file, const Layout& layout) {
  std::string text(layout.failure_room, '\0');
  if (::pread(file, text.data(), text.size(), off_t(layout.failure)) < 0) return "it cannot be read";
  text.resize(::strnlen(text.data(), text.size()));
  return printable(text.substr(0, text.find('\n')));
}

// Empty where it is memory of `owner` that nobody can cut.
std::string problem_of(int file, uid_t owner, uint64_t& bytes, uint64_t& number) {
  struct stat status {};
  struct statfs system {};
  if (::fstat(file, &status) != 0 || ::fstatfs(file, &system) != 0) return std::strerror(errno);
  bytes = uint64_t(status.st_size);
  number = uint64_t(status.st_ino);
  const bool is_memory = S_ISREG(status.st_mode) && status.st_nlink == 0 && system.f_type == TMPFS_MAGIC;
  if (!is_memory) return "it is no memory";
  if (status.st_uid != owner) return "it belongs to user " + std::to_string(status.st_uid);
  return "";
}

std::string layout_problem(const Bytes<sizeof(Header)>& header) {
  if (header.at<uint64_t>(offsetof(Header, magic)) != Header::kMagic) {
    return "another version of serried made it, or it is not yet made";
  }
  const uint32_t version = header.at<uint32_t>(offsetof(Header, version));
  if (version == Header::kVersion) return "";
  return "its layout has version " + std::to_string(version) + ", and this serried reads version " +
         std::to_string(Header::kVersion);
}

}  // namespace

Page read_page(int file, uid_t owner) {
  Page page;
  uint64_t bytes = 0;
  page.problem = problem_of(file, owner, bytes, page.file);
  if (!page.problem.empty()) return page;
  Bytes<sizeof(Header)> header;
  page.problem = header.read(file, 0) ? layout_problem(header) : "it is too short";
  if (!page.problem.empty()) return page;
  const Layout layout = layout_of(header, bytes);
  if (!layout.makes_sense()) {
    page.problem = "its layout makes no sense";
    return page;
  }
  page.group = header.text(offsetof(Header, group), sizeof(Header::group));
  page.is_shared = header.at<uint32_t>(offsetof(Header, is_shared)) != 0;
  page.has_phases = layout.phase_stride != 0;
  if (layout.has_failed) page.failure = read_failure(file, layout);
  for (int index = 0; index < layout.world_size; ++index) page.ranks.push_back(read_rank(file, layout, index));
  return page;
}

Page read_page(const Proc& proc, pid_t pid, int fd) {
  Page page;
  // A handle opens nothing: what else a process may have under that number could wait, or do something.
  const Fd handle(::open(proc.file_path(pid, fd).c_str(), O_PATH | O_CLOEXEC));
  const std::optional<uid_t> owner = proc.owner(pid);
  uint64_t bytes = 0;
  if (!handle || !owner) {
    page.problem = std::strerror(errno);
    return page;
  }
  page.problem = problem_of(handle.get(), *owner, bytes, page.file);
  if (!page.problem.empty()) return page;
  const Fd file(::open(("/proc/self/fd/" + std::to_string(handle.get())).c_str(), O_RDONLY | O_CLOEXEC));
  if (file) return read_page(file.get(), *owner);
  page.problem = std::strerror(errno);
  return page;
}

}  // namespace serried::top
