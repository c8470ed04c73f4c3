// Trains three stages of a pipeline on three ranks, of which the second dies in its third step, at the action that the
// second argument names: "F0" to "F3", "B0" to "B3". The others say what they raise, and when.
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

constexpr int kVictim = 1;
constexpr int kStepOfDeath = 2;
constexpr int64_t kMicrobatches = 4;

/// Dies in the forward, or in the backward, whose turn has come.
struct StageImpl : torch::nn::Module {
  StageImpl() { layer = register_module("layer", torch::nn::Linear(8, 8)); }

  at::Tensor forward(const at::Tensor& x) {
    const int64_t mine = num_forwards++;
    const int64_t turn = kStepOfDeath * kMicrobatches + microbatch;
    if (!note.empty() && !in_backward && mine == turn) die();
    at::Tensor y = torch::tanh(layer(x));
    if (!note.empty() && in_backward && mine == turn) y.register_hook([this](const at::Tensor&) { die(); });
    return y;
  }
  void die() const {
    std::ofstream(note) << now_ms() << std::flush;
    kill(getpid(), SIGKILL);
  }

  torch::nn::Linear layer{nullptr};
  int64_t num_forwards = 0;
  std::string note;  // empty: lives
  bool in_backward = false;
  int64_t microbatch = 0;
};
TORCH_MODULE(Stage);

}  // namespace

int main(int, char** argv) {
  signal(SIGTERM, SIG_IGN);  // the launcher asks the others to end when one has died
  at::set_num_threads(1);
  const Group world = new_group("shm", {.timeout = 20s});
  Stage stage;
  if (world->getRank() == kVictim) {
    stage->note = argv[1];
    stage->in_backward = argv[2][0] == 'B';
    stage->microbatch = argv[2][1] - '0';
  }
  Pipeline pipe(stage, {.group = world,
                        .schedule = Schedule::OneFOneB,
                        .microbatches = kMicrobatches,
                        .loss = [](const at::Tensor& y, const at::Tensor& t) { return torch::mse_loss(y, t); }});
  try {
    for (int step = 0; step < kStepOfDeath + 2; ++step) pipe.step(torch::ones({6, 8}), torch::zeros({6, 8}));
    say("nothing was raised");
  } catch (const c10::DistBackendError& error) {
    int64_t died_at = 0;
    std::ifstream(argv[1]) >> died_at;
    say(c10::str("raised after ", now_ms() - died_at, " ms: ", error.what_without_backtrace()));
  }
}
