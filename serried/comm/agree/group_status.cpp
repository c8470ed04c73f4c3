// Rings of records, the sticky failure, and how ranks come to share them.
#include "serried/comm/agree/group_status.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/agree/host.h"

namespace serried::detail {
namespace {

using namespace std::chrono_literals;
using watch::Record;

constexpr int kRing = 64;
constexpr int64_t kSharedRoom = 4096;  // for what all ranks share
constexpr int kWords = sizeof(Record) / sizeof(uint64_t);
static_assert(sizeof(Record) == kWords * sizeof(uint64_t) && offsetof(Record, sequence) == 0);

using Words = std::array<uint64_t, kWords>;

constexpr const char* kNoMemory = "private";  // what rank 0 says where it could not make any

void copy_text(char* to, size_t room, const std::string& text) {
  const size_t length = std::min(text.size(), room - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// A peer may have written over the end.
std::string bounded_text(const char* text, size_t room) {
  return {text, strnlen(text, room)};
}

// Each rank by itself, where a message is about what each of them does.
std::string name_ranks(const std::vector<int>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

}  // namespace

// One record behind a sequence lock: word 0 of the record is its sequence, 0 while it is rewritten.
struct GroupStatus::Slot {
  alignas(64) std::array<std::atomic<uint64_t>, kWords> words;
  std::atomic<uint64_t> print;
};

struct GroupStatus::RankStatus {
  alignas(64) watch_page::RankPage page;
  std::array<Slot, kRing> ring;

  bool has_left() const { return page.left.load() != 0; }
  bool has_ended() const { return page.pid != 0 && !has_left() && process_has_ended(page.pid); }
};

struct GroupStatus::Shared {
  enum State : uint32_t { sound, failing, failed };
  watch_page::Header page;
  std::atomic<uint32_t> state;
  char what[1536];
  char fix[512];
};

GroupStatus::GroupStatus(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                         std::chrono::milliseconds timeout)
    : ranks_{std::move(store), rank, world_size, timeout}, rank_(rank), world_size_(world_size) {
  meet();
  page().rank = rank_label().rank < 0 ? rank_ : rank_label().rank;
  page().pid = getpid();
}

watch_page::RankPage& GroupStatus::page() const {
  return status_of(rank_).page;
}

void GroupStatus::set_name(const std::string& group) {
  if (rank_ == 0 || !is_shared_) shared_->page.set_group(group.substr(0, group.find('@')));
}

void GroupStatus::say_left() {
  page().left = 1;
}

GroupStatus::~GroupStatus() {
  say_left();
}

void GroupStatus::meet() {
  const std::vector<std::string> hosts = exchange(ranks_, "new_group", "host", host_identity());
  one_host_ = std::all_of(hosts.begin(), hosts.end(), [&](const std::string& host) { return host == hosts[0]; });
  if (one_host_) memory_ = rank_ == 0 ? make_memory() : open_memory(listen_to(ranks_, "new_group", "page", 0));
  is_shared_ = memory_.has_file();
  if (!is_shared_) memory_ = SharedMemory::make(watch_page::kPageName, bytes());  // for those who look from outside
  if (!memory_.has_file()) memory_ = SharedMemory::make_private(bytes());
  if (memory_.data() == nullptr) {
    raise<c10::DistBackendError>({"new_group", c10::str("cannot map ", bytes(), " bytes: ", memory_.problem()),
                                  "raise the limit on address space (ulimit -v)"});
  }
  shared_ = reinterpret_cast<Shared*>(memory_.data());  // zeros are the start of every field
  if (rank_ == 0 || !is_shared_) describe_layout();
}

void GroupStatus::describe_layout() {
  static_assert(offsetof(Shared, page) == 0 && offsetof(RankStatus, page) == 0 && offsetof(Slot, words) == 0);
  watch_page::Header& page = shared_->page;
  page.version = watch_page::Header::kVersion;
  page.is_shared = is_shared_ ? 1 : 0;
  page.world_size = world_size_;
  page.rank_stride = sizeof(RankStatus);
  page.ranks = kSharedRoom;
  page.calls = offsetof(RankStatus, ring);
  page.call_stride = sizeof(Slot);
  page.num_calls = kRing;
  page.failure = offsetof(Shared, what);
  page.failure_room = sizeof(Shared::what);
  page.magic = watch_page::Header::kMagic;
}

SharedMemory GroupStatus::make_memory() {
  SharedMemory made = SharedMemory::make(watch_page::kPageName, bytes());
  tell(ranks_, "page", made.has_file() ? made.place().text() : kNoMemory);
  return made;
}

// Without a file where rank 0 has none, or this rank cannot reach it: then each rank is on its own.
SharedMemory GroupStatus::open_memory(const std::string& text) {
  if (text == kNoMemory) return {};
  const std::optional<SharedFilePlace> place = SharedFilePlace::parse(text);
  SharedMemory opened = place ? SharedMemory::open(*place, bytes()) : SharedMemory();
  if (!place || opened.is_foreign()) {
    raise<c10::DistBackendError>({"new_group",
                                  c10::str("the watch page of rank 0 cannot be used: ",
                                           place ? opened.problem() : c10::str("\"", text, "\" is no place")),
                                  "find out who writes to the store of this job: rank 0 did not make this"});
  }
  if (!opened.has_file()) log::line(log::Topic::comm, "no shared watch page: ", opened.problem());
  return opened;
}

int64_t GroupStatus::bytes() const {
  static_assert(sizeof(Shared) <= kSharedRoom);
  return kSharedRoom + int64_t(world_size_) * int64_t(sizeof(RankStatus));
}

GroupStatus::RankStatus& GroupStatus::status_of(int rank) const {
  return reinterpret_cast<RankStatus*>(reinterpret_cast<char*>(shared_) + kSharedRoom)[rank];
}

bool GroupStatus::enter(const Record& record, uint64_t print) {
  RankStatus& mine = status_of(rank_);
  Slot& slot = mine.ring[record.sequence % kRing];
  const auto words = std::bit_cast<Words>(record);
  slot.words[0].store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (int i = 1; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
  slot.print.store(print, std::memory_order_relaxed);
  slot.words[0].store(record.sequence, std::memory_order_release);
  // Sequentially consistent: of two ranks that enter at once, at least one sees the other.
  mine.page.newest.store(record.sequence, std::memory_order_seq_cst);
  if (!is_shared_) return true;
  for (int other = 0; other < world_size_; ++other) {
    if (other != rank_ && !agrees(record, print, other)) return false;
  }
  return true;
}

bool GroupStatus::agrees(const Record& record, uint64_t print, int other) {
  if (status_of(other).page.newest.load(std::memory_order_seq_cst) < record.sequence) return true;
  const Slot& slot = status_of(other).ring[record.sequence % kRing];
  const bool same_call = slot.words[0].load(std::memory_order_acquire) == record.sequence;
  if (!same_call || slot.print.load(std::memory_order_relaxed) == print) return true;
  Record theirs;
  uint64_t their_print = 0;
  if (!read_slot(other, record.sequence, theirs, their_print) || their_print == print) return true;
  if (watch::differ_in_knowledge(record, theirs)) return true;
  Record before;
  uint64_t print_before = 0;
  if (!read_slot(rank_, record.sequence - 1, before, print_before)) before = {};
  fail({watch::mismatch_text(rank_, record, other, theirs, before), watch::mismatch_fix(record, theirs)});
  return false;
}

void GroupStatus::leave(uint64_t sequence) {
  page().newest.store(sequence - 1, std::memory_order_seq_cst);
}

bool GroupStatus::read_slot(int rank, uint64_t sequence, Record& record, uint64_t& print) const {
  const Slot& slot = status_of(rank).ring[sequence % kRing];
  Words words;
  words[0] = slot.words[0].load(std::memory_order_acquire);
  for (int i = 1; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
  print = slot.print.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (words[0] != sequence || slot.words[0].load(std::memory_order_relaxed) != sequence) return false;
  record = std::bit_cast<Record>(words);
  return true;
}

Record GroupStatus::newest(int rank) const {
  Record record;
  uint64_t print = 0;
  // A rank that runs on rewrites its slots only after 64 more calls: a few tries always meet a quiet one.
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t sequence = status_of(rank).page.newest.load(std::memory_order_acquire);
    if (sequence == 0 || read_slot(rank, sequence, record, print)) return record;
  }
  return record;
}

void GroupStatus::fail(const Failure& failure) {
  uint32_t sound = Shared::sound;
  if (!shared_->state.compare_exchange_strong(sound, Shared::failing)) return;
  copy_text(shared_->what, sizeof(shared_->what), failure.what);
  copy_text(shared_->fix, sizeof(shared_->fix), failure.fix);
  shared_->state.store(Shared::failed, std::memory_order_release);
  shared_->page.failed.store(1, std::memory_order_release);
}

bool GroupStatus::failed() const {
  return shared_->state.load(std::memory_order_acquire) != Shared::sound;
}

Failure GroupStatus::failure() const {
  // The writer needs microseconds, unless it was killed in between.
  const auto deadline = std::chrono::steady_clock::now() + 100ms;
  while (shared_->state.load(std::memory_order_acquire) == Shared::failing) {
    if (std::chrono::steady_clock::now() > deadline) return {"a rank ended while it reported a failure", ""};
    std::this_thread::yield();
  }
  return {bounded_text(shared_->what, sizeof(shared_->what)), bounded_text(shared_->fix, sizeof(shared_->fix))};
}

bool GroupStatus::is_alone() const {
  for (int r = 0; r < world_size_; ++r) {
    const RankStatus& status = status_of(r);
    if (r != rank_ && !status.has_left() && !status.has_ended()) return false;
  }
  return world_size_ > 1;
}

std::string GroupStatus::gone_text() const {
  std::vector<int> left;
  std::vector<int> ended;
  for (int r = 0; r < world_size_; ++r) {
    if (status_of(r).has_left()) left.push_back(r);
    if (status_of(r).has_ended()) ended.push_back(r);
  }
  std::string text;
  if (!left.empty()) text += c10::str("; ", name_ranks(left), left.size() == 1 ? " has" : " have", " left the group");
  if (!ended.empty()) text += c10::str("; the process of ", name_ranks(ended), " has ended");
  return text;
}

std::string GroupStatus::missing_text(const Record& waiting, int64_t waited_ms) {
  if (!is_shared_) return reported_text(waiting, waited_ms);
  std::vector<Record> last;
  for (int r = 0; r < world_size_; ++r) last.push_back(newest(r));
  std::vector<int> pids;
  for (int r = 0; r < world_size_; ++r) pids.push_back(status_of(r).page.pid);
  return watch::missing_text(waiting, waited_ms, last) + gone_text() + stopped_text(pids);
}

std::vector<Record> GroupStatus::read_reports(const Record& waiting, std::vector<int>& silent) {
  const auto words = std::bit_cast<std::array<uint8_t, sizeof(Record)>>(waiting);
  ranks_.store->set(c10::str("at/", rank_), std::vector<uint8_t>(words.begin(), words.end()));
  std::vector<Record> reports(world_size_);
  // Ranks that wait for the same thing report within moments of each other; the rest never do.
  const auto deadline = std::chrono::steady_clock::now() + 1s;
  for (int r = 0; r < world_size_; ++r) {
    const std::string key = c10::str("at/", r);
    while (!ranks_.store->check({key}) && std::chrono::steady_clock::now() < deadline)
      std::this_thread::sleep_for(20ms);
    const auto bytes = ranks_.store->check({key}) ? ranks_.store->get(key) : std::vector<uint8_t>();
    if (bytes.size() == sizeof(Record)) {
      std::memcpy(&reports[r], bytes.data(), sizeof(Record));
    } else {
      silent.push_back(r);
    }
  }
  return reports;
}

std::string GroupStatus::reported_text(const Record& waiting, int64_t waited_ms) {
  std::vector<Record> reports;
  std::vector<int> silent;
  try {
    reports = read_reports(waiting, silent);
  } catch (const c10::DistStoreError& error) {  // a stranger's report: say so
    return c10::str(watch::missing_text(waiting, waited_ms, {}), "; ", error.msg().substr(0, error.msg().find('\n')));
  } catch (const std::exception&) {
    return watch::missing_text(waiting, waited_ms, {});  // the store is gone as well
  }
  for (int r = 0; r < world_size_; ++r) {
    const bool same_call = reports[r].sequence == waiting.sequence && waiting.sequence != 0;
    const bool agrees = watch::fingerprint(reports[r]) == watch::fingerprint(waiting) ||
                        watch::differ_in_knowledge(reports[r], waiting);
    if (same_call && !agrees) {
      return watch::mismatch_text(rank_, waiting, r, reports[r]);
    }
  }
  if (silent.empty()) return watch::missing_text(waiting, waited_ms, reports);
  std::string text =
      c10::str("timed out after ", waited_ms, " ms in ", watch::describe_place(waiting), ": ", name_ranks(silent),
               " did not report and ", silent.size() == 1 ? "is" : "are", " likely not in a call of this group");
  for (int r = 0; r < world_size_; ++r) {
    if (reports[r].kind != watch::Kind::none) text += c10::str(", rank ", r, " is at ", watch::describe(reports[r]));
  }
  return text;
}

}  // namespace serried::detail
