// Look a while, then sleep on the wire in slices; between slices look for the dead, the abort and the deadline.
#include "serried/comm/backends/hierarchical/links.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include <c10/util/StringUtil.h>

#include "serried/comm/agree/says_that_it_waits.h"

namespace serried::hierarchical {
namespace {

using net::Transfer;
using shm::PhaseSync;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Waking up costs more than a message that is about to come.
constexpr std::chrono::microseconds kLookOwnCore{50};
constexpr std::chrono::microseconds kLookSharedCore{5};

// How long the last words of a group may take to leave.
constexpr milliseconds kLastWords{200};

constexpr const char* kAfterLossFix = "make a new group with the ranks that are left";

}  // namespace

Links::Links(std::unique_ptr<net::Wire> wire, const shm::Segment& segment, PhaseSync& sync, const Topology& topology,
             int rank)
    : wire_(std::move(wire)),
      segment_(segment),
      sync_(sync),
      rank_(rank),
      bell_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (int peer = 0; peer < topology.num_ranks(); ++peer) {
    if (topology.host_of(peer) == topology.host_of(rank)) continue;
    Inbox& inbox = inboxes_.emplace_back();
    inbox.peer = peer;
    wire_->receive(inbox.transfer, peer, make_tag(Purpose::news), &inbox.news, sizeof(News));
  }
}

Links::~Links() {
  for (Inbox& inbox : inboxes_) {
    if (!inbox.transfer.ended()) wire_->cancel(inbox.transfer);
  }
  for (Letter& letter : letters_) {
    if (!letter.transfer.ended()) wire_->cancel(letter.transfer);
  }
  if (bell_ >= 0) close(bell_);
}

bool Links::progress() {
  const bool any = wire_->progress();
  if (!any) return false;
  look_for_news();
  if (sleeps_.load(std::memory_order_seq_cst)) eventfd_write(bell_, 1);
  return true;
}

void Links::look_for_news() {
  const std::scoped_lock lock(news_mutex_);
  for (Inbox& inbox : inboxes_) {
    // A lost peer's inbox stays as it is: whoever needs the peer finds out.
    while (inbox.transfer.ended() && inbox.transfer.state == Transfer::State::done) {
      take(inbox.peer, inbox.news, inbox.transfer.bytes);
      inbox.transfer = {};
      wire_->receive(inbox.transfer, inbox.peer, make_tag(Purpose::news), &inbox.news, sizeof(News));
    }
  }
  say_who_left();
}

void Links::take(int peer, const News& news, size_t bytes) {
  const size_t head = offsetof(News, text);
  if (bytes < head) return sync_.abort(c10::str("rank ", peer, " sends news of ", bytes, " bytes"));
  if (news.kind == News::Kind::left) {
    leaving_.emplace_back(peer, news.num_calls);
    return;
  }
  told_abort_ = true;  // by one who tells everybody
  sync_.abort(std::string(news.text, strnlen(news.text, bytes - head)),
              news.by_loss != 0 ? PhaseSync::Cause::loss : PhaseSync::Cause::failure);
}

// Where a rank left after calls whose messages have not been looked at, it has left only when they have.
void Links::say_who_left() {
  std::erase_if(leaving_, [this](const auto& leaving) {
    watch_page::RankPage& page = segment_.info(leaving.first).page;
    if (page.newest.load(std::memory_order_acquire) < leaving.second) return false;
    page.left.store(1, std::memory_order_release);
    return true;
  });
}

void Links::wait(c10::function_ref<bool()> is_done, c10::function_ref<void()> look) {
  const auto begin = steady_clock::now();
  const auto look_for = sync_.policy().own_core ? kLookOwnCore : kLookSharedCore;
  do {
    progress();
    if (is_done()) return;
  } while (steady_clock::now() - begin < look_for);
  const detail::SaysThatItWaits says(sync_.page(), sync_.current().sequence, begin);
  auto next_look = begin + shm::kWaitSlice;
  while (true) {
    const bool any = progress();
    if (is_done()) return;
    sync_.check_usable();
    if (!any) sleep(shm::kWaitSlice, is_done);
    if (steady_clock::now() < next_look) continue;
    check_health(begin);
    look();
    next_look = steady_clock::now() + shm::kWaitSlice;
  }
}

void Links::sleep(milliseconds longest, c10::function_ref<bool()> is_done) {
  const std::unique_lock lock(sleep_mutex_, std::try_to_lock);
  if (!lock || wire_->descriptor() < 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));  // nothing wakes this thread
    return;
  }
  sleeps_.store(true, std::memory_order_seq_cst);
  // Once more: another thread may have ended what this one waits for, before it knew that this one sleeps.
  if (!is_done() && wire_->arm()) {
    pollfd entries[] = {{.fd = wire_->descriptor(), .events = POLLIN, .revents = 0},
                        {.fd = bell_, .events = POLLIN, .revents = 0}};
    ::poll(entries, 2, int(longest.count()));
  }
  sleeps_.store(false, std::memory_order_relaxed);
  eventfd_t rung = 0;
  eventfd_read(bell_, &rung);
}

void Links::check_health(steady_clock::time_point begin) {
  {
    const std::scoped_lock lock(news_mutex_);
    say_who_left();
  }
  sync_.check_usable();
  // What a dead neighbour owed to other hosts never comes, however far it is here.
  const int dead = sync_.dead_peer();
  if (dead >= 0) sync_.fail_for_gone_peer(dead);
  const int gone = sync_.missing_peer(sync_.phase());
  if (gone >= 0) sync_.fail_for_gone_peer(gone);
  const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin);
  if (waited >= sync_.timeout()) sync_.fail_for_timeout(waited);
}

void Links::fail_for_lost(int peer, const std::string& why) {
  progress();  // it may have said why it goes
  look_for_news();
  sync_.check_usable();
  if (segment_.info(peer).page.left.load(std::memory_order_acquire) != 0) sync_.fail_for_gone_peer(peer);
  const std::string known = c10::str("rank ", peer, " is lost: ");
  const std::string what =
      c10::str("rank ", peer, " is lost while rank ", rank_, " was in ", watch::describe_place(sync_.current()), ": ",
               why.starts_with(known) ? why.substr(known.size()) : why);
  sync_.abort(what, PhaseSync::Cause::loss);
  sync_.fail(what, kAfterLossFix);
}

void Links::tell_abort() {
  if (told_abort_.exchange(true)) return;
  News news{};
  news.kind = News::Kind::aborted;
  news.by_loss = sync_.is_by_loss() ? 1 : 0;
  const std::string why = sync_.abort_reason();
  const size_t length = std::min(why.size(), sizeof(news.text) - 1);
  std::memcpy(news.text, why.data(), length);
  tell_all(news, offsetof(News, text) + length + 1);
}

void Links::tell_left(uint64_t num_calls) {
  News news{};
  news.kind = News::Kind::left;
  news.num_calls = num_calls;
  tell_all(news, offsetof(News, text) + 1);
}

void Links::tell_all(const News& news, size_t bytes) {
  std::vector<Transfer*> sent;
  {
    const std::scoped_lock lock(news_mutex_);
    for (const Inbox& inbox : inboxes_) {
      Letter& letter = letters_.emplace_back();
      letter.news = news;
      wire_->send(letter.transfer, inbox.peer, make_tag(Purpose::news), &letter.news, bytes);
      sent.push_back(&letter.transfer);
    }
  }
  const auto all_ended = [&] { return std::all_of(sent.begin(), sent.end(), [](auto* one) { return one->ended(); }); };
  const auto deadline = steady_clock::now() + kLastWords;
  while (!all_ended() && steady_clock::now() < deadline) {
    if (!progress()) sched_yield();
  }
}

}  // namespace serried::hierarchical
