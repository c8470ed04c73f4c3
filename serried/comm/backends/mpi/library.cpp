// Beginning and ending, and what MPI and its launcher say about themselves.
#include "serried/comm/backends/mpi/library.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <string_view>
#include <thread>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/fork.h"
#include "serried/comm/groups/group.h"

namespace serried::mpi {
namespace {

using namespace std::chrono_literals;

#define SERRIED_MPI_TEXT_OF(x) #x
#define SERRIED_MPI_TEXT(x) SERRIED_MPI_TEXT_OF(x)
#if defined(OMPI_MAJOR_VERSION)
constexpr std::string_view kBuiltFor = "Open MPI v" SERRIED_MPI_TEXT(OMPI_MAJOR_VERSION) "." SERRIED_MPI_TEXT(
    OMPI_MINOR_VERSION) "." SERRIED_MPI_TEXT(OMPI_RELEASE_VERSION);
#elif defined(MPICH_VERSION)
constexpr std::string_view kBuiltFor = MPICH_VERSION;
#else
#error "this MPI does not say its version in mpi.h: Open MPI and MPICH do"
#endif
#undef SERRIED_MPI_TEXT
#undef SERRIED_MPI_TEXT_OF

std::string first_text(std::initializer_list<const char*> names) {
  // Variables of launchers, not of ours.
  for (const char* name : names) {
    const char* value = std::getenv(name);
    if (value != nullptr && *value != '\0') return value;
  }
  return "";
}

std::string running_library() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  const std::string all(text.data(), size_t(length));
  return all.substr(0, all.find_first_of(",\n"));
}

bool flag_of(int (*ask)(int*)) {
  int flag = 0;
  ask(&flag);
  return flag != 0;
}

std::string why_threads_do_not_fit(int level) {
  if (level >= MPI_THREAD_SERIALIZED) return "";
  return c10::str("MPI was begun for one thread only (level ", level, ", MPI_THREAD_SERIALIZED is ",
                  MPI_THREAD_SERIALIZED, "): call MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave it to serried");
}

/// When MPI is ended. Guarded by its mutex.
struct Ending {
  std::mutex mutex;
  HomeProcess home;
  bool is_ours = false;  // begun here, so ended here
  bool at_exit = false;
  bool spoiled = false;  // a group was not clean when it ended
  int num_open = 0;
  std::chrono::milliseconds timeout{};  // a rank that exits waits so long for the others
};

Ending& ending() {
  static auto* state = new Ending();  // never destroyed: groups may end after static objects do
  return *state;
}

// All ranks of the job come to their exits, or this one leaves without MPI_Finalize, which would wait for them.
bool all_ranks_exit(std::chrono::milliseconds timeout) {
  MPI_Request request = MPI_REQUEST_NULL;
  if (MPI_Ibarrier(MPI_COMM_WORLD, &request) != MPI_SUCCESS) return false;
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  for (int done = 0; std::chrono::steady_clock::now() < deadline; std::this_thread::sleep_for(1ms)) {
    if (MPI_Test(&request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS) return false;
    if (done != 0) return true;
  }
  return false;
}

void end_if_due(Ending& state) {
  if (!state.is_ours || !state.at_exit || state.num_open > 0 || !state.home.is_here()) return;
  const std::lock_guard<std::mutex> lock(turns());
  if (flag_of(MPI_Finalized)) return;
  // mpirun ends the others as soon as one has left without MPI_Finalize: not before they are at their ends too.
  if (all_ranks_exit(state.timeout) && !state.spoiled) MPI_Finalize();
}

void on_exit_of_process() {
  Ending& state = ending();
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.at_exit = true;
  end_if_due(state);
}

}  // namespace

std::mutex& turns() {
  static auto* mutex = new std::mutex();  // the driver's thread may outlive static objects
  return *mutex;
}

int launched_ranks() {
  const std::string text = first_text({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"});
  return text.empty() ? -1 : std::atoi(text.c_str());
}

std::string job_name() {
  return first_text({"PMI_JOBID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"});
}

bool has_begun() {
  return flag_of(MPI_Initialized);
}

std::string why_unavailable() {
  const std::string running = running_library();
  if (running.find(kBuiltFor) == std::string::npos) {
    return c10::str("libserried_mpi.so was built for ", kBuiltFor, ", but the MPI library here is ", running,
                    ": build serried with this MPI");
  }
  if (flag_of(MPI_Finalized)) return "MPI has been finalised in this process, and cannot begin again";
  if (has_begun()) {
    int level = MPI_THREAD_SINGLE;
    MPI_Query_thread(&level);
    return why_threads_do_not_fit(level);
  }
  if (!first_text({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}).empty()) return "";
  return "this process was not started by mpirun: start all ranks with mpirun -n 4 ./train";
}

Place begin() {
  Ending& state = ending();
  const std::lock_guard<std::mutex> lock(state.mutex);
  const std::lock_guard<std::mutex> turn(turns());
  if (!has_begun()) {
    int level = MPI_THREAD_SINGLE;
    require(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    state.is_ours = true;
    state.timeout = default_timeout();
    std::atexit(on_exit_of_process);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    const std::string why = why_threads_do_not_fit(level);
    if (!why.empty()) raise<c10::NotImplementedError>({"new_group", why, "use an MPI that was built with threads"});
  }
  Place place;
  require(MPI_Comm_rank(MPI_COMM_WORLD, &place.rank), "MPI_Comm_rank");
  require(MPI_Comm_size(MPI_COMM_WORLD, &place.size), "MPI_Comm_size");
  return place;
}

std::string text_of(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) return c10::str("error ", code);
  return {text.data(), size_t(length)};
}

void require(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  raise<c10::DistBackendError>({"mpi", c10::str(call, " failed: ", text_of(code)),
                                "see what the other ranks and mpirun report, then make a new group"});
}

OpenGroup::OpenGroup() {
  const std::lock_guard<std::mutex> lock(ending().mutex);
  ++ending().num_open;
}

OpenGroup::~OpenGroup() {
  Ending& state = ending();
  const std::lock_guard<std::mutex> lock(state.mutex);
  --state.num_open;
  state.spoiled |= !is_clean_;
  end_if_due(state);
}

}  // namespace serried::mpi
