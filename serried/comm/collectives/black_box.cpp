// Writing into the black box. All of it is relaxed stores of words but for the two that say what the others mean:
// readers are other processes, which look again where a word changed meanwhile.
#include "serried/comm/collectives/black_box.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <mutex>
#include <string_view>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/fork.h"

namespace serried::black_box {

namespace detail {
std::atomic<bool> recording{true};
}

namespace {

static_assert(sizeof(watch::Record) == sizeof(watch_page::Call));
using Words = std::array<uint64_t, kCallWords>;

// The launcher's seals, or ours: nobody can cut the file under a mapping.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 1'000'000'000u + uint64_t(now.tv_nsec);
}

// Touched here and now: later, calls would wait for the pages.
File* map(int fd) {
  void* memory = ::mmap(nullptr, sizeof(File), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<File*>(memory);
}

bool is_box(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || status.st_size != off_t(sizeof(File)) || status.st_uid != ::geteuid()) return false;
  if (::fcntl(fd, F_GET_SEALS) != kSeals) return false;
  std::array<char, 64> link{};
  const ssize_t length = ::readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), link.data(), link.size());
  return length > 0 && std::string_view(link.data(), size_t(length)).starts_with(std::string("/memfd:") + kFileName);
}

// One process writes. A script may run several programs as one rank, one after the other: the next takes over.
bool take_over(File& file) {
  if (file.header.magic != Header::kMagic || file.header.version != Header::kVersion) return false;
  int32_t owner = 0;
  const int32_t me = ::getpid();
  while (!file.header.pid.compare_exchange_weak(owner, me)) {
    if (owner != 0 && (::kill(owner, 0) == 0 || errno != ESRCH)) return false;
  }
  for (GroupPage& group : file.groups) group.closed = 1;
  return true;
}

// The launcher's; null where there is none, or it is another process's by now.
File* inherit() {
  const auto fd = env::maybe_integer(kVariable);
  ::unsetenv(kVariable);  // the number means something else to programs that this one starts
  if (!fd || *fd < 0 || *fd > INT32_MAX || !is_box(int(*fd))) return nullptr;
  ::fcntl(int(*fd), F_SETFD, FD_CLOEXEC);
  File* file = map(int(*fd));
  if (file == nullptr || take_over(*file)) return file;
  ::munmap(file, sizeof(File));
  return nullptr;
}

// Its descriptor stays open: readers find it in /proc.
File* make() {
  const int fd = ::memfd_create(kFileName, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return nullptr;
  const bool is_sealed = ::ftruncate(fd, sizeof(File)) == 0 && ::fcntl(fd, F_ADD_SEALS, kSeals) == 0;
  File* file = is_sealed ? map(fd) : nullptr;
  if (file == nullptr) {
    ::close(fd);
    return nullptr;
  }
  file->header.version = Header::kVersion;
  file->header.rank = rank_label().rank;
  set_text(file->header.run_id, env::text("TORCHELASTIC_RUN_ID"));
  file->header.pid = ::getpid();
  file->header.magic = Header::kMagic;
  return file;
}

struct Box {
  std::mutex mutex;  // guards the slots
  const HomeProcess home;
  File* const file;
};

// A forked child writes into a box of its own. Never destroyed: calls may end in static destructors.
Box& box() {
  static std::mutex making;
  static Box* made = nullptr;
  const std::lock_guard<std::mutex> lock(making);
  if (made == nullptr) {
    File* inherited = inherit();
    made = new Box{.mutex = {}, .home = {}, .file = inherited != nullptr ? inherited : make()};
  } else if (!made->home.is_here()) {
    made = new Box{.mutex = {}, .home = {}, .file = make()};
  }
  return *made;
}

// Of closed groups the oldest goes first: what the box knows of the others is of more use.
GroupPage* find_slot(File& file) {
  const uint32_t num_used = file.header.num_slots.load(std::memory_order_relaxed);
  if (num_used < kNumGroups) {
    file.header.num_slots.store(num_used + 1, std::memory_order_release);
    return &file.groups[num_used];
  }
  GroupPage* oldest = nullptr;
  for (GroupPage& group : file.groups) {
    const bool is_older = oldest == nullptr || group.id.load() < oldest->id.load();
    if (group.closed.load() != 0 && is_older) oldest = &group;
  }
  return oldest;
}

void clear(GroupPage& page) {
  page.id.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (Word* word : {&page.num_issued, &page.num_ended, &page.ended_sequence, &page.peer_wait_ns, &page.newest,
                     &page.newest_issued_ns, &page.newest_begun_ns}) {
    word->store(0, std::memory_order_relaxed);
  }
  for (Word& word : page.newest_call) word.store(0, std::memory_order_relaxed);
  page.closed = 0;
  page.num_peer_waits = 0;
}

void store(Word (&to)[kCallWords], const Words& words) {
  for (int i = 0; i < kCallWords; ++i) to[i].store(words[size_t(i)], std::memory_order_relaxed);
}

bool is_peer_kind(watch::Kind kind) {
  return kind == watch::Kind::send || kind == watch::Kind::recv;
}

}  // namespace

void set_enabled(bool enabled) {
  detail::recording = enabled;
}

File* file() {
  return box().file;
}

void GroupLog::open(const std::string& name, int rank, int world_size) {
  const std::string_view short_name = std::string_view(name).substr(0, name.find('@'));  // behind it: which thread
  if (page_ != nullptr && short_name == page_->name) return;
  close();
  Box& mine = box();
  if (mine.file == nullptr) return;
  const std::lock_guard<std::mutex> lock(mine.mutex);
  file_ = mine.file;
  page_ = find_slot(*mine.file);
  if (page_ == nullptr) return;
  clear(*page_);
  page_->rank = rank;
  page_->world_size = world_size;
  page_->job_rank = rank_label().rank < 0 ? rank : rank_label().rank;
  set_text(page_->name, short_name);
  page_->ended_ns.store(now_ns(), std::memory_order_relaxed);
  id_ = mine.file->header.num_groups.fetch_add(1) + 1;
  page_->id.store(id_, std::memory_order_release);
}

void GroupLog::close() {
  if (page_ != nullptr) page_->closed = 1;
  page_ = nullptr;
  file_ = nullptr;
}

CallLog GroupLog::issue(const watch::Record& record) const {
  if (!enabled() || file_ == nullptr) return {};
  if (page_ == nullptr) {
    file_->header.num_lost.fetch_add(1, std::memory_order_relaxed);
    return {};
  }
  const uint64_t number = file_->header.num_calls.fetch_add(1, std::memory_order_relaxed);
  CallLog log;
  log.entry_ = &file_->entries[number % kNumEntries];
  log.group_ = page_;
  log.head_ = head_of(id_, number);
  log.issued_ns_ = now_ns();
  log.is_peer_call_ = is_peer_kind(record.kind);
  Entry& entry = *log.entry_;
  entry.head.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  entry.issued_ns.store(log.issued_ns_, std::memory_order_relaxed);
  entry.begun_ns.store(0, std::memory_order_relaxed);
  entry.ended_ns.store(0, std::memory_order_relaxed);
  store(entry.call, std::bit_cast<Words>(record));
  entry.call[0].store(0, std::memory_order_relaxed);
  entry.head.store(log.head_, std::memory_order_release);
  if (!log.is_peer_call_) page_->num_issued.fetch_add(1, std::memory_order_relaxed);
  return log;
}

bool CallLog::is_mine() const {
  return entry_->head.load(std::memory_order_relaxed) == head_;
}

bool CallLog::group_is_mine() const {
  return uint32_t(group_->id.load(std::memory_order_relaxed)) == head_ >> 32;
}

void CallLog::write_begin(uint64_t sequence, bool at_once) const {
  if (!is_mine() || !group_is_mine()) return;
  const uint64_t now = at_once ? issued_ns_ : now_ns();
  entry_->begun_ns.store(now, std::memory_order_relaxed);
  entry_->call[0].store(sequence, std::memory_order_relaxed);
  group_->newest.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  group_->newest_issued_ns.store(issued_ns_, std::memory_order_relaxed);
  group_->newest_begun_ns.store(now, std::memory_order_relaxed);
  for (int i = 0; i < kCallWords; ++i) {
    group_->newest_call[i].store(entry_->call[i].load(std::memory_order_relaxed), std::memory_order_relaxed);
  }
  group_->newest.store(sequence, std::memory_order_release);
}

void CallLog::write_end(bool failed) const {
  if (!group_is_mine()) return;
  const uint64_t now = now_ns();
  if (is_mine()) {
    if (entry_->ended_ns.load(std::memory_order_relaxed) != 0) return;
    entry_->ended_ns.store(now | (failed ? kFailedBit : 0), std::memory_order_relaxed);
    const uint64_t sequence = entry_->call[0].load(std::memory_order_relaxed);
    if (sequence > group_->ended_sequence.load(std::memory_order_relaxed)) {
      group_->ended_sequence.store(sequence, std::memory_order_relaxed);
    }
  }
  if (is_peer_call_) return;
  group_->ended_ns.store(now, std::memory_order_relaxed);
  group_->num_ended.fetch_add(1, std::memory_order_release);
}

void CallLog::write_wait(bool waits) const {
  if (!group_is_mine()) return;
  if (!waits) {
    group_->num_peer_waits.fetch_sub(1, std::memory_order_relaxed);
    return;
  }
  const uint64_t now = now_ns();
  uint64_t never = 0;
  if (is_mine()) entry_->begun_ns.compare_exchange_strong(never, now, std::memory_order_relaxed);
  group_->peer_wait_ns.store(now, std::memory_order_relaxed);
  group_->num_peer_waits.fetch_add(1, std::memory_order_release);
}

}  // namespace serried::black_box
