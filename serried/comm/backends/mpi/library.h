// MPI in this process: begun once, called by one thread at a time, ended at exit where nothing is open.
#pragma once

#include <mpi.h>

#include <mutex>
#include <string>

namespace serried::mpi {

/// Held around every call that moves data: MPI is asked for MPI_THREAD_MULTIPLE, but one that gives SERIALIZED will do.
/// It also guards the lanes and their calls.
std::mutex& turns();

/// Why no group can be made in this process, as far as it can say by itself; empty where one can.
std::string why_unavailable();

/// The number of ranks that the launcher has started, -1 where it does not say.
int launched_ranks();

/// Which job of which launcher this process is of; texts of one job are equal.
std::string job_name();

/// Whether the program or a group before has begun MPI. MPI_Init waits for every rank of the job.
bool has_begun();

/// This process in MPI_COMM_WORLD.
struct Place {
  int rank = 0;
  int size = 1;
};

/// Begins MPI unless that has been done, and then ends it at exit.
Place begin();

/// MPI's words for an error code.
std::string text_of(int code);

/// DistBackendError unless `code` is MPI_SUCCESS.
void require(int code, const char* call);

/// A group that lives. MPI is ended once the process exits and none is left, but not where one was not clean at its
/// end: MPI_Finalize may wait for ever for what is still under way.
class OpenGroup {
 public:
  OpenGroup();
  ~OpenGroup();
  OpenGroup(const OpenGroup&) = delete;
  OpenGroup& operator=(const OpenGroup&) = delete;

  /// MPI is not done with all that it was asked for.
  void spoil() { is_clean_ = false; }

 private:
  bool is_clean_ = true;
};

}  // namespace serried::mpi
