// Elastic: training that goes on when ranks die, and takes in new ones.
#pragma once

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "serried/checkpoint/state.h"
#include "serried/comm/groups/group.h"

namespace serried {

namespace detail {
class ElasticRun;
class Generations;
}  // namespace detail

struct ElasticOptions {
  int min_ranks = 1;             // with fewer, run() waits for others
  std::string backend = "auto";  // of world()
  /// Of world()'s collectives; and how long ranks wait for each other where they meet.
  std::chrono::milliseconds timeout = default_timeout();
  /// How long run() waits where there are fewer than min_ranks.
  std::chrono::milliseconds join_timeout = std::chrono::minutes(5);
  /// After an error of communication, how long until it is taken for something else than the loss of a rank.
  std::chrono::milliseconds loss_timeout = std::chrono::seconds(15);
  std::shared_ptr<detail::Generations> generations = {};  // for tests; default: whatever the launcher says
};

/// Steps of training that all ranks do or none. Where a rank is lost in a step, those that are left put back buffers,
/// generators and kept values, and do it again; a rank that comes gets the state of the others between two steps. One
/// path serves start, loss and newcomers: the ranks meet, those behind take the state of those ahead, callbacks are
/// called, steps go on. At most the step under way is lost.
///     Elastic elastic({.min_ranks = 2});
///     elastic.keep("model", *net);
///     elastic.keep("optimizer", opt);
///     DistributedDataParallel ddp(net, {.process_group = elastic.world()});
///     elastic.on_change([&](const Group& world) { ddp.set_process_group(world); });
///     while (elastic.step() < 100) elastic.run([&] {
///       opt.zero_grad();
///       loss(ddp(batch(elastic.step(), elastic.world()))).backward();
///       if (elastic.commit()) opt.step();
///     });
/// Ranks die and come where the launcher keeps others alive; without such a launcher there is one table of ranks, and a
/// loss raises as without Elastic. Of one thread, but for what the launcher says.
class Elastic {
 public:
  explicit Elastic(ElasticOptions options = {});
  ~Elastic();
  Elastic(const Elastic&) = delete;

  /// The ranks that are there; this one alone until the first run. Whoever holds it gets the next one by on_change.
  const Group& world() const;
  /// Steps done: the number of the one that runs, or comes next.
  int64_t step() const;
  /// Goes on behind a checkpoint. Before the first run.
  void set_step(int64_t step);

  /// What ranks that are behind get, by name; the same names on every rank. It has to live as long as this. Gradients
  /// are not kept: a step begins without. ValueError for what is spread over ranks, of which no other rank has a copy.
  void keep(std::string name, torch::optim::Optimizer& optimizer);
  void keep(std::string name, checkpoint::Value value);
  /// Modules, schedulers, samplers: what checkpoint::state_of takes; and pointers to variables.
  template <class Thing>
  requires requires(Thing& thing) { checkpoint::state_of(thing); }
  void keep(std::string name, Thing& thing) {
    if constexpr (std::derived_from<Thing, torch::optim::Optimizer>) {
      keep(std::move(name), static_cast<torch::optim::Optimizer&>(thing));
    } else {
      keep(std::move(name), checkpoint::Value(checkpoint::state_of(thing)));
    }
  }

  /// For what is spread over the ranks: DTensors, parameters that fully_shard has cut, ZeroRedundancyOptimizer. Called
  /// on all ranks whenever they have changed, to build modules and optimizers for those that are there, on meshes of
  /// `world`; it returns what of it is kept, under the same names each time, and may communicate. Then all of that gets
  /// the state of the ranks that have it, however they had cut it. Where ranks that are lost had the only copy of a
  /// part, run() raises a ValueError with its name: then only a checkpoint helps. Each commit() takes a copy of this
  /// rank's parts, from which a step can be done again.
  ///     std::optional<Trainer> trainer;
  ///     elastic.rebuild([&](const Group& world) -> checkpoint::Contents {
  ///       trainer.emplace(world);  // fully_shard on a mesh of (replicate, shard)
  ///       return {{"model", state_of(trainer->net)}, {"optimizer", state_of(trainer->optimizer)}};
  ///     });
  void rebuild(std::function<checkpoint::Contents(const Group& world)> build);

  /// Called whenever world() has become another group, when the state is there; on all ranks, which may communicate.
  void on_change(std::function<void(const Group& world)> callback);

  /// One step: meets first where ranks have changed, then calls `fn`, again after a loss. `fn` does all it communicates
  /// before commit(), which it calls once. Exceptions of `fn` that no loss explains pass through.
  void run(const std::function<void()>& fn);

  /// Inside of run: whether the step counts. True on all ranks, or, where one of them passes false, false on all: then
  /// run puts back what it would after a loss and returns, and the step is still to do.
  bool commit(bool fine = true);

 private:
  std::unique_ptr<detail::ElasticRun> run_;
};

}  // namespace serried
