// Kills a rank of a pipeline at cells of a schedule's table, one after the other: all others must raise within 200 ms
// (more where the machine had no time for this program either) and name the rank, and the stage and the action at which
// they were.
//
// `pipeline_deaths <folder> <schedule>[,kind...] <cell...>`. A rank dies
//     "1F2"   in that action,
//     "1F2!"  once its output has been sent to another rank,
//     "1F2?"  while it waits for what the action needs from another rank, which kills it,
//     "-1"    between two steps, rank 1.
// "in", "sent", "waiting" and "between" stand for all cells of the table of that sort. Kinds: "ddp" and "sharded" make
// stages data parallel, on 2 x 2 ranks; "captured" kills behind some replays; "gloo" takes that backend; "wide" sends
// messages larger than what is on its way at once; "tied" ties a weight of the first stage and of the last. Each set of
// ranks is forked before LibTorch has any thread.
//
// A rank that neither hands on to the dead one nor reduces with it learns of the death from one that does: it may name
// that one, which has left.
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <new>
#include <optional>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "serried/serried.h"
#include "tests/process/ranks/worker_output.h"

namespace serried::testing {
namespace {

using namespace std::chrono_literals;

constexpr int kStepOfDeath = 1;
constexpr int kReplayOfDeath = 5;  // behind some replays
constexpr int64_t kMicrobatches = 4;
constexpr int64_t kMostMs = 200;

enum Outcome : int { kRaised = 0, kNotRaised = 3 };

/// What ranks share with the process that watches them.
struct Page {
  std::atomic<int64_t> died_at{0};
  std::array<std::atomic<pid_t>, 4> pids{};
  struct Report {
    std::atomic<int64_t> raised_at{0};
    std::array<char, 4096> text{};
  };
  std::array<Report, 4> reports{};
};

struct Cell {
  enum class Moment : char { in = ' ', sent = '!', waiting = '?', between = '-' };

  char kind = 'F';
  int64_t stage = 0;  // between steps: the rank
  int64_t microbatch = 0;
  Moment moment = Moment::in;

  static Cell parse(const std::string& text) {
    if (text[0] == '-') return {.stage = text[1] - '0', .moment = Moment::between};
    const Moment moment = text.size() > 3 ? Moment(text[3]) : Moment::in;
    return {text[1], text[0] - '0', text[2] - '0', moment};
  }
  std::string text() const {
    if (moment == Moment::between) return c10::str("-", stage);
    return c10::str(stage, std::string(1, kind), microbatch, moment == Moment::in ? "" : std::string(1, char(moment)));
  }
  /// Of a rank that has the stage.
  int64_t turn() const { return kStepOfDeath * kMicrobatches + microbatch; }
};

using Moment = Cell::Moment;

struct Plan {
  Schedule schedule = Schedule::OneFOneB;
  std::set<std::string> kinds = {};
  Cell cell = {};
  std::string meeting = {};

  bool is(const char* kind) const { return kinds.contains(kind); }
  bool has_data_ranks() const { return is("ddp") || is("sharded"); }
  int step_of_death() const { return is("captured") ? kReplayOfDeath : kStepOfDeath; }
  int64_t data_ranks() const { return has_data_ranks() ? 2 : 1; }
  int64_t pipeline_ranks() const { return has_data_ranks() ? 2 : 3; }
  int world_size() const { return int(pipeline_ranks() * data_ranks()); }
  PipelineTable table() const {
    return pipeline_table(schedule, {.ranks = pipeline_ranks(),
                                     .stages_per_rank = stages_per_rank_of(schedule).value_or(2),
                                     .microbatches = kMicrobatches});
  }
  /// Of the data-parallel ranks the last one.
  int victim() const {
    const int64_t rank = cell.moment == Moment::between ? cell.stage : table().rank_of(cell.stage);
    return int((rank + 1) * data_ranks() - 1);
  }
  /// Whether a rank waits for the victim itself.
  bool sees_victim(int rank) const {
    if (rank % data_ranks() == victim() % data_ranks()) return true;
    const bool reduces = (cell.kind == 'B' || cell.kind == 'W') && cell.microbatch + 1 == kMicrobatches;
    return reduces && rank / data_ranks() == victim() / data_ranks();
  }
  /// The stage that makes what `cell` needs; none: it needs nothing.
  std::optional<int64_t> maker_of(const Cell& c) const {
    if (c.kind == 'W') return std::nullopt;
    const int64_t stage = c.kind == 'F' ? c.stage - 1 : c.stage + 1;
    return stage >= 0 && stage < table().stages() ? std::optional(stage) : std::nullopt;
  }
  /// The stage that takes what `cell` makes.
  std::optional<int64_t> taker_of(const Cell& c) const {
    return maker_of({.kind = c.kind == 'F' ? 'B' : c.kind == 'W' ? 'W' : 'F', .stage = c.stage});
  }
  bool is_elsewhere(std::optional<int64_t> stage, const Cell& from) const {
    return stage && table().rank_of(*stage) != table().rank_of(from.stage);
  }
  /// Whether the action has the message that the moment is about.
  bool happens(const Cell& c) const {
    if (c.moment == Moment::sent) return is_elsewhere(taker_of(c), c);
    return c.moment != Moment::waiting || is_elsewhere(maker_of(c), c);
  }
};

Page* page = nullptr;

int num_raised() {
  int count = 0;
  for (const Page::Report& report : page->reports) count += int(report.raised_at != 0);
  return count;
}

void end_rank(pid_t pid) {
  page->died_at = now_ms();
  kill(pid, SIGKILL);
}

void die() {
  end_rank(getpid());
}

// What follows the name in parentheses: R runs, S sleeps.
bool is_asleep(pid_t pid) {
  std::ifstream file(c10::str("/proc/", pid, "/stat"));
  std::string line;
  std::getline(file, line);
  const size_t end = line.rfind(')');
  return end != std::string::npos && line[end + 2] == 'S';
}

/// Once it has nothing to do but to wait: what it waits for is made here.
void kill_waiting(int victim) {
  const pid_t pid = page->pids[size_t(victim)];
  while (!is_asleep(pid)) sched_yield();
  end_rank(pid);
}

/// A copy that kills the process when nobody has it any more: no graph keeps it, so that is once it is sent.
at::Tensor deadly_copy(const at::Tensor& x) {
  const auto values = std::make_shared<at::Tensor>(x.detach().clone());
  return at::from_blob(
      values->mutable_data_ptr(), x.sizes(), [values](void*) { die(); }, x.options());
}

struct DieOnceSent : torch::autograd::Function<DieOnceSent> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return deadly_copy(x); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return gradients;
  }
};

/// What a stage does at one of its turns: in its forward (F), in that of its backwards in which the gradient of its
/// output comes (B, I), or in that in which the gradient of its weight is there (W).
struct Deed {
  char kind = 'F';
  int64_t turn = -1;
  std::function<void()> act = {};
  bool once_sent = false;  // dies then, in place of acting
};

struct StageImpl : torch::nn::Module {
  StageImpl() { layer = register_module("layer", torch::nn::Linear(8, 8)); }

  void does(Deed deed) {
    deed_ = std::move(deed);
    if (deed_.kind != 'W') return;
    layer->weight.register_hook([this](const at::Tensor&) {
      if (num_weights_++ == deed_.turn) deed_.act();
    });
  }
  at::Tensor forward(const at::Tensor& x) {
    const bool has_come = num_forwards_++ == deed_.turn;
    const bool in_backward = has_come && (deed_.kind == 'B' || deed_.kind == 'I');
    const bool in_forward = has_come && deed_.kind == 'F';
    if (in_backward && deed_.once_sent)
      x.register_hook([](const at::Tensor& gradient) { return deadly_copy(gradient); });
    if (in_forward && !deed_.once_sent) deed_.act();
    at::Tensor y = torch::tanh(layer(x));
    if (in_backward && !deed_.once_sent) y.register_hook([act = deed_.act](const at::Tensor&) { act(); });
    return in_forward && deed_.once_sent ? DieOnceSent::apply(y) : y;
  }

  torch::nn::Linear layer{nullptr};

 private:
  Deed deed_;
  int64_t num_forwards_ = 0, num_weights_ = 0;
};
TORCH_MODULE(Stage);

/// What a stage of this rank does of the plan.
std::optional<Deed> deed_of(const Plan& plan, int64_t stage, int rank) {
  const Cell& cell = plan.cell;
  const bool is_victim = rank == plan.victim();
  if (is_victim && stage == cell.stage && (cell.moment == Moment::in || cell.moment == Moment::sent)) {
    return Deed{cell.kind, cell.turn(), die, cell.moment == Moment::sent};
  }
  const bool kills = cell.moment == Moment::waiting && plan.maker_of(cell) == stage && !is_victim &&
                     rank % plan.data_ranks() == plan.victim() % plan.data_ranks();
  if (!kills) return std::nullopt;
  return Deed{cell.kind, cell.turn(), [victim = plan.victim()] { kill_waiting(victim); }};
}

PipelineStage stage_within(const Plan& plan, Stage stage, const DeviceMesh& mesh) {
  if (plan.is("ddp")) {
    return std::make_shared<DistributedDataParallel<Stage>>(stage, DDPOptions{.process_group = mesh.get_group("dp")});
  }
  if (plan.is("sharded")) fully_shard(*stage, {.mesh = mesh["dp"]});
  return stage;
}

void run_steps(const Plan& plan, const Group& world) {
  const DeviceMesh mesh =
      init_device_mesh("cpu", {plan.pipeline_ranks(), plan.data_ranks()}, {"pp", "dp"}, {.group = world});
  const Group pp = mesh.get_group("pp");
  const PipelineTable table = plan.table();
  std::vector<PipelineStage> stages;
  for (const int64_t index : table.stages_of(pp->getRank())) {
    Stage stage;
    if (const std::optional<Deed> deed = deed_of(plan, index, world->getRank())) stage->does(*deed);
    stages.push_back(stage_within(plan, stage, mesh));
  }
  PipelineOptions options{.group = pp,
                          .schedule = plan.schedule,
                          .microbatches = kMicrobatches,
                          .loss = [](const at::Tensor& y, const at::Tensor& t) { return torch::mse_loss(y, t); }};
  if (plan.is("tied")) options.tied = {{{0, "layer.weight"}, {table.stages() - 1, "layer.weight"}}};
  Pipeline pipe(stages, options);
  const at::Tensor input = torch::ones({6, plan.is("wide") ? 1 << 13 : 1, 8}), target = torch::zeros_like(input);
  const bool dies_between = plan.cell.moment == Moment::between && world->getRank() == plan.victim();
  auto captured = capture([&](const at::Tensor& x, const at::Tensor& t) { return pipe.step(x, t); });
  for (int step = 0; step < plan.step_of_death() + 3; ++step) {
    if (dies_between && step == plan.step_of_death()) die();
    plan.is("captured") ? captured(input, target) : pipe.step(input, target);
  }
}

[[noreturn]] void be_rank(const Plan& plan, int rank) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);
  page->pids[size_t(rank)] = getpid();
  Page::Report& report = page->reports[size_t(rank)];
  try {
    const Group world =
        new_group(plan.is("gloo") ? "gloo" : "shm",
                  {.timeout = 20s, .init_method = plan.meeting, .rank = rank, .world_size = plan.world_size()});
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
std::string fault_of(const Plan& plan, int rank, int64_t most_ms) {
  const Page::Report& report = page->reports[size_t(rank)];
  const std::string text = report.text.data();
  if (text.empty()) return "raised nothing";
  const int64_t after = report.raised_at - page->died_at;
  if (after > most_ms) return c10::str("raised after ", after, " ms, not ", most_ms, ": ", text);
  const int64_t victim = plan.victim() / plan.data_ranks(), data_victim = plan.victim() % plan.data_ranks();
  const std::string by_name = c10::str("rank ", victim, " is gone|rank ", data_victim, " \\(pid \\d+\\) died",
                                       "|the process of rank ", victim, " has ended");
  const std::regex named(plan.sees_victim(rank) ? by_name : by_name + "|rank \\d has left the group");
  // At an action, behind the last of the step or before its first; who waits for a rank says for which action of it.
  const std::regex placed(c10::str("(\\(|\\n  )(at|after|before) [FBIW] s\\d m\\d on rank ", rank / plan.data_ranks(),
                                   " of the pipeline(, which waits for (F s\\d m\\d|the gradient of stage \\d) on rank "
                                   "\\d|, while its last messages|, while gradients of tied parameters)?"));
  if (!std::regex_search(text, named)) return "does not name rank " + std::to_string(victim) + ": " + text;
  // A replay knows messages and no actions.
  static const std::regex of_message("tag \\d+ \\(of a pipeline: the (output|gradient) of stage \\d\\)");
  if (plan.is("captured") && std::regex_search(text, of_message)) return "";
  if (!std::regex_search(text, placed)) return "does not say where it was: " + text;
  return "";
}

/// Sleeps for a moment. Returns by how much it was longer.
int64_t pause_ms() {
  const int64_t before = now_ms();
  usleep(500);
  return now_ms() - before;
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
  int64_t longest_pause = 0;
  for (int rank = 0; rank < plan.world_size(); ++rank) {
    int status = 0;
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (waitpid(children[size_t(rank)], &status, WNOHANG) == 0) {
      if (std::chrono::steady_clock::now() > deadline) kill(children[size_t(rank)], SIGKILL);
      longest_pause = std::max(longest_pause, pause_ms());
    }
    // A machine that has no time for who watches has none for the ranks, which take turns to tell each other.
    const int64_t most_ms = kMostMs + 4 * longest_pause;
    const bool is_victim = rank == plan.victim();
    const bool ended = is_victim ? WIFSIGNALED(status) : WIFEXITED(status) && WEXITSTATUS(status) == kRaised;
    const std::string fault = !ended      ? c10::str("ended with status ", status)
                              : is_victim ? ""
                                          : fault_of(plan, rank, most_ms);
    if (fault.empty()) continue;
    std::fprintf(stderr, "%s, rank %d dies at %s: rank %d %s\n", to_string(plan.schedule).c_str(), plan.victim(),
                 plan.cell.text().c_str(), rank, fault.c_str());
    good = false;
  }
  return good;
}

const std::map<std::string, Moment> kMoments = {
    {"in", Moment::in}, {"sent", Moment::sent}, {"waiting", Moment::waiting}, {"between", Moment::between}};

std::vector<Cell> all_cells(const Plan& plan, Moment moment) {
  std::vector<Cell> cells;
  if (moment == Moment::between) {
    for (int64_t rank = 0; rank < plan.pipeline_ranks(); ++rank) cells.push_back({.stage = rank, .moment = moment});
    return cells;
  }
  const PipelineTable table = plan.table();
  for (const PipelineTable::Row& row : table.rows()) {
    for (const PipelineAction& action : row) {
      Cell cell = Cell::parse(to_cell(action));
      cell.moment = moment;
      if (plan.happens(cell)) cells.push_back(cell);
    }
  }
  return cells;
}

// "zbv,wide"
Plan parse_plan(const std::string& text) {
  Plan plan;
  std::stringstream words(text);
  std::string word;
  std::getline(words, word, ',');
  plan.schedule = parse_schedule(word);
  while (std::getline(words, word, ',')) plan.kinds.insert(word);
  return plan;
}

int check(int argc, char** argv) {
  Plan plan = parse_plan(argv[2]);
  std::vector<Cell> cells;
  for (int i = 3; i < argc; ++i) {
    if (const auto sort = kMoments.find(argv[i]); sort != kMoments.end()) {
      const std::vector<Cell> all = all_cells(plan, sort->second);
      cells.insert(cells.end(), all.begin(), all.end());
    } else {
      cells.push_back(Cell::parse(argv[i]));
    }
  }
  for (const Cell& cell : cells) {
    if (plan.happens(cell)) continue;
    std::fprintf(stderr, "%s has no message to another rank\n", cell.text().c_str());
    return 2;
  }
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
  if (argc < 4) return 2;
  setenv("SERRIED_SHUTDOWN_TIMEOUT", "0", 1);
  void* memory =
      mmap(nullptr, sizeof(serried::testing::Page), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  serried::testing::page = static_cast<serried::testing::Page*>(memory);
  return serried::testing::check(argc, argv);
}
