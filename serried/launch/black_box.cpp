// Reading while the rank writes: an entry counts if its first word is the same before and after.
#include "serried/launch/black_box.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

#include "serried/base/call_text.h"

namespace serried::launch {
namespace {

using black_box::Entry;
using black_box::File;
using black_box::GroupPage;
using black_box::Header;
using black_box::Word;
using watch_page::Call;

// Nobody can cut the file under the mapping, which would end the launcher.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr int kMostRanks = 1 << 20;
constexpr size_t kMostOpen = 4;

uint64_t load(const Word& word) {
  return word.load(std::memory_order_relaxed);
}

// A time that a rank wrote: any number may stand there.
int64_t time_of(uint64_t word) {
  return int64_t(std::min<uint64_t>(word, INT64_MAX));
}

template <size_t room>
std::string text_of(const char (&text)[room]) {
  return detail::printable({text, ::strnlen(text, room)});
}

Call call_of(const Word (&words)[black_box::kCallWords]) {
  std::array<uint64_t, black_box::kCallWords> copy{};
  for (size_t i = 0; i < copy.size(); ++i) copy[i] = load(words[i]);
  return std::bit_cast<Call>(copy);
}

CallSeen describe(const Call& call) {
  CallSeen seen{.sequence = call.sequence,
                .text = detail::printable(watch_page::call_text(call)),
                .agreed = detail::printable(watch_page::agreed_text(call)),
                .part_of = watch_page::part_of_text(call)};
  if (seen.agreed == seen.text) seen.agreed.clear();
  return seen;
}

/// An entry as it was at one moment.
struct Raw {
  uint64_t head = 0;
  uint64_t issued_ns = 0, begun_ns = 0, ended_ns = 0;
  Call call;

  uint64_t group() const { return head >> 32; }
  bool is_peer_call() const {
    const auto kind = CallKind(call.kind);
    return kind == CallKind::send || kind == CallKind::recv;
  }
};

std::optional<Raw> read_entry(const Entry& entry) {
  Raw raw{.head = entry.head.load(std::memory_order_acquire), .call = {}};
  raw.issued_ns = load(entry.issued_ns);
  raw.begun_ns = load(entry.begun_ns);
  raw.ended_ns = load(entry.ended_ns);
  raw.call = call_of(entry.call);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (raw.head == 0 || load(entry.head) != raw.head) return std::nullopt;
  return raw;
}

CallSeen describe(const Raw& raw) {
  CallSeen seen = describe(raw.call);
  seen.group = raw.group();
  seen.issued_ns = time_of(raw.issued_ns);
  seen.begun_ns = time_of(raw.begun_ns);
  seen.ended_ns = time_of(raw.ended_ns & ~black_box::kFailedBit);
  seen.failed = (raw.ended_ns & black_box::kFailedBit) != 0;
  return seen;
}

CallSeen read_newest(const GroupPage& page) {
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t sequence = page.newest.load(std::memory_order_acquire);
    const Call call = call_of(page.newest_call);
    const uint64_t issued = load(page.newest_issued_ns);
    const uint64_t begun = load(page.newest_begun_ns);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (sequence == 0 && load(page.num_issued) == 0) return {};
    if (sequence == 0 || load(page.newest) != sequence || call.sequence != sequence) continue;
    CallSeen seen = describe(call);
    seen.group = load(page.id);
    seen.issued_ns = time_of(issued);
    seen.begun_ns = time_of(begun);
    return seen;
  }
  return {};
}

bool is_late(uint64_t since_ns, int64_t now_ns, int64_t longer_than_ns) {
  return since_ns != 0 && time_of(since_ns) <= now_ns && now_ns - time_of(since_ns) >= longer_than_ns;
}

bool may_wait_in(const GroupPage& page, int64_t now_ns, int64_t longer_than_ns) {
  if (load(page.id) == 0 || page.closed.load() != 0) return false;
  const bool in_collective = load(page.num_issued) > load(page.num_ended);
  if (in_collective && is_late(load(page.ended_ns), now_ns, longer_than_ns)) return true;
  return page.num_peer_waits.load() != 0 && is_late(load(page.peer_wait_ns), now_ns, longer_than_ns);
}

uint32_t num_slots(const File& file) {
  return std::min(file.header.num_slots.load(std::memory_order_acquire), black_box::kNumGroups);
}

GroupSeen read_group(const GroupPage& page, uint64_t id) {
  return {.id = uint32_t(id),
          .name = text_of(page.name),
          .rank = page.rank,
          .world_size = page.world_size,
          .job_rank = page.job_rank,
          .closed = page.closed.load() != 0,
          .num_issued = load(page.num_issued),
          .num_ended = load(page.num_ended),
          .ended_sequence = load(page.ended_sequence),
          .ended_ns = time_of(load(page.ended_ns)),
          .newest = read_newest(page)};
}

bool makes_sense(const GroupSeen& group) {
  return group.world_size > 0 && group.world_size < kMostRanks && group.rank >= 0 && group.rank < group.world_size &&
         group.job_rank >= -1 && group.job_rank < kMostRanks;
}

// Of a group: the first collective that lasts, and the sends and receives that somebody waits for.
void add_open(GroupSeen& group, const std::vector<Raw>& late) {
  const Raw* first = nullptr;
  for (const Raw& raw : late) {
    if (raw.group() != group.id) continue;
    if (raw.is_peer_call()) {
      if (group.open.size() < kMostOpen) group.open.push_back(describe(raw));
    } else if (first == nullptr || raw.call.sequence < first->call.sequence) {
      first = &raw;
    }
  }
  if (first != nullptr) group.open.insert(group.open.begin(), describe(*first));
}

std::vector<Raw> late_calls(const File& file, int64_t now_ns, int64_t longer_than_ns) {
  std::vector<Raw> late;
  for (const Entry& entry : file.entries) {
    if (load(entry.ended_ns) != 0 || !is_late(load(entry.begun_ns), now_ns, longer_than_ns)) continue;
    const std::optional<Raw> raw = read_entry(entry);
    if (raw && raw->ended_ns == 0) late.push_back(*raw);
  }
  return late;
}

std::string problem_of(int file, uid_t owner) {
  struct stat status {};
  struct statfs system {};
  if (::fstat(file, &status) != 0 || ::fstatfs(file, &system) != 0) return std::strerror(errno);
  const bool is_memory = S_ISREG(status.st_mode) && status.st_nlink == 0 && system.f_type == TMPFS_MAGIC;
  if (!is_memory) return "it is no memory";
  if (status.st_uid != owner) return "it belongs to user " + std::to_string(status.st_uid);
  if (status.st_size != off_t(sizeof(File))) return "it has " + std::to_string(status.st_size) + " bytes";
  return "";
}

}  // namespace

void BlackBox::map() {
  void* memory = ::mmap(nullptr, sizeof(File), PROT_READ, MAP_SHARED, fd_.get(), 0);
  if (memory == MAP_FAILED) {
    problem_ = std::strerror(errno);
    return;
  }
  file_ = {static_cast<const File*>(memory),
           [](const File* mapped) { ::munmap(const_cast<File*>(mapped), sizeof *mapped); }};
}

BlackBox BlackBox::make(int rank, const std::string& job) {
  BlackBox box;
  box.fd_.reset(::memfd_create(black_box::kFileName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const bool is_sealed =
      box.fd_ && ::ftruncate(box.fd(), sizeof(File)) == 0 && ::fcntl(box.fd(), F_ADD_SEALS, kSeals) == 0;
  struct Head {
    uint64_t magic = Header::kMagic;
    uint32_t version = Header::kVersion;
    int32_t rank = -1;
    char job[sizeof(Header::run_id)] = {};
  } head{.rank = rank};
  static_assert(offsetof(Header, run_id) == offsetof(Head, job) && offsetof(Header, rank) == offsetof(Head, rank));
  black_box::set_text(head.job, job);
  if (is_sealed && ::pwrite(box.fd(), &head, sizeof head, 0) == ssize_t(sizeof head)) {
    box.map();
  } else {
    box.problem_ = std::strerror(errno);
  }
  if (box.file_ == nullptr) box.fd_.reset();
  return box;
}

BlackBox BlackBox::open(const std::string& path, uid_t owner) {
  BlackBox box;
  // A handle opens nothing: what else a process may have under that number could wait, or do something.
  const Fd handle(::open(path.c_str(), O_PATH | O_CLOEXEC));
  box.problem_ = handle ? problem_of(handle.get(), owner) : std::strerror(errno);
  if (!box.problem_.empty()) return box;
  box.fd_.reset(::open(("/proc/self/fd/" + std::to_string(handle.get())).c_str(), O_RDONLY | O_CLOEXEC));
  if (!box.fd_) {
    box.problem_ = std::strerror(errno);
  } else if (::fcntl(box.fd(), F_GET_SEALS) != kSeals) {
    box.problem_ = "its size can still be changed";
  } else {
    box.map();
  }
  if (box.file_ == nullptr) return box;
  const Header& header = box.file_->header;
  if (header.magic == Header::kMagic && header.version == Header::kVersion) return box;
  box.problem_ = "another version of serried made it";
  box.file_.reset();
  return box;
}

int BlackBox::rank() const {
  return file_ == nullptr ? -1 : file_->header.rank;
}

std::string BlackBox::job() const {
  return file_ == nullptr ? "" : text_of(file_->header.run_id);
}

pid_t BlackBox::pid() const {
  return file_ == nullptr ? 0 : std::max(0, file_->header.pid.load());
}

void BlackBox::tell_clock(const ClockEstimate& clock) {
  if (file_ == nullptr) return;
  struct Words {
    uint64_t known = 1;
    int64_t offset_ns = 0;
    int64_t error_ns = 0;
  } words{.offset_ns = clock.offset_ns, .error_ns = clock.error_ns};
  static_assert(offsetof(Header, clock_error_ns) - offsetof(Header, clock_known) == offsetof(Words, error_ns));
  // Through the file: the launcher's own mapping is for reading.
  [[maybe_unused]] const ssize_t written = ::pwrite(fd(), &words, sizeof words, offsetof(Header, clock_known));
}

std::optional<ClockEstimate> BlackBox::clock() const {
  if (file_ == nullptr || load(file_->header.clock_known) == 0) return std::nullopt;
  return ClockEstimate{int64_t(load(file_->header.clock_offset_ns)), time_of(load(file_->header.clock_error_ns))};
}

bool BlackBox::may_wait(int64_t now_ns, int64_t longer_than_ns) const {
  if (file_ == nullptr) return false;
  const uint32_t used = num_slots(*file_);
  return std::any_of(file_->groups, file_->groups + used,
                     [&](const GroupPage& page) { return may_wait_in(page, now_ns, longer_than_ns); });
}

std::vector<GroupSeen> BlackBox::groups(int64_t now_ns, int64_t longest_wait_ns) const {
  std::vector<GroupSeen> result;
  if (file_ == nullptr) return result;
  const bool looks_for_open = may_wait(now_ns, longest_wait_ns);
  const std::vector<Raw> late = looks_for_open ? late_calls(*file_, now_ns, longest_wait_ns) : std::vector<Raw>();
  const uint32_t used = num_slots(*file_);
  for (uint32_t i = 0; i < used; ++i) {
    const GroupPage& page = file_->groups[i];
    const uint64_t id = page.id.load(std::memory_order_acquire);
    GroupSeen group = read_group(page, id);
    if (id == 0 || load(page.id) != id || !makes_sense(group)) continue;
    if (!group.closed) add_open(group, late);
    result.push_back(std::move(group));
  }
  return result;
}

std::vector<CallSeen> BlackBox::calls() const {
  std::vector<CallSeen> result;
  const uint64_t made = num_calls();
  const uint64_t kept = std::min<uint64_t>(made, black_box::kNumEntries);
  for (uint64_t number = made - kept; number < made; ++number) {
    const std::optional<Raw> raw = read_entry(file_->entries[number % black_box::kNumEntries]);
    if (raw && uint32_t(raw->head) == uint32_t(number + 1)) result.push_back(describe(*raw));
  }
  return result;
}

uint64_t BlackBox::num_calls() const {
  return file_ == nullptr ? 0 : file_->header.num_calls.load(std::memory_order_acquire);
}

int64_t monotonic_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

char process_state(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat", std::ios::binary);
  const std::string line{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = line.rfind(')');  // the name may hold anything
  return name_end == std::string::npos || name_end + 2 >= line.size() ? 'Z' : line[name_end + 2];
}

}  // namespace serried::launch
