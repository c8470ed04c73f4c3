// Tables of ranks from serried run --keep-going, by the line to the launcher.
#include "serried/elastic/launcher_generations.h"

#include <mutex>
#include <utility>

#include "serried/base/env.h"
#include "serried/comm/rendezvous/launch_environment.h"
#include "serried/comm/rendezvous/launcher_line.h"
#include "serried/comm/rendezvous/launcher_store.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::detail {
namespace {

class LauncherGenerations final : public Generations {
 public:
  LauncherGenerations(std::shared_ptr<LauncherLine> line, int64_t first) : line_(std::move(line)) {
    const LaunchEnvironment environment = read_launch_environment({});
    tell_table({.generation = first, .rank = environment.rank, .world_size = environment.world_size});
    static std::once_flag said;
    std::call_once(said, [this] { line_->say_elastic(); });
    line_->on_table([this](const RankTable& table) {
      tell_table({.generation = table.generation, .rank = table.rank, .world_size = table.world_size});
    });
    line_->on_over([this](const Over& over) { tell_over(over.generation); });
  }

  ~LauncherGenerations() override {
    line_->on_over({});
    line_->on_table({});
  }

  bool can_change() const override { return true; }

  void place(const GenerationTable& table, GroupOptions& options) override {
    options.store = open_generation_store(int(table.generation), options.timeout);
    options.rank = table.rank;
    options.world_size = table.world_size;
    std::lock_guard<std::mutex> lock(mutex_);
    generation_ = table.generation;
    store_ = options.store;
  }

  void end_waits(int64_t generation) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation != generation_) return;
    if (auto* store = dynamic_cast<LauncherStore*>(innermost_store(store_).get())) store->end_waits();
  }

 private:
  const std::shared_ptr<LauncherLine> line_;
  std::mutex mutex_;
  int64_t generation_ = -1;
  c10::intrusive_ptr<c10d::Store> store_;  // where it meets
};

}  // namespace

std::shared_ptr<Generations> generations_of_process() {
  const auto first = env::maybe_integer("SERRIED_GENERATION");
  const std::shared_ptr<LauncherLine> line = first ? LauncherLine::of_process() : nullptr;
  if (!line) return fixed_generation();
  return std::make_shared<LauncherGenerations>(line, *first);
}

}  // namespace serried::detail
