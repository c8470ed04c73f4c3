// Kills a rank of a pipeline at cells of a schedule's table, one after the other: all others must raise within 200 ms
// and name the rank, and the stage and the action at which they were.
//
// `pipeline_deaths <folder> <schedule> [cell...]`; without cells at all of the table. "1F2" dies in that action, "1F2!"
// once its output has been sent. With "2x2" in place of a schedule stages are data parallel, on four ranks. Each set of
// ranks is forked before LibTorch has any thread.
//
// A rank that neither hands on to the dead one nor reduces with it learns of the death from one that does: it may name
// that one, which has left.
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <regex>
#include <string>
#include <vector>

#include "serried/serried.h"
#include "tests/process/ranks/worker_output.h"

namespace serried::testing {
namespace {

using namespace std::chrono_literals;

constexpr int kStepOfDeath = 1;
constexpr int64_t kMicrobatches = 4;
constexpr int64_t kMostMs = 200;

enum Outcome : int { kRaised = 0, kNotRaised = 3 };

/// What ranks share with the process that watches them.
struct Page {
  std::atomic<int64_t> died_at{0};
  struct Report {
    std::atomic<int64_t> raised_at{0};
    std::array<char, 4096> text{};
  };
  std::array<Report, 4> reports{};
};

struct Cell {
  char kind = 'F';
  int64_t stage = 0;
  int64_t microbatch = 0;
  bool once_sent = false;

  static Cell parse(const std::string& text) { return {text[1], text[0] - '0', text[2] - '0', text.ends_with('!')}; }
  std::string text() const { return c10::str(stage, std::string(1, kind), microbatch, once_sent ? "!" : ""); }
};

struct Plan {
  Schedule schedule = Schedule::OneFOneB;
  int64_t pipeline_ranks = 3;
  int64_t data_ranks = 1;
  Cell cell = {};
  std::string meeting = {};

  PipelineTable table() const {
    return pipeline_table(schedule, {.ranks = pipeline_ranks,
                                     .stages_per_rank = stages_per_rank_of(schedule).value_or(2),
                                     .microbatches = kMicrobatches});
  }
  int world_size() const { return int(pipeline_ranks * data_ranks); }
  /// Whether a rank waits for the victim itself.
  bool sees_victim(int rank) const {
    const bool reduces = cell.kind == 'B' && cell.microbatch + 1 == kMicrobatches;
    const bool is_same_stage = rank / data_ranks == victim() / data_ranks;
    return rank % data_ranks == victim() % data_ranks || (reduces && is_same_stage);
  }
  /// Of the data-parallel ranks the last one.
  int victim() const { return int(table().rank_of(cell.stage) * data_ranks + data_ranks - 1); }
};

Page* page = nullptr;

int num_raised() {
  int count = 0;
  for (const Page::Report& report : page->reports) count += int(report.raised_at != 0);
  return count;
}

void die() {
  page->died_at = now_ms();
  kill(getpid(), SIGKILL);
}

/// A copy that kills the process when nobody has it any more: the graph does not keep it, so that is once it is sent.
struct DieOnceSent : torch::autograd::Function<DieOnceSent> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) {
    const auto values = std::make_shared<at::Tensor>(x.clone());
    return at::from_blob(
        values->mutable_data_ptr(), x.sizes(), [values](void*) { die(); }, x.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return gradients;
  }
};

/// Dies at its cell: in the forward (F), in that of its backwards in which the gradient of its output comes (B, I), or
/// in that in which the gradient of its weight is there (W).
struct StageImpl : torch::nn::Module {
  StageImpl() { layer = register_module("layer", torch::nn::Linear(8, 8)); }

  void dies_at(const Cell& cell) {
    cell_ = cell;
    turn_ = kStepOfDeath * kMicrobatches + cell.microbatch;
    if (cell.kind != 'W') return;
    layer->weight.register_hook([this](const at::Tensor&) {
      if (num_weights_++ == turn_) die();
    });
  }
  at::Tensor forward(const at::Tensor& x) {
    const bool has_come = num_forwards_++ == turn_;
    if (has_come && cell_.kind == 'F' && !cell_.once_sent) die();
    at::Tensor y = torch::tanh(layer(x));
    if (has_come && (cell_.kind == 'B' || cell_.kind == 'I')) y.register_hook([](const at::Tensor&) { die(); });
    return has_come && cell_.once_sent ? DieOnceSent::apply(y) : y;
  }

  torch::nn::Linear layer{nullptr};

 private:
  Cell cell_;
  int64_t turn_ = -1, num_forwards_ = 0, num_weights_ = 0;
};
TORCH_MODULE(Stage);

void run_steps(const Plan& plan, const Group& world) {
  const DeviceMesh mesh =
      init_device_mesh("cpu", {plan.pipeline_ranks, plan.data_ranks}, {"pp", "dp"}, {.group = world});
  const Group pp = mesh.get_group("pp");
  const PipelineTable table = plan.table();
  std::vector<PipelineStage> stages;
  for (const int64_t index : table.stages_of(pp->getRank())) {
    Stage stage;
    if (index == plan.cell.stage && world->getRank() == plan.victim()) stage->dies_at(plan.cell);
    if (plan.data_ranks == 1) {
      stages.emplace_back(stage);
    } else {
      stages.emplace_back(
          std::make_shared<DistributedDataParallel<Stage>>(stage, DDPOptions{.process_group = mesh.get_group("dp")}));
    }
  }
  Pipeline pipe(stages, {.group = pp,
                         .schedule = plan.schedule,
                         .microbatches = kMicrobatches,
                         .loss = [](const at::Tensor& y, const at::Tensor& t) { return torch::mse_loss(y, t); }});
  const at::Tensor input = torch::ones({6, 8}), target = torch::zeros({6, 8});
  for (int step = 0; step < kStepOfDeath + 3; ++step) pipe.step(input, target);
}

[[noreturn]] void be_rank(const Plan& plan, int rank) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  Page::Report& report = page->reports[size_t(rank)];
  try {
    const Group world =
        new_group("shm", {.timeout = 20s, .init_method = plan.meeting, .rank = rank, .world_size = plan.world_size()});
    run_steps(plan, world);
  } catch (const std::exception& error) {
    const int64_t now = now_ms();
    const auto* known = dynamic_cast<const c10::Error*>(&error);
    std::snprintf(report.text.data(), report.text.size(), "%s",
                  known != nullptr ? known->what_without_backtrace() : error.what());
    report.raised_at = now;
    // Who leaves at once would be what the others name.
    while (num_raised() < plan.world_size() - 1 && now_ms() < page->died_at + 3 * kMostMs) usleep(500);
    _exit(kRaised);
  }
  _exit(kNotRaised);
}

/// What is wrong with what a survivor raised; empty: nothing.
std::string fault_of(const Plan& plan, int rank) {
  const Page::Report& report = page->reports[size_t(rank)];
  const std::string text = report.text.data();
  if (text.empty()) return "raised nothing";
  const int64_t after = report.raised_at - page->died_at;
  if (after > kMostMs) return c10::str("raised after ", after, " ms: ", text);
  const int64_t victim = plan.victim() / plan.data_ranks, data_victim = plan.victim() % plan.data_ranks;
  const std::string by_name = c10::str("rank ", victim, " is gone|rank ", data_victim, " \\(pid \\d+\\) died");
  const std::regex named(plan.sees_victim(rank) ? by_name : by_name + "|rank \\d has left the group");
  // At an action, or behind the last of the step; who waits for a rank says for which action of it.
  const std::regex placed(c10::str("\\((at|after) [FBIW] s\\d m\\d on rank ", rank / plan.data_ranks,
                                   " of the pipeline(, which waits for (F s\\d m\\d|the gradient of stage \\d) on rank "
                                   "\\d|, while its last messages)?"));
  if (!std::regex_search(text, named)) return "does not name rank " + std::to_string(victim) + ": " + text;
  if (!std::regex_search(text, placed)) return "does not say where it was: " + text;
  return "";
}

/// Whether all of them did as they should.
bool run(const Plan& plan) {
  new (page) Page;
  std::vector<pid_t> children;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    const pid_t child = fork();
    if (child == 0) be_rank(plan, rank);
    children.push_back(child);
  }
  bool good = true;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    int status = 0;
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (waitpid(children[size_t(rank)], &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) kill(children[size_t(rank)], SIGKILL);
      usleep(500);
    }
    const bool is_victim = rank == plan.victim();
    const bool ended = is_victim ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == kRaised;
    const std::string fault = !ended ? c10::str("ended with status ", status) : is_victim ? "" : fault_of(plan, rank);
    if (fault.empty()) continue;
    std::fprintf(stderr, "%s, rank %d dies at %s: rank %d %s\n", to_string(plan.schedule).c_str(), plan.victim(),
                 plan.cell.text().c_str(), rank, fault.c_str());
    good = false;
  }
  return good;
}

std::vector<Cell> all_cells(const PipelineTable& table) {
  std::vector<Cell> cells;
  for (const PipelineTable::Row& row : table.rows()) {
    for (const PipelineAction& action : row) cells.push_back(Cell::parse(to_cell(action)));
  }
  return cells;
}

int check(int argc, char** argv) {
  Plan plan;
  if (argv[2] == std::string("2x2")) {
    plan.pipeline_ranks = plan.data_ranks = 2;
  } else {
    plan.schedule = parse_schedule(argv[2]);
  }
  std::vector<Cell> cells;
  for (int i = 3; i < argc; ++i) cells.push_back(Cell::parse(argv[i]));
  if (cells.empty()) cells = all_cells(plan.table());
  int failures = 0;
  for (size_t i = 0; i < cells.size(); ++i) {
    plan.cell = cells[i];
    const std::string path = c10::str(argv[1], "/serried_deaths_", getpid(), "_", i);
    plan.meeting = "file://" + path;
    failures += run(plan) ? 0 : 1;
    unlink(path.c_str());
  }
  std::printf("%s: %zu deaths, %d failures\n", argv[2], cells.size(), failures);
  return failures == 0 && !cells.empty() ? 0 : 1;
}

}  // namespace
}  // namespace serried::testing

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  setenv("SERRIED_SHUTDOWN_TIMEOUT", "0", 1);
  void* memory =
      mmap(nullptr, sizeof(serried::testing::Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  serried::testing::page = static_cast<serried::testing::Page*>(memory);
  return serried::testing::check(argc, argv);
}
