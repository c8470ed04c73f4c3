// Streams, matching, and who moves the bytes.
#include "serried/comm/backends/shm/mailbox.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/interrupt.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/agree/says_that_it_waits.h"
#include "serried/comm/backends/shm/driver.h"

namespace serried::shm {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// A neighbour may ring meanwhile, and nothing on the wire says so.
constexpr milliseconds kFarSlice{5};
constexpr std::chrono::microseconds kBothSlice{200};

void copy_into(Ring& ring, uint64_t at, const char* from, uint64_t bytes) {
  const uint64_t begin = at % Ring::kCapacity;
  const uint64_t first = std::min(bytes, Ring::kCapacity - begin);
  std::memcpy(ring.data + begin, from, first);
  std::memcpy(ring.data, from + first, bytes - first);
}

void copy_out(const Ring& ring, uint64_t at, char* to, uint64_t bytes) {
  const uint64_t begin = at % Ring::kCapacity;
  const uint64_t first = std::min(bytes, Ring::kCapacity - begin);
  std::memcpy(to, ring.data + begin, first);
  std::memcpy(to + first, ring.data, bytes - first);
}

std::exception_ptr make_error(const std::string& what, const std::string& fix) {
  return std::make_exception_ptr(c10::DistBackendError(format_error({"point to point", what, fix})));
}

}  // namespace

Mailbox::Mailbox(std::shared_ptr<Runner> engine)
    : engine_(std::move(engine)),
      far_(engine_->far_mail()),
      segment_(engine_->segment()),
      rank_(engine_->rank()),
      sync_(engine_->sync()),
      sends_(segment_.world_size()),
      incoming_(segment_.world_size()),
      kept_(segment_.world_size()) {}

void Mailbox::close() {
  std::thread thread;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    thread.swap(thread_);
  }
  opened_.notify_all();
  report(fail_open_transfers(c10::str("rank ", rank_, " closed the group")));
  ring_bell(rank_);
  if (!thread.joinable()) return;
  // The last owner of the group may go in a callback, which this very thread runs.
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else
    thread.join();
}

void Mailbox::post(const std::shared_ptr<Transfer>& transfer) {
  home_.require("point to point");
  Done done;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stop_) {
      transfer->finished = nullptr;  // holds the owner of the transfer
      raise<c10::DistBackendError>({"point to point", "the group is closed", "make a new group"});
    }
    ++open_;
    if (transfer->direction == Transfer::Direction::send) {
      sends_[transfer->peer].push_back(transfer);
    } else if (!take_kept(transfer, done)) {
      receives_.push_back(transfer);
    }
    Done more = progress();
    done.insert(done.end(), more.begin(), more.end());
    if (open_ > 0 && !thread_.joinable()) thread_ = start_helper_thread([self = shared_from_this()] { self->run(); });
  }
  report(done);
  opened_.notify_one();
}

void Mailbox::wait(Transfer& transfer, milliseconds timeout) {
  home_.require("point to point");
  const auto begin = steady_clock::now();
  detail::SaysThatItWaits says(segment_.info(rank_).page);
  while (true) {
    const uint32_t seen = segment_.bell(rank_).rings.load(std::memory_order_acquire);
    Done done;
    bool is_done = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      done = progress();
      is_done = transfer.done;
    }
    report(done);
    if (is_done) break;
    says.waits_for(transfer.direction == Transfer::Direction::send, transfer.peer, begin);
    sleep(seen);
    report(check_health());
    const auto waited = std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin);
    if (waited >= timeout) {
      const std::string what =
          c10::str("timed out after ", waited.count(), " ms in ", transfer.what, detail::stopped_text(sync_.pids()));
      engine_->abort(what);
      report(fail_open_transfers(what));
    }
    check_interrupt();
  }
  if (transfer.error) std::rethrow_exception(transfer.error);
}

/// Raises where this thread was told to give up. The other ranks then need not wait for it.
void Mailbox::check_interrupt() {
  if (!interrupt::is_possible()) return;
  try {
    interrupt::check();
  } catch (...) {
    engine_->abort(interrupt::reason(rank_));
    report(fail_open_transfers(interrupt::reason(rank_)));
    throw;
  }
}

// Everything that can move now does. Holds the lock.
Mailbox::Done Mailbox::progress() {
  Done done;
  for (int peer = 0; peer < segment_.world_size(); ++peer) {
    auto& queue = sends_[peer];
    while (!queue.empty() && push(peer, *queue.front())) {
      done.push_back(queue.front());
      queue.pop_front();
    }
    if (is_far(peer))
      drain_far(peer, done);
    else
      drain(peer, done);
  }
  for (const auto& transfer : done) transfer->done = true;
  open_ -= int64_t(done.size());
  return done;
}

bool Mailbox::push(int peer, Transfer& transfer) {
  if (is_far(peer)) return far_->push(transfer);
  Ring& ring = segment_.ring(rank_, peer);
  uint64_t written = ring.written.load(std::memory_order_relaxed);
  const uint64_t held = written - ring.read.load(std::memory_order_acquire);
  if (!fits_ring(held, rank_, peer)) return false;
  uint64_t room = Ring::kCapacity - held;
  const uint64_t before = written;
  if (!transfer.header_sent) {
    if (room < sizeof(MessageHeader)) return false;
    const MessageHeader header{.bytes = transfer.bytes, .tag = transfer.tag, .dtype = transfer.dtype};
    copy_into(ring, written, reinterpret_cast<const char*>(&header), sizeof(header));
    written += sizeof(header);
    room -= sizeof(header);
    transfer.header_sent = true;
  }
  const uint64_t part = std::min<uint64_t>(room, uint64_t(transfer.bytes - transfer.moved));
  if (part > 0) copy_into(ring, written, transfer.data + transfer.moved, part);
  transfer.moved += int64_t(part);
  written += part;
  if (written != before) {
    ring.written.store(written, std::memory_order_release);
    ring_bell(peer);
  }
  return transfer.moved == transfer.bytes;
}

// Memory for what is not asked for yet grows with what has come: the announced size may be anything.
char* Mailbox::Incoming::room_for(uint64_t part) {
  if (target) return target->data + received;
  if (unwanted) return nullptr;
  kept.resize(size_t(received) + part);
  return kept.data() + received;
}

// The counters of a stream are the peer's to write: they end the group where they make no sense.
bool Mailbox::fits_ring(uint64_t held, int from, int to) {
  if (held <= Ring::kCapacity) return true;
  engine_->abort(c10::str("the stream from rank ", from, " to rank ", to, " claims ", held, " bytes in a buffer of ",
                          Ring::kCapacity));
  return false;
}

// Whether a receive asks for what `source` sends. Else its messages stay in the stream, and it waits once that is full.
bool Mailbox::wanted(int source) const {
  if (incoming_[source] && incoming_[source]->target) return true;
  return std::any_of(receives_.begin(), receives_.end(),
                     [source](const auto& receive) { return receive->peer == source || receive->peer < 0; });
}

void Mailbox::drain(int source, Done& done) {
  Ring& ring = segment_.ring(source, rank_);
  while (wanted(source)) {
    if (!incoming_[source] && !begin_message(source, done)) return;
    Incoming& message = *incoming_[source];
    const uint64_t read = ring.read.load(std::memory_order_relaxed);
    const uint64_t ready = ring.written.load(std::memory_order_acquire) - read;
    if (!fits_ring(ready, source, rank_)) return;
    const uint64_t part = std::min<uint64_t>(ready, uint64_t(message.header.bytes - message.received));
    if (part > 0) {
      if (char* to = message.room_for(part)) copy_out(ring, read, to, part);
      ring.read.store(read + part, std::memory_order_release);
      ring_bell(source);
    }
    message.received += int64_t(part);
    if (message.received < message.header.bytes) return;
    finish_message(source, message, done);
  }
}

void Mailbox::drain_far(int source, Done& done) {
  while (wanted(source)) {
    if (!incoming_[source]) {
      const std::optional<MessageHeader> header = far_->next(source);
      if (!header) return;
      open_message(source, *header, done);
    }
    Incoming& message = *incoming_[source];
    char* const to = room_for_all(source, message);
    if (to == nullptr || !far_->pull(source, to)) return;
    finish_message(source, message, done);
  }
}

/// Null, and the end of the group, where there is not that much memory.
char* Mailbox::room_for_all(int source, Incoming& message) {
  static char nothing;
  if (message.header.bytes == 0) return &nothing;
  if (message.target) return message.target->data;
  try {
    message.kept.resize(size_t(message.header.bytes));
  } catch (const std::exception&) {
    engine_->abort(c10::str("rank ", rank_, " has no memory for a message of ", message.header.bytes,
                            " bytes from rank ", source));
    return nullptr;
  }
  return message.kept.data();
}

bool Mailbox::begin_message(int source, Done& done) {
  Ring& ring = segment_.ring(source, rank_);
  const uint64_t read = ring.read.load(std::memory_order_relaxed);
  const uint64_t ready = ring.written.load(std::memory_order_acquire) - read;
  if (!fits_ring(ready, source, rank_) || ready < sizeof(MessageHeader)) return false;
  Incoming message;
  copy_out(ring, read, reinterpret_cast<char*>(&message.header), sizeof(MessageHeader));
  if (message.header.bytes < 0) {
    engine_->abort(c10::str("rank ", source, " sends rank ", rank_, " a message of ", message.header.bytes, " bytes"));
    return false;
  }
  ring.read.store(read + sizeof(MessageHeader), std::memory_order_release);
  open_message(source, message.header, done);
  return true;
}

void Mailbox::open_message(int source, const MessageHeader& header, Done& done) {
  Incoming message;
  message.header = header;
  std::shared_ptr<Transfer> receive = match(source, header);
  // A receive that does not fit gets its error when the message is whole: the stream must stay readable.
  const bool fits = receive && receive->bytes == message.header.bytes && receive->dtype == message.header.dtype;
  if (fits) message.target = receive;
  incoming_[source] = std::move(message);
  if (receive && !fits) {
    deliver(*incoming_[source], source, receive, done);
    incoming_[source]->unwanted = true;
  }
}

void Mailbox::finish_message(int source, Incoming& message, Done& done) {
  if (message.target) {
    message.target->source = source;
    done.push_back(message.target);
  } else if (!message.unwanted) {
    // Somebody may have asked for it while it was coming in.
    if (std::shared_ptr<Transfer> receive = match(source, message.header))
      deliver(message, source, receive, done);
    else
      kept_[source].push_back(std::move(message));
  }
  incoming_[source].reset();
}

std::shared_ptr<Transfer> Mailbox::match(int source, const MessageHeader& header) {
  const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const auto& receive) {
    return (receive->peer == source || receive->peer < 0) && receive->tag == header.tag;
  });
  if (found == receives_.end()) return nullptr;
  std::shared_ptr<Transfer> receive = *found;
  receives_.erase(found);
  return receive;
}

void Mailbox::deliver(Incoming& message, int source, const std::shared_ptr<Transfer>& receive, Done& done) {
  receive->source = source;
  if (receive->bytes != message.header.bytes || receive->dtype != message.header.dtype) {
    receive->error = make_error(c10::str("rank ", source, " sent ", message.header.bytes, " bytes of ",
                                         watch::dtype_name(at::ScalarType(message.header.dtype)), " where rank ", rank_,
                                         " expects ", receive->bytes, " bytes in ", receive->what),
                                "let both sides use the same shape and dtype");
  } else if (receive->bytes > 0) {
    std::memcpy(receive->data, message.kept.data(), size_t(receive->bytes));
  }
  done.push_back(receive);
}

bool Mailbox::take_kept(const std::shared_ptr<Transfer>& transfer, Done& done) {
  for (int source = 0; source < segment_.world_size(); ++source) {
    if (transfer->peer >= 0 && transfer->peer != source) continue;
    auto& messages = kept_[source];
    const auto found = std::find_if(messages.begin(), messages.end(),
                                    [&](const Incoming& message) { return message.header.tag == transfer->tag; });
    if (found == messages.end()) continue;
    deliver(*found, source, transfer, done);
    messages.erase(found);
    transfer->done = true;
    --open_;
    return true;
  }
  return false;
}

void Mailbox::report(const Done& done) {
  // Taken out first: the callback may hold the owner of the transfer.
  for (const auto& transfer : done) std::exchange(transfer->finished, nullptr)(transfer->error);
}

Mailbox::Done Mailbox::fail_open_transfers(const std::string& why) {
  Done failed;
  std::lock_guard<std::mutex> lock(mutex_);
  if (far_ != nullptr) far_->stop();
  for (auto& queue : sends_) {
    failed.insert(failed.end(), queue.begin(), queue.end());
    queue.clear();
  }
  failed.insert(failed.end(), receives_.begin(), receives_.end());
  receives_.clear();
  for (auto& message : incoming_) {
    if (message && message->target) failed.push_back(message->target);
    message.reset();
  }
  for (const auto& transfer : failed) {
    transfer->error =
        make_error(c10::str(transfer->what, " failed: the group is unusable since: ", why), sync_.unusable_fix());
    transfer->done = true;
  }
  open_ = 0;
  return failed;
}

bool Mailbox::is_gone(int peer) const {
  return is_far(peer) ? !far_->loss(peer).empty() : sync_.is_gone(peer);
}

/// What a peer sent before it left is still good.
bool Mailbox::can_still_come(int source) const {
  if (is_far(source)) return !is_gone(source);
  if (!sync_.is_gone(source)) return true;
  const Ring& ring = segment_.ring(source, rank_);
  return ring.written.load(std::memory_order_acquire) != ring.read.load(std::memory_order_relaxed);
}

/// The ranks that are gone, where the transfer cannot end without them. A receive from any rank can while one is left.
std::vector<int> Mailbox::lost_peers(const Transfer& transfer) const {
  const bool sends = transfer.direction == Transfer::Direction::send;
  if (sends && is_gone(transfer.peer)) return {transfer.peer};
  std::vector<int> lost;
  for (int peer = 0; peer < segment_.world_size() && !sends; ++peer) {
    if (transfer.peer < 0 ? peer == rank_ : peer != transfer.peer) continue;
    if (can_still_come(peer)) return {};
    lost.push_back(peer);
  }
  return lost;
}

Mailbox::Done Mailbox::check_health() {
  if (sync_.aborted()) return fail_open_transfers(sync_.abort_reason());
  std::string why;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto blame = [&](const std::vector<int>& lost, const Transfer& transfer) {
      if (lost.empty() || !why.empty()) return;
      why = c10::str(detail::rank_list(lost), lost.size() == 1 ? " is gone (it" : " are gone (they",
                     " died or left the group) while rank ", rank_, " was in ", transfer.what);
    };
    for (const auto& queue : sends_)
      for (const auto& send : queue) blame(lost_peers(*send), *send);
    for (const auto& receive : receives_) blame(lost_peers(*receive), *receive);
    for (int source = 0; source < segment_.world_size(); ++source) {
      const auto& message = incoming_[source];
      // Once a message has begun to come, only its sender can complete it, even for a receive from any rank.
      if (message && message->target && !can_still_come(source)) blame({source}, *message->target);
    }
  }
  if (why.empty()) return {};
  engine_->abort(why, PhaseSync::Cause::loss);
  // The first reason of all: who is gone may have left since a third rank died, and said so before.
  return fail_open_transfers(sync_.abort_reason());
}

void Mailbox::ring_bell(int rank) {
  Bell& bell = segment_.bell(rank);
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  if (bell.waiters.load(std::memory_order_seq_cst) != 0) futex_wake_all(bell.rings);
}

Mailbox::Wait Mailbox::what_is_open() {
  if (far_ == nullptr) return Wait::near;
  const std::lock_guard<std::mutex> lock(mutex_);
  bool near = false, far = false;
  const auto note = [&](int peer) { (is_far(peer) ? far : near) = true; };
  for (int peer = 0; peer < segment_.world_size(); ++peer) {
    if (!sends_[peer].empty() || incoming_[peer]) note(peer);
  }
  for (const auto& receive : receives_) {
    if (receive->peer >= 0)
      note(receive->peer);
    else
      near = far = true;
  }
  return !far ? Wait::near : near ? Wait::both : Wait::far;
}

void Mailbox::sleep(uint32_t seen) {
  const Wait wait = what_is_open();
  if (wait == Wait::near) return sleep_on_bell(seen);
  far_->progress();
  if (wait == Wait::far) return far_->sleep(kFarSlice);
  // Two things to wait for, and no way to sleep on both.
  futex_sleep(segment_.bell(rank_).rings, seen, kBothSlice);
}

void Mailbox::sleep_on_bell(uint32_t seen) {
  Bell& bell = segment_.bell(rank_);
  for (int i = 0; i < 200; ++i) {
    if (bell.rings.load(std::memory_order_acquire) != seen) return;
    cpu_relax();
  }
  bell.waiters.fetch_add(1, std::memory_order_seq_cst);
  if (bell.rings.load(std::memory_order_seq_cst) == seen && !sync_.aborted()) futex_sleep(bell.rings, seen);
  bell.waiters.fetch_sub(1, std::memory_order_seq_cst);
}

void Mailbox::run() {
  while (true) {
    const uint32_t seen = segment_.bell(rank_).rings.load(std::memory_order_acquire);
    Done done;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      opened_.wait(lock, [this] { return stop_ || open_ > 0; });
      if (stop_) return;
      done = progress();
    }
    report(done);
    sleep(seen);
    report(check_health());
  }
}

}  // namespace serried::shm
