// The table of environment variables, and how their text becomes values.
#include "serried/base/env.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cstdlib>

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"

namespace serried::env {
namespace {

constexpr std::array kTable{
    Variable{"RANK", "", "this process's rank in the job"},
    Variable{"WORLD_SIZE", "", "how many ranks the job has"},
    Variable{"LOCAL_RANK", "", "this process's rank on its host"},
    Variable{"LOCAL_WORLD_SIZE", "", "how many ranks this host has"},
    Variable{"MASTER_ADDR", "", "host of rank 0's store"},
    Variable{"MASTER_PORT", "", "port of rank 0's store"},
    Variable{"TORCHELASTIC_USE_AGENT_STORE", "0", "1: the launcher keeps the store, rank 0 is a client too"},
    Variable{"TORCHELASTIC_RESTART_COUNT", "0", "how often the launcher has restarted the job"},
    Variable{"SERRIED_GENERATION", "", "the table of ranks in which this one began, from serried run --keep-going"},
    Variable{"TORCHELASTIC_RUN_ID", "", "names the job, from serried run and torchrun"},
    Variable{"USE_LIBUV", "1", "0: the store's server is the plain one, not libuv's"},
    Variable{"SERRIED_MASTER_LISTEN_FD", "", "socket that already listens on MASTER_PORT; rank 0 takes it over"},
    Variable{"SERRIED_LAUNCHER_FD", "",
             "socket to serried run, which keeps the store; without it ranks meet at MASTER_PORT"},
    Variable{"SERRIED_BLACK_BOX_FD", "", "memory of the launcher that keeps this rank's newest calls"},
    Variable{"SERRIED_JOB_SECRET", "",
             "signs what ranks tell each other through the store; serried run sets a new one"},
    Variable{"SERRIED_LOG", "", "topics to log: comm, launch, plan, dispatch, graph, checkpoint, or all"},
    Variable{"SERRIED_TRACE", "", "folder for one Chrome trace per rank; serried trace merge joins them"},
    Variable{"SERRIED_TIMEOUT", "300", "seconds that a collective and a rendezvous wait"},
    Variable{"SERRIED_SHM_HEAP_MB", "1024", "symmetric heap of a shared-memory group; only touched pages cost memory"},
    Variable{"SERRIED_ORDER", "",
             "ranks or hosts: in which order groups on several hosts add; else ranks on two hosts, hosts on more"},
    Variable{"SERRIED_SHUTDOWN_TIMEOUT", "10",
             "seconds that rank 0 waits at exit for the other ranks to leave its store"},
    Variable{"SERRIED_NAN_CHECK", "off", "warn or throw: look for NaN in what each rank sends"},
    Variable{"SERRIED_PLUGIN_PATH", "",
             "folders with plug-ins (libserried_*.so), colons between; else they are beside libserried.so"},
    Variable{"NO_COLOR", "", "any value: no colours in what the launcher and serried top print"},
    Variable{"OMPI_COMM_WORLD_RANK", "", "rank, from Open MPI's mpirun"},
    Variable{"OMPI_COMM_WORLD_SIZE", "", "number of ranks, from Open MPI's mpirun"},
    Variable{"OMPI_COMM_WORLD_LOCAL_RANK", "", "rank on the host, from Open MPI's mpirun"},
    Variable{"OMPI_COMM_WORLD_LOCAL_SIZE", "", "ranks on the host, from Open MPI's mpirun"},
    Variable{"OMPI_MCA_ess_base_jobid", "", "names the job, from Open MPI 4"},
    Variable{"OMPI_MCA_orte_hnp_uri", "", "names the job, from Open MPI 4"},
    Variable{"PMIX_NAMESPACE", "", "names the job, from PMIx launchers"},
    Variable{"PMI_RANK", "", "rank, from MPICH's mpiexec"},
    Variable{"PMI_SIZE", "", "number of ranks, from MPICH's mpiexec"},
    Variable{"PMI_JOBID", "", "names the job, from MPICH's mpiexec"},
    Variable{"MPI_LOCALRANKID", "", "rank on the host, from MPICH's mpiexec"},
    Variable{"MPI_LOCALNRANKS", "", "ranks on the host, from MPICH's mpiexec"},
    Variable{"SLURM_PROCID", "", "rank, from srun"},
    Variable{"SLURM_NTASKS", "", "number of ranks, from srun"},
    Variable{"SLURM_STEP_NUM_TASKS", "", "number of ranks of this step, from srun"},
    Variable{"SLURM_LOCALID", "", "rank on the host, from srun"},
    Variable{"SLURM_NODELIST", "", "hosts of the job, from srun"},
    Variable{"SLURM_JOB_NODELIST", "", "hosts of the job, from srun"},
    Variable{"SLURM_STEP_NODELIST", "", "hosts of this step, from srun"},
    Variable{"SLURM_JOB_ID", "", "names the job, from srun"},
    Variable{"SLURM_STEP_ID", "", "names the step, from srun"},
};

const Variable& find(std::string_view name) {
  const auto* found = std::find_if(kTable.begin(), kTable.end(), [&](const Variable& v) { return name == v.name; });
  TORCH_INTERNAL_ASSERT(found != kTable.end(), "environment variable ", name, " is not in the table of env.cpp");
  return *found;
}

int64_t parse_integer(std::string_view name, const std::string& value) {
  int64_t result = 0;
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, result);
  if (error == std::errc() && stop == end) return result;
  raise<c10::ValueError>({"environment", c10::str(name, " is \"", value, "\", not a whole number"),
                          c10::str("set ", name, " to a whole number, or unset it")});
}

}  // namespace

std::span<const Variable> table() {
  return kTable;
}

std::optional<std::string> maybe_text(std::string_view name) {
  const Variable& variable = find(name);
  const char* value = std::getenv(variable.name);
  std::string result = value != nullptr && *value != '\0' ? value : variable.fallback;
  if (result.empty()) return std::nullopt;
  return result;
}

std::string text(std::string_view name) {
  return maybe_text(name).value_or("");
}

std::optional<int64_t> maybe_integer(std::string_view name) {
  const std::optional<std::string> value = maybe_text(name);
  if (!value) return std::nullopt;
  return parse_integer(name, *value);
}

int64_t integer(std::string_view name) {
  const std::optional<int64_t> value = maybe_integer(name);
  if (value) return *value;
  raise<c10::ValueError>({"environment", c10::str(name, " is not set: ", find(name).meaning),
                          c10::str("set ", name, " to a whole number")});
}

bool flag(std::string_view name) {
  std::string value = text(name);
  std::transform(value.begin(), value.end(), value.begin(), [](unsigned char c) { return std::tolower(c); });
  if (value == "1" || value == "true" || value == "yes" || value == "on") return true;
  if (value.empty() || value == "0" || value == "false" || value == "no" || value == "off") return false;
  raise<c10::ValueError>({"environment", c10::str(name, " is \"", text(name), "\", neither yes nor no"),
                          c10::str("set ", name, " to 1 or 0")});
}

}  // namespace serried::env
