// Trains under a combination of strategies as one of several processes, and says whether one process gets the same.
#include <unistd.h>

#include <string>

#include "tests/parallel/combination.h"

namespace {

using namespace serried;
using namespace serried::testing::together;

Combination combination_of(const std::string& name) {
  if (name == "fsdp") return {.dp = 4, .recomputes = true};
  if (name == "hsdp") return {.replicas = 2, .dp = 2};
  Combination c{.dp = 2, .tp = 2, .by_ddp = name == "ddp_tp", .by_sequence = true, .loss_parallel = true};
  if (name == "fsdp_tp") c.model = {.fused = true, .tied = true};
  return c;
}

void say(const std::string& text) {
  const std::string line = text + "\n";
  if (write(STDOUT_FILENO, line.data(), line.size()) < 0) _exit(9);
}

}  // namespace

int main(int, char** argv) {
  at::set_num_threads(1);
  const Combination c = combination_of(argv[1]);
  const Group world = new_group("shm");
  const Trained eager = Trainer(c, world).train(/*is_captured=*/false);
  const Trained captured = Trainer(c, world).train(/*is_captured=*/true);
  std::string wrong = first_difference(eager, train_alone(c), {});
  if (wrong.empty()) wrong = first_difference(captured, eager, {.of_all = 0});
  if (wrong.empty() && captured.replays != kSteps - 3) wrong = "replayed too little: " + captured.reason;
  if (wrong.empty() && !same_on_all_ranks(captured.norms, world)) wrong = "norms differ among ranks";
  say(wrong.empty() ? "trained alike" : "wrong: " + wrong);
}
