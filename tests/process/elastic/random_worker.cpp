// A rank of a training that is spread in a given way, which kills itself at random: <way> <seed> <deaths> <folder>. All
// of a job share the folder, where it is written who died where, and which steps counted. Some steps behind the last
// death it ends, compares itself with one process that nothing happened to, and prints a hash of its parameters.
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include "serried/checkpoint/blocks.h"
#include "serried/comm/collectives/observe.h"
#include "serried/elastic/elastic.h"
#include "tests/support/spread_training.h"

namespace {

using namespace serried;
namespace spread = serried::testing::spread;
using spread::Trainer;
using spread::Way;

constexpr const char* kPlaces[] = {"start",    "building", "meeting",          "transfer",  "forward",
                                   "backward", "commit",   "before_optimizer", "optimizer", "behind_optimizer"};

/// What the ranks of a job have written, one at a time: it ends with the process that holds it.
class Log {
 public:
  explicit Log(std::string path) : path_(std::move(path)) {}

  /// `write` gets all lines, and may return one more.
  void with(const std::function<std::string(const std::vector<std::string>& lines)>& write) {
    const int file = ::open(path_.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    ::flock(file, LOCK_EX);
    std::ifstream in(path_);
    std::vector<std::string> lines;
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    const std::string line = write(lines);
    if (!line.empty() && ::write(file, (line + "\n").data(), line.size() + 1) < 0) std::perror("log");
    ::close(file);
  }

 private:
  const std::string path_;
};

bool begins_with(const std::string& line, const char* word) {
  return line.rfind(word, 0) == 0;
}

int num_deaths(const std::vector<std::string>& lines) {
  return int(std::count_if(lines.begin(), lines.end(), [](const auto& each) { return begins_with(each, "death"); }));
}

/// Where and when this process dies; drawn for each that is started, and anew where it has not come by.
class Fate {
 public:
  Fate(Log& log, uint64_t seed, int most_deaths, std::function<int64_t()> step)
      : log_(log), most_deaths_(most_deaths), step_(std::move(step)) {
    const char* generation = std::getenv("SERRIED_GENERATION");
    dice_.seed(seed * 1000 + uint64_t(generation ? std::atoi(generation) : 0) * 16 +
               uint64_t(std::atoi(std::getenv("RANK"))));
    draw();
  }

  void met() { has_met_ = true; }
  void enter(const std::string& place) {
    if (place == "forward" && --steps_left_ < -3) draw();
    at_ = place;
    count_ = 0;
    come_by(place);
  }
  void call(const std::string& name) {
    come_by(at_ == "meeting" && (name == "send" || name == "recv") ? "transfer" : at_);
  }

 private:
  void draw() {
    place_ = kPlaces[dice_() % std::size(kPlaces)];
    nth_ = int(dice_() % 3);
    steps_left_ = int64_t(dice_() % 6);
  }

  void come_by(const std::string& place) {
    if (place != place_ || count_++ < nth_ || steps_left_ > 0) return;
    log_.with([&](const std::vector<std::string>& lines) -> std::string {
      if (num_deaths(lines) >= most_deaths_ || !may_be_missed(lines)) return "";
      return "death " + place + " in step " + std::to_string(step_()) + " of process " + std::to_string(::getpid());
    });
    log_.with([&](const std::vector<std::string>& lines) -> std::string {
      const std::string mine = "of process " + std::to_string(::getpid());
      const auto is_mine = [&](const std::string& line) { return line.size() > mine.size() && line.ends_with(mine); };
      if (std::any_of(lines.begin(), lines.end(), is_mine)) ::kill(::getpid(), SIGKILL);
      return "";
    });
  }

  // Others have copies of all that this one has: a step has counted since the last death.
  bool may_be_missed(const std::vector<std::string>& lines) const {
    if (!has_met_ && !lines.empty()) return true;
    return !lines.empty() && begins_with(lines.back(), "step");
  }

  Log& log_;
  const int most_deaths_;
  const std::function<int64_t()> step_;
  std::mt19937_64 dice_;
  std::string place_;
  int nth_ = 0;
  int64_t steps_left_ = 0;
  bool has_met_ = false;
  std::string at_ = "start";
  int count_ = 0;
};

uint64_t hash_of(const std::vector<at::Tensor>& values) {
  uint64_t all = 0;
  for (const at::Tensor& each : values) {
    all = all * 31 + checkpoint::detail::hash_of(each.contiguous().const_data_ptr(), int64_t(each.nbytes()));
  }
  return all;
}

}  // namespace

int main(int, char** argv) {
  ::alarm(280);  // whatever becomes of the test
  const Way way = spread::way_of(argv[1]);
  const int most_deaths = std::atoi(argv[3]);
  Log log(std::string(argv[4]) + "/log");
  Elastic elastic({.min_ranks = 2});
  Fate fate(log, std::strtoull(argv[2], nullptr, 10), most_deaths, [&] { return elastic.step(); });
  const observe::Observer observer([&](const observe::Call& call) { fate.call(call.name); });
  fate.enter("start");
  int64_t num_steps = 1'000'000'000;  // until it is agreed that there is an end
  elastic.keep("num_steps", &num_steps);
  std::optional<Trainer> trainer;
  if (way == Way::copies) {
    trainer.emplace(way, elastic.world());
    for (auto& [name, value] : trainer->contents()) elastic.keep(name, value);
    elastic.on_change([&](const Group& world) { trainer->set_world(world); });
  } else {
    elastic.rebuild([&](const Group& world) {
      fate.enter("building");
      trainer.emplace(way, world);
      fate.enter("meeting");
      return trainer->contents();
    });
  }
  while (elastic.step() < num_steps) {
    fate.enter("meeting");
    elastic.run([&] {
      fate.met();
      fate.enter("forward");
      trainer->optimizer().zero_grad();
      const at::Tensor loss = trainer->loss(elastic.step());
      fate.enter("backward");
      loss.backward();
      fate.enter("commit");
      at::Tensor deaths = at::zeros({}, at::kLong);
      if (elastic.world()->getRank() == 0) {
        log.with([&](const auto& lines) { return deaths.fill_(num_deaths(lines)), std::string(); });
      }
      all_reduce_(deaths, elastic.world(), c10d::ReduceOp::MAX);
      if (!elastic.commit()) return;
      fate.enter("before_optimizer");
      fate.enter("optimizer");
      trainer->optimizer().step();
      if (deaths.item<int64_t>() >= most_deaths) num_steps = std::min(num_steps, elastic.step() + 3);
      fate.enter("behind_optimizer");
      if (elastic.world()->getRank() != 0) return;
      log.with([&](const auto&) { return "step " + std::to_string(elastic.step()); });
      std::printf("step %ld\n", long(elastic.step())), std::fflush(stdout);
    });
  }
  const auto values = trainer->values();
  const std::string off = spread::difference(values, spread::trained_alone(num_steps), 1e-9);
  std::printf("%s; bits %016lx\n", off.empty() ? "equals one process" : ("DIFFERS: " + off).c_str(),
              (unsigned long)hash_of(values));
}
