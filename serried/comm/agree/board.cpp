// The shared page: rings of records, the sticky failure, and how ranks agree to share it.
#include "serried/comm/agree/board.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/agree/exchange.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/shared_file.h"
#include "serried/comm/agree/shared_mapping.h"
#include "serried/comm/agree/stopped.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::detail {
namespace {

using namespace std::chrono_literals;
using watch::Record;

constexpr int kRing = 64;
constexpr int kWords = sizeof(Record) / sizeof(uint64_t);
static_assert(sizeof(Record) == kWords * sizeof(uint64_t) && offsetof(Record, sequence) == 0);

using Words = std::array<uint64_t, kWords>;

bool process_has_ended(int pid) {
  std::ifstream file(c10::str("/proc/", pid, "/stat"));
  std::string line;
  if (!std::getline(file, line)) return true;
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return false;
  const char state = line[name_end + 2];
  return state == 'Z' || state == 'X';
}

std::vector<uint8_t> to_bytes(std::string_view text) {
  return {text.begin(), text.end()};
}

std::string to_text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

void copy_text(char* to, size_t room, const std::string& text) {
  const size_t length = std::min(text.size(), room - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

// A peer may have written over the end.
std::string bounded_text(const char* text, size_t room) {
  return {text, strnlen(text, room)};
}

std::string name_ranks(const std::vector<int>& ranks) {
  return c10::str(ranks.size() == 1 ? "rank " : "ranks ", c10::Join(", ", ranks));
}

}  // namespace

// One record behind a sequence lock: word 0 of the record is its sequence, 0 while it is rewritten.
struct Board::Slot {
  alignas(64) std::array<std::atomic<uint64_t>, kWords> words;
  std::atomic<uint64_t> print;
};

struct Board::RankPage {
  enum State : uint32_t { absent, joined, left };
  alignas(64) std::atomic<uint64_t> newest;
  std::atomic<uint32_t> state;
  std::atomic<int32_t> pid;
  std::array<Slot, kRing> ring;
};

struct Board::Page {
  enum State : uint32_t { sound, failing, failed };
  std::atomic<uint32_t> state;
  char what[1536];
  char fix[512];
};

Board::Board(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size, std::chrono::milliseconds timeout)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {
  agree(timeout);
  page_of(rank_).pid = getpid();
  page_of(rank_).state = RankPage::joined;
}

void Board::say_left() {
  page_of(rank_).state = RankPage::left;
}

Board::~Board() {
  say_left();
  if (fd_ >= 0) close(fd_);
}

void Board::agree(std::chrono::milliseconds timeout) {
  const std::string mine = host_identity();
  store_->set(c10::str("host/", rank_), to_bytes(mine));
  std::vector<std::string> keys;
  for (int r = 0; r < world_size_; ++r) keys.push_back(c10::str("host/", r));
  if (rank_ != 0) {
    wait_for_all({"page"}, timeout);
    const std::string address = to_text(store_->get("page"));
    one_host_ = address != "none";
    if (one_host_ && attach(address)) return;
    return map(-1);
  }
  wait_for_all(keys, timeout);
  const auto same = [&](const std::string& key) { return to_text(store_->get(key)) == mine; };
  create(std::all_of(keys.begin(), keys.end(), same));
}

void Board::wait_for_all(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  if (wait_for_keys(store_, "new_group", keys, timeout)) return;
  std::vector<int> absent;
  for (int r = 0; r < world_size_; ++r) {
    if (!store_->check({c10::str("host/", r)})) absent.push_back(r);
  }
  if (absent.empty()) absent.push_back(0);  // all have come, but rank 0 has not answered
  const std::string place = place_of(store_);
  raise<c10::DistBackendError>(
      {"new_group",
       c10::str("timed out after ", timeout.count(), " ms: ", name_ranks(absent), " of ", world_size_,
                " did not come to this group", place.empty() ? "" : ", which meets at " + place),
       "make the group on every rank, in the same order, or pass a longer timeout"});
}

void Board::create(bool one_host) {
  one_host_ = one_host;
  if (one_host) fd_ = make_shared_file("serried-watch", int64_t(bytes()));
  map(fd_);
  const std::string place = fd_ < 0 ? "private" : SharedFilePlace{getpid(), fd_}.text();
  store_->set("page", to_bytes(one_host ? place : "none"));
}

bool Board::attach(const std::string& text) {
  if (text == "private") return false;
  const std::optional<SharedFilePlace> place = SharedFilePlace::parse(text);
  const SharedFile file = place ? open_shared_file(*place, int64_t(bytes()))
                                : SharedFile{.problem = c10::str("\"", text, "\" is no place"), .foreign = true};
  if (file.foreign) {
    raise<c10::DistBackendError>({"new_group", c10::str("the watch page of rank 0 cannot be used: ", file.problem),
                                  "find out who writes to the store of this job: rank 0 did not make this"});
  }
  if (file.fd < 0) {
    log::line(log::Topic::comm, "no shared watch page: ", file.problem);
    return false;
  }
  map(file.fd);
  close(file.fd);
  return true;
}

void Board::map(int fd) {
  memory_ = fd < 0 ? map_private_zeros(int64_t(bytes())) : map_shared_file(fd, int64_t(bytes()));
  if (!memory_) {
    raise<c10::DistBackendError>({"new_group", c10::str("cannot map ", bytes(), " bytes: ", std::strerror(errno)),
                                  "raise the limit on address space (ulimit -v)"});
  }
  page_ = reinterpret_cast<Page*>(memory_.get());  // zeros are the start of every field
  shared_ = fd >= 0;
}

size_t Board::bytes() const {
  static_assert(sizeof(Page) <= 4096);
  return 4096 + size_t(world_size_) * sizeof(RankPage);
}

Board::RankPage& Board::page_of(int rank) const {
  return reinterpret_cast<RankPage*>(reinterpret_cast<char*>(page_) + 4096)[rank];
}

bool Board::enter(const Record& record, uint64_t print) {
  RankPage& mine = page_of(rank_);
  Slot& slot = mine.ring[record.sequence % kRing];
  const auto words = std::bit_cast<Words>(record);
  slot.words[0].store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);
  for (int i = 1; i < kWords; ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
  slot.print.store(print, std::memory_order_relaxed);
  slot.words[0].store(record.sequence, std::memory_order_release);
  // Sequentially consistent: of two ranks that enter at once, at least one sees the other.
  mine.newest.store(record.sequence, std::memory_order_seq_cst);
  if (!shared_) return true;
  for (int other = 0; other < world_size_; ++other) {
    if (other != rank_ && !agrees(record, print, other)) return false;
  }
  return true;
}

bool Board::agrees(const Record& record, uint64_t print, int other) {
  if (page_of(other).newest.load(std::memory_order_seq_cst) < record.sequence) return true;
  const Slot& slot = page_of(other).ring[record.sequence % kRing];
  const bool same_call = slot.words[0].load(std::memory_order_acquire) == record.sequence;
  if (!same_call || slot.print.load(std::memory_order_relaxed) == print) return true;
  Record theirs;
  uint64_t their_print = 0;
  if (!read_slot(other, record.sequence, theirs, their_print) || their_print == print) return true;
  fail({watch::mismatch_text(rank_, record, other, theirs), watch::mismatch_fix(record, theirs)});
  return false;
}

void Board::leave(uint64_t sequence) {
  page_of(rank_).newest.store(sequence - 1, std::memory_order_seq_cst);
}

bool Board::read_slot(int rank, uint64_t sequence, Record& record, uint64_t& print) const {
  const Slot& slot = page_of(rank).ring[sequence % kRing];
  Words words;
  words[0] = slot.words[0].load(std::memory_order_acquire);
  for (int i = 1; i < kWords; ++i) words[i] = slot.words[i].load(std::memory_order_relaxed);
  print = slot.print.load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);
  if (words[0] != sequence || slot.words[0].load(std::memory_order_relaxed) != sequence) return false;
  record = std::bit_cast<Record>(words);
  return true;
}

Record Board::newest(int rank) const {
  Record record;
  uint64_t print = 0;
  // A rank that runs on rewrites its slots only after 64 more calls: a few tries always meet a quiet one.
  for (int attempt = 0; attempt < 100; ++attempt) {
    const uint64_t sequence = page_of(rank).newest.load(std::memory_order_acquire);
    if (sequence == 0 || read_slot(rank, sequence, record, print)) return record;
  }
  return record;
}

void Board::fail(const Failure& failure) {
  uint32_t sound = Page::sound;
  if (!page_->state.compare_exchange_strong(sound, Page::failing)) return;
  copy_text(page_->what, sizeof(page_->what), failure.what);
  copy_text(page_->fix, sizeof(page_->fix), failure.fix);
  page_->state.store(Page::failed, std::memory_order_release);
}

bool Board::failed() const {
  return page_->state.load(std::memory_order_acquire) != Page::sound;
}

Failure Board::failure() const {
  // The writer needs microseconds, unless it was killed in between.
  const auto deadline = std::chrono::steady_clock::now() + 100ms;
  while (page_->state.load(std::memory_order_acquire) == Page::failing) {
    if (std::chrono::steady_clock::now() > deadline) return {"a rank ended while it reported a failure", ""};
    std::this_thread::yield();
  }
  return {bounded_text(page_->what, sizeof(page_->what)), bounded_text(page_->fix, sizeof(page_->fix))};
}

bool Board::is_alone() const {
  for (int r = 0; r < world_size_; ++r) {
    const uint32_t state = page_of(r).state.load();
    const bool gone = state == RankPage::left || (state == RankPage::joined && process_has_ended(page_of(r).pid));
    if (r != rank_ && !gone) return false;
  }
  return world_size_ > 1;
}

std::string Board::gone_text() const {
  std::vector<int> left;
  std::vector<int> ended;
  for (int r = 0; r < world_size_; ++r) {
    const uint32_t state = page_of(r).state.load();
    if (state == RankPage::left) left.push_back(r);
    if (state == RankPage::joined && process_has_ended(page_of(r).pid)) ended.push_back(r);
  }
  std::string text;
  if (!left.empty()) text += c10::str("; ", name_ranks(left), left.size() == 1 ? " has" : " have", " left the group");
  if (!ended.empty()) text += c10::str("; the process of ", name_ranks(ended), " has ended");
  return text;
}

std::string Board::missing_text(const Record& waiting, int64_t waited_ms) {
  if (!shared_) return reported_text(waiting, waited_ms);
  std::vector<Record> last;
  for (int r = 0; r < world_size_; ++r) last.push_back(newest(r));
  std::vector<int> pids;
  for (int r = 0; r < world_size_; ++r) pids.push_back(page_of(r).pid);
  return watch::missing_text(waiting, waited_ms, last) + gone_text() + stopped_text(pids);
}

std::vector<Record> Board::read_reports(const Record& waiting, std::vector<int>& silent) {
  const auto words = std::bit_cast<std::array<uint8_t, sizeof(Record)>>(waiting);
  store_->set(c10::str("at/", rank_), std::vector<uint8_t>(words.begin(), words.end()));
  std::vector<Record> reports(world_size_);
  // Ranks that wait for the same thing report within moments of each other; the rest never do.
  const auto deadline = std::chrono::steady_clock::now() + 1s;
  for (int r = 0; r < world_size_; ++r) {
    const std::string key = c10::str("at/", r);
    while (!store_->check({key}) && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(20ms);
    const auto bytes = store_->check({key}) ? store_->get(key) : std::vector<uint8_t>();
    if (bytes.size() == sizeof(Record)) {
      std::memcpy(&reports[r], bytes.data(), sizeof(Record));
    } else {
      silent.push_back(r);
    }
  }
  return reports;
}

std::string Board::reported_text(const Record& waiting, int64_t waited_ms) {
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
    if (same_call && watch::fingerprint(reports[r]) != watch::fingerprint(waiting)) {
      return watch::mismatch_text(rank_, waiting, r, reports[r]);
    }
  }
  if (silent.empty()) return watch::missing_text(waiting, waited_ms, reports);
  std::string text =
      c10::str("timed out after ", waited_ms, " ms in ", watch::describe(waiting), ": ", name_ranks(silent),
               " did not report and ", silent.size() == 1 ? "is" : "are", " likely not in a call of this group");
  for (int r = 0; r < world_size_; ++r) {
    if (reports[r].kind != watch::Kind::none) text += c10::str(", rank ", r, " is at ", watch::describe(reports[r]));
  }
  return text;
}

}  // namespace serried::detail
