// The calls of one group on their way through MPI, and the thread that moves those of all groups.
#pragma once

#include "serried/comm/backends/mpi/library.h"
#include "serried/comm/backends/mpi/work.h"

#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace serried::mpi {

class Lane;

/// How a call came to its end.
struct Ended {
  enum class How { done, broken, late, group_failed, dropped };
  CallPtr call;
  Lane* lane = nullptr;  // the call keeps it alive
  How how = How::done;
  std::string text = "";         // of MPI, where it is broken
  detail::Failure failure = {};  // what a step found
  int64_t waited_ms = 0;
};

/// Collectives begin in the order of the calls on every rank: the steps of one have all begun before the first of the
/// next does. Sends and receives wait for nobody.
class Lane {
 public:
  /// Takes the communicator.
  Lane(MPI_Comm comm, std::shared_ptr<detail::GroupStatus> status, int64_t piece_bytes);

  detail::GroupStatus& status() { return *status_; }

  /// Begins the call where nothing is before it.
  static void add(const std::shared_ptr<Lane>& lane, CallPtr call);

  /// Whether no collective is under way within `timeout`; gives up early where the group fails.
  bool drain(std::chrono::milliseconds timeout);

  /// The driver has told a collective of its end. The caller has the turn.
  void told() { --num_untold_; }

  /// Ends what is left; whether MPI is done with all of it. The communicator is freed only then.
  bool close();

  /// For the driver, which has the turn. Whether calls are left.
  bool advance(std::vector<Ended>& ended);
  bool is_idle() const { return open_.empty(); }

 private:
  bool step(CallWork& call, bool& may_begin, Ended& end);
  bool test(CallWork& call, Ended& end);
  void give_up(std::vector<Ended>& ended, Ended::How how);
  bool has_collectives() const;
  void cancel_receives();

  const MPI_Comm comm_;
  const std::shared_ptr<detail::GroupStatus> status_;
  const int64_t piece_bytes_;
  // All below under turns().
  std::deque<CallPtr> open_;
  int num_untold_ = 0;           // collectives that have left open_, but do not know of their end
  bool has_peer_calls_ = false;  // ever had
  bool is_clean_ = true;         // MPI is done with all that it was asked for
};

/// One round of the driver on this thread, which may be its own: a callback that waits moves calls by itself.
void drive();
bool on_driver_thread();

}  // namespace serried::mpi
