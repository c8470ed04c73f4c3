// Whether a job can be run at all.
#include "tools/serried/simulate/job.h"

#include "tools/serried/simulate/error.h"

namespace serried::simulation {
namespace {

void check_program(const Job& job, size_t number) {
  const std::string name = "program " + std::to_string(number);
  size_t issued = 0;
  for (const Action& action : job.programs[number]) {
    if (action.time < 0 || action.call.bytes < 0) {
      throw SimulationError(name + " has an action of a negative size", "pass sizes of 0 and more");
    }
    if (action.kind == Action::Kind::issue && action.axis >= job.axes.size()) {
      throw SimulationError(name + " issues a collective on axis " + std::to_string(action.axis) + " of " +
                                std::to_string(job.axes.size()),
                            "number the axes of the mesh from 0");
    }
    if (action.kind == Action::Kind::wait && action.issued >= issued) {
      throw SimulationError(name + " waits for collective " + std::to_string(action.issued) + ", and has issued " +
                                std::to_string(issued),
                            "let it issue a collective before it waits for that");
    }
    issued += action.kind == Action::Kind::issue ? 1 : 0;
  }
}

}  // namespace

int64_t Job::num_ranks() const {
  int64_t ranks = 1;
  for (const Axis& axis : axes) ranks *= axis.size;
  return ranks;
}

void check(const Job& job) {
  const int64_t ranks = job.num_ranks();
  const int64_t per_host = job.machine.ranks_per_host;
  if (job.machine.hosts && ranks > *job.machine.hosts * per_host) {
    throw SimulationError(std::to_string(ranks) + " ranks do not fit on the machine: it has " +
                              std::to_string(*job.machine.hosts) + " hosts of " + std::to_string(per_host) + " ranks",
                          "pass up to " + std::to_string(*job.machine.hosts * per_host) +
                              " ranks, or leave out \"hosts\" in the machine");
  }
  for (size_t i = 0; i < job.programs.size(); ++i) check_program(job, i);
  if (job.programs.empty() || (!job.program_of_rank.empty() && int64_t(job.program_of_rank.size()) != ranks)) {
    throw SimulationError("not every rank has a program", "give each of the " + std::to_string(ranks) + " ranks one");
  }
  for (const int32_t program : job.program_of_rank) {
    if (program >= 0 && size_t(program) < job.programs.size()) continue;
    throw SimulationError("there is no program " + std::to_string(program), "number the programs from 0");
  }
}

}  // namespace serried::simulation
