// Trains a pipeline on three ranks, one of which dies in its third step, in the action that the arguments name: a file
// for the time of death, a schedule, a cell as in its table ("1F0", "5I3"), and how many elements a row has. The others
// say what they raise, and when.
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <string>

#include "serried/serried.h"
#include "tests/process/ranks/worker_output.h"

namespace {

using namespace serried;
using namespace std::chrono_literals;
using serried::testing::now_ms;
using serried::testing::say;

constexpr int kStepOfDeath = 2;
constexpr int64_t kMicrobatches = 4;

/// When a stage dies: in its `turn`-th forward (F), in that of its backwards in which the gradient of its output comes
/// (B, I), or in that in which the gradient of its weight is there (W).
struct Death {
  std::string note;  // empty: never
  char kind = 'F';
  int64_t turn = 0;
};

struct StageImpl : torch::nn::Module {
  StageImpl() { layer = register_module("layer", torch::nn::Linear(8, 8)); }

  void dies_by(const Death& d) {
    death = d;
    if (death.kind != 'W') return;
    layer->weight.register_hook([this](const at::Tensor&) {
      if (num_weights++ == death.turn) die();
    });
  }
  at::Tensor forward(const at::Tensor& x) {
    const bool has_come = !death.note.empty() && num_forwards++ == death.turn;
    if (has_come && death.kind == 'F') die();
    at::Tensor y = torch::tanh(layer(x));
    if (has_come && (death.kind == 'B' || death.kind == 'I')) y.register_hook([this](const at::Tensor&) { die(); });
    return y;
  }
  void die() const {
    std::ofstream(death.note) << now_ms() << std::flush;
    kill(getpid(), SIGKILL);
  }

  torch::nn::Linear layer{nullptr};
  Death death;
  int64_t num_forwards = 0, num_weights = 0;
};
TORCH_MODULE(Stage);

}  // namespace

int main(int, char** argv) {
  signal(SIGTERM, SIG_IGN);  // the launcher asks the others to end when one has died
  at::set_num_threads(1);
  const Group world = new_group("shm", {.timeout = 20s});
  const Schedule schedule = parse_schedule(argv[2]);
  const std::string cell = argv[3];
  const int64_t width = std::stoll(argv[4]);
  const PipelineTable table = pipeline_table(schedule, {.ranks = world->getSize(),
                                                        .stages_per_rank = stages_per_rank_of(schedule).value_or(2),
                                                        .microbatches = kMicrobatches});
  std::vector<PipelineStage> stages;
  for (const int64_t index : table.stages_of(world->getRank())) {
    Stage stage;
    if (index == cell[0] - '0') stage->dies_by({argv[1], cell[1], kStepOfDeath * kMicrobatches + cell[2] - '0'});
    stages.emplace_back(stage);
  }
  Pipeline pipe(stages, {.group = world,
                         .schedule = schedule,
                         .microbatches = kMicrobatches,
                         .loss = [](const at::Tensor& y, const at::Tensor& t) { return torch::mse_loss(y, t); }});
  const at::Tensor input = torch::ones({6, width / 8, 8}), target = torch::zeros({6, width / 8, 8});
  try {
    for (int step = 0; step < kStepOfDeath + 2; ++step) pipe.step(input, target);
    say("nothing was raised");
  } catch (const c10::DistBackendError& error) {
    int64_t died_at = 0;
    std::ifstream(argv[1]) >> died_at;
    say(c10::str("raised after ", now_ms() - died_at, " ms: ", error.what_without_backtrace()));
  }
}
