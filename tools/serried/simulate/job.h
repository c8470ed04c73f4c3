// What is simulated: a mesh of ranks on a machine, and what each of them does in a step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/serried/simulate/collective.h"
#include "tools/serried/simulate/machine.h"
#include "tools/serried/simulate/time.h"

namespace serried::simulation {

/// One dimension of the mesh.
struct Axis {
  std::string name;
  int64_t size = 1;
};

/// What a rank does next.
struct Action {
  enum class Kind : uint8_t {
    compute,  // for `time`, where it has a core
    issue,    // `call` in its group along `axis`: starts when all have issued it, and theirs before it has ended
    wait,     // for the how-many-th `issue` of its program
  };
  Kind kind = Kind::compute;
  Time time = 0;
  size_t axis = 0;
  Call call = {};
  size_t issued = 0;

  static Action compute(Time time) { return {.kind = Kind::compute, .time = time}; }
  static Action issue(size_t axis, Call call) { return {.kind = Kind::issue, .axis = axis, .call = call}; }
  static Action wait(size_t issued) { return {.kind = Kind::wait, .issued = issued}; }
};
using Program = std::vector<Action>;

struct Job {
  Machine machine;
  std::vector<Axis> axes;                     // the last one counts fastest; consecutive ranks share hosts
  std::vector<Program> programs;              // of classes of ranks
  std::vector<int32_t> program_of_rank = {};  // empty: all ranks have the first

  int64_t num_ranks() const;
};

/// SimulationError where the ranks do not fit on the machine, or programs cannot be what ranks of one job do.
void check(const Job& job);

}  // namespace serried::simulation
