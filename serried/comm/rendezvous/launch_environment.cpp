// Reads rank, world size and the store's address from whichever launcher started this process.
#include "serried/comm/rendezvous/launch_environment.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <vector>

#include <c10/util/StringUtil.h>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/comm/rendezvous/url.h"

namespace serried::detail {
namespace {

enum class Launcher { torchrun, open_mpi, mpich, srun };

// The names one launcher uses; those it lacks are empty.
struct Names {
  std::string rank;
  std::string world_size;
  std::string local_size;
};

Launcher find_launcher() {
  if (env::maybe_text("RANK") || env::maybe_text("WORLD_SIZE")) return Launcher::torchrun;
  if (env::maybe_text("OMPI_COMM_WORLD_RANK")) return Launcher::open_mpi;
  if (env::maybe_text("PMI_RANK")) return Launcher::mpich;
  if (env::maybe_text("SLURM_PROCID")) return Launcher::srun;
  return Launcher::torchrun;
}

Names names_of(Launcher launcher) {
  switch (launcher) {
    case Launcher::open_mpi: return {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"};
    case Launcher::mpich: return {"PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"};
    case Launcher::srun:
      return {"SLURM_PROCID", env::maybe_text("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", ""};
    case Launcher::torchrun: break;
  }
  return {"RANK", "WORLD_SIZE", ""};
}

std::string first_text(const std::vector<const char*>& names) {
  for (const char* name : names) {
    if (const auto value = env::maybe_text(name)) return *value;
  }
  return "";
}

// The same for all ranks of a job, different for jobs on one host.
std::string job_name(Launcher launcher) {
  if (launcher == Launcher::srun) return first_text({"SLURM_JOB_ID"}) + "." + first_text({"SLURM_STEP_ID"});
  const std::string name = launcher == Launcher::open_mpi
                               ? first_text({"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri"})
                               : first_text({"PMIX_NAMESPACE", "PMI_JOBID"});
  // All ranks of a host are children of one launcher process.
  return name.empty() ? std::to_string(::getppid()) : name;
}

// FNV-1a, so that every rank finds the same port; below the range from which systems hand out ports by themselves.
uint16_t port_for(const std::string& job) {
  uint32_t hash = 2166136261U;
  for (unsigned char c : job) hash = (hash ^ c) * 16777619U;
  return uint16_t(10000 + hash % 20000);
}

class EnvironmentReader {
 public:
  EnvironmentReader() : launcher_(find_launcher()), names_(names_of(launcher_)) {}

  LaunchEnvironment read(GivenRanks given) {
    LaunchEnvironment job;
    job.rank = given.rank >= 0 ? given.rank : number(names_.rank);
    job.world_size = given.world_size >= 0 ? given.world_size : number(names_.world_size);
    job.master_addr = master_addr(job.world_size);
    job.master_port = master_port();
    if (!problems_.empty()) raise_problems();
    job.agent_keeps_store = env::flag("TORCHELASTIC_USE_AGENT_STORE");
    const auto local = env::maybe_text(names_.local_size.empty() ? "LOCAL_WORLD_SIZE" : names_.local_size);
    job.several_hosts = local && parse_integer(*local).value_or(job.world_size) < job.world_size;
    return job;
  }

 private:
  int number(const std::string& name) {
    const auto value = env::maybe_text(name);
    if (!value) return wrong(name + " is not set");
    const std::string problem = why_no_rank(*value);
    return problem.empty() ? int(*parse_integer(*value)) : wrong(c10::str(name, " is \"", *value, "\", ", problem));
  }

  std::string master_addr(int world_size) {
    if (const auto value = env::maybe_text("MASTER_ADDR")) return *value;
    if (launcher_ == Launcher::srun) {
      const std::string host = first_host(first_text({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"}));
      if (!host.empty()) return host;
    }
    if (!names_.local_size.empty()) {
      const auto local_size = env::maybe_text(names_.local_size);
      if (!local_size || parse_integer(*local_size) == world_size) return "127.0.0.1";
    }
    wrong("MASTER_ADDR is not set");
    return "";
  }

  uint16_t master_port() {
    const auto value = env::maybe_text("MASTER_PORT");
    if (!value && launcher_ != Launcher::torchrun) return port_for(job_name(launcher_));
    if (!value) return uint16_t(wrong("MASTER_PORT is not set"));
    const auto parsed = parse_integer(*value);
    if (parsed && *parsed >= 0 && *parsed <= 65535) return uint16_t(*parsed);
    return uint16_t(wrong(c10::str("MASTER_PORT is \"", *value, "\", not 0..65535")));
  }

  int wrong(const std::string& what) {
    problems_.push_back(what);
    return -1;
  }

  [[noreturn]] void raise_problems() const {
    raise<c10::ValueError>({"rendezvous", c10::str("env://: ", c10::Join("; ", problems_)),
                            "start the program with serried run, torchrun, mpirun or srun, or set the variables"});
  }

  const Launcher launcher_;
  const Names names_;
  std::vector<std::string> problems_;
};

}  // namespace

LaunchEnvironment read_launch_environment(GivenRanks given) {
  return EnvironmentReader().read(given);
}

int64_t attempt_of_all() {
  return env::maybe_integer("SERRIED_GENERATION") ? 0 : env::integer("TORCHELASTIC_RESTART_COUNT");
}

int take_listen_fd() {
  const auto fd = env::maybe_integer("SERRIED_MASTER_LISTEN_FD");
  ::unsetenv("SERRIED_MASTER_LISTEN_FD");
  if (!fd) return -1;
  ::fcntl(int(*fd), F_SETFD, FD_CLOEXEC);
  return int(*fd);
}

}  // namespace serried::detail
