// Point to point: one byte stream per pair of ranks, messages matched by tag.
#pragma once

#include "serried/base/fork.h"
#include "serried/comm/backends/shm/far_mail.h"
#include "serried/comm/backends/shm/runner.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace serried::shm {

/// Moves bytes whenever somebody waits, and by a thread of its own while transfers are open and nobody does. Whoever
/// waits keeps the mailbox and its engine alive, and so does the thread: the group may go at any time, also in a
/// callback that the thread runs.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  explicit Mailbox(std::shared_ptr<Runner> engine);

  /// Fails what is open: nobody moves bytes after this. The thread ends.
  void close();

  /// Starts a transfer; done at once if the peer is ahead or the stream has room.
  void post(const std::shared_ptr<Transfer>& transfer);

  /// Blocks until the transfer is done, a peer is gone, or its time is over; raises its error.
  void wait(Transfer& transfer, std::chrono::milliseconds timeout);

 private:
  /// A message on its way in: into a posted receive, or into memory of its own until somebody asks for it.
  struct Incoming {
    MessageHeader header;
    int64_t received = 0;
    std::shared_ptr<Transfer> target;
    std::vector<char> kept;
    bool unwanted = false;  // its receive has failed: read it and drop it

    /// Where its next bytes go; null to drop them.
    char* room_for(uint64_t part);
  };

  using Done = std::vector<std::shared_ptr<Transfer>>;

  Done progress();
  bool push(int peer, Transfer& transfer);
  bool fits_ring(uint64_t held, int from, int to);
  bool wanted(int source) const;
  void drain(int source, Done& done);
  void drain_far(int source, Done& done);
  bool begin_message(int source, Done& done);
  void open_message(int source, const MessageHeader& header, Done& done);
  char* room_for_all(int source, Incoming& message);
  void finish_message(int source, Incoming& message, Done& done);
  bool take_kept(const std::shared_ptr<Transfer>& transfer, Done& done);
  std::shared_ptr<Transfer> match(int source, const MessageHeader& header);
  void deliver(Incoming& message, int source, const std::shared_ptr<Transfer>& transfer, Done& done);
  static void report(const Done& done);
  Done fail_open_transfers(const std::string& why);
  Done check_health();
  void check_interrupt();
  bool is_far(int peer) const { return far_ != nullptr && far_->reaches(peer); }
  bool is_gone(int peer) const;
  bool can_still_come(int source) const;
  std::vector<int> lost_peers(const Transfer& transfer) const;
  void ring_bell(int rank);
  void sleep_on_bell(uint32_t seen);
  void sleep(uint32_t seen);
  enum class Wait { near, far, both };
  Wait what_is_open();
  void run();

  const HomeProcess home_;
  const std::shared_ptr<Runner> engine_;
  FarMail* const far_;  // null where all ranks share the segment
  const Segment& segment_;
  const int rank_;
  PhaseSync& sync_;

  std::mutex mutex_;
  std::condition_variable opened_;
  std::vector<std::deque<std::shared_ptr<Transfer>>> sends_;  // by destination
  std::list<std::shared_ptr<Transfer>> receives_;             // posted, not matched yet
  std::vector<std::optional<Incoming>> incoming_;             // by source
  std::vector<std::list<Incoming>> kept_;                     // by source: came before anybody asked
  int64_t open_ = 0;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace serried::shm
