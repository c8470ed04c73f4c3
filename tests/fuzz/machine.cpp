// Machines as JSON, as `serried plan --simulate` takes them.
#include "tests/fuzz/target.h"

#include "tools/serried/simulate/error.h"
#include "tools/serried/simulate/machine.h"
#include "tools/serried/simulate/simulate.h"

namespace serried::fuzz {

void run_machine(std::string_view bytes) {
  using namespace serried::simulation;
  succeeds<SimulationError>([&] {
    const Machine machine = parse_machine(bytes, "machine");
    require(parse_machine(to_json(machine), "its text") == machine, "a machine that is another one as text");
    // What can be read can be simulated, or is refused in words.
    const Job job{.machine = machine,
                  .axes = {{"dp", 3}, {"tp", 2}},
                  .programs = {{Action::issue(0, {Kind::all_reduce, 100'000}), Action::compute(1),
                                Action::issue(1, {Kind::all_gather, 100}), Action::wait(1), Action::wait(0)}}};
    require(simulation::simulate(job).step >= 0, "a step that ends before it begins");
  });
}

}  // namespace serried::fuzz
