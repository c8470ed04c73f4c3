// The loop of steps: meet where ranks have changed, try, count or put back.
#include "serried/elastic/elastic_run.h"

#include <ATen/ATen.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/save_job.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/door.h"
#include "serried/comm/collectives/watch.h"
#include "serried/comm/groups/communication_error.h"
#include "serried/elastic/launcher_generations.h"
#include "serried/elastic/spread_meeting.h"
#include "serried/tape/tape.h"

namespace serried::detail {
namespace {

constexpr const char* kWhere = "Elastic";

using std::chrono::steady_clock;

Group group_of_this_rank(const ElasticOptions& options) {
  return new_group(
      options.backend,
      {.timeout = options.timeout, .store = c10::make_intrusive<c10d::HashStore>(), .rank = 0, .world_size = 1});
}

ElasticOptions checked(ElasticOptions options) {
  if (options.min_ranks < 1) {
    raise<c10::ValueError>({kWhere, c10::str("min_ranks is ", options.min_ranks), "pass 1 or more"});
  }
  if (!options.generations) options.generations = generations_of_process();
  return options;
}

bool is_enough(const GenerationTable& table, int min_ranks) {
  return table.world_size < 0 || table.world_size >= min_ranks;
}

}  // namespace

ElasticRun::ElasticRun(ElasticOptions options)
    : options_(checked(std::move(options))),
      generations_(options_.generations),
      current_(generations_),
      world_(group_of_this_rank(options_)),
      before_step_(std::in_place, device_of(world_)) {}

const Group& ElasticRun::world() const {
  if (tape::is_recording()) {
    tape::rely_on({"the generation of Elastic's world()", [changes = num_changes_] { return *changes; }, this});
  }
  return world_;
}

void ElasticRun::check_before_first_run(const char* where) const {
  if (generation_ < 0 && !in_step_) return;
  raise<c10::ValueError>({where, "the first run has begun", "call it before, right after the constructor"});
}

void ElasticRun::set_step(int64_t step) {
  check_before_first_run("Elastic::set_step");
  if (step < 0) raise<c10::ValueError>({"Elastic::set_step", c10::str("step is ", step), "pass 0 or more"});
  standing_.step = step;
}

void ElasticRun::add(checkpoint::Entry entry) {
  check_before_first_run("Elastic::keep");
  try {
    checkpoint::detail::check_entry_name(entry.name);
    if (std::any_of(kept_.begin(), kept_.end(), [&](const auto& each) { return each.name == entry.name; })) {
      checkpoint::detail::fail(c10::str("the name \"", entry.name, "\" is there twice"),
                               "give each thing a name of its own");
    }
    checkpoint::Contents all = kept_;
    all.push_back(entry);
    const KeptState state = kept_state(all);
    incoming_state(all, manifest_of(state), 0);  // what cannot be written is refused now, not at the first loss
    kept_ = std::move(all);
  } catch (const checkpoint::detail::Failure& failure) {
    checkpoint::detail::raise_failure("Elastic::keep", failure);
  }
}

void ElasticRun::keep(checkpoint::Entry entry) {
  add(entry);
  before_step_->keep(entry);
}

void ElasticRun::keep(std::string name, torch::optim::Optimizer& optimizer) {
  add({std::move(name), checkpoint::state_of(optimizer)});
  before_step_->keep(optimizer);
}

void ElasticRun::rebuild(std::function<checkpoint::Contents(const Group&)> build) {
  check_before_first_run("Elastic::rebuild");
  if (!build) {
    raise<c10::ValueError>({"Elastic::rebuild", "the function is empty", "pass one that returns what it has built"});
  }
  if (build_) {
    raise<c10::ValueError>({"Elastic::rebuild", "called a second time", "build everything in one function"});
  }
  build_ = std::move(build);
}

void ElasticRun::on_change(std::function<void(const Group&)> callback) {
  if (!callback) raise<c10::ValueError>({"Elastic::on_change", "the function is empty", "pass a function"});
  callbacks_.push_back(std::move(callback));
}

bool ElasticRun::must_meet() const {
  return generation_ < 0 || has_lost_ || heard_of_ > generation_ || generations_->is_over(generation_);
}

GenerationTable ElasticRun::next_table() const {
  std::optional<GenerationTable> table;
  const auto is_there = [&] {
    table = generations_->newest();
    return table && table->generation > tried_ && !generations_->is_over(table->generation) &&
           is_enough(*table, options_.min_ranks);
  };
  if (generations_->wait(is_there, steady_clock::now() + options_.join_timeout)) return *table;
  const std::string what = table && !is_enough(*table, options_.min_ranks)
                               ? c10::str(table->world_size, table->world_size == 1 ? " rank is" : " ranks are",
                                          " there, and min_ranks is ", options_.min_ranks)
                               : std::string("no new table of ranks has come from the launcher");
  raise<c10::DistBackendError>({kWhere, c10::str("waited ", options_.join_timeout.count(), " ms: ", what),
                                "start more ranks, raise .join_timeout, or lower .min_ranks"});
}

void ElasticRun::meet() {
  while (true) {
    const GenerationTable table = next_table();
    current_.begin_meeting(table.generation, has_lost_ || generations_->is_over(tried_));
    tried_ = table.generation;
    try {
      return meet_in(table);
    } catch (const checkpoint::detail::Failure& failure) {
      checkpoint::detail::raise_failure(kWhere, failure);
    } catch (...) {
      if (!is_loss(std::current_exception(), table.generation)) throw;
      has_lost_ = true;
    }
  }
}

void ElasticRun::meet_in(const GenerationTable& table) {
  const LiveGroupsGuard groups(current_.groups());
  GroupOptions where{.timeout = options_.timeout};
  generations_->place(table, where);
  const Group group = new_group(options_.backend, where);
  if (group->getSize() < options_.min_ranks) {
    raise<c10::ValueError>({kWhere,
                            c10::str("the job has ", group->getSize(), " ranks, and min_ranks is ", options_.min_ranks),
                            "start more ranks, or lower .min_ranks"});
  }
  const ThreadRankLabel label({.rank = group->getRank(), .world_size = group->getSize()});
  if (build_) {
    rebuild_in(group);
  } else {
    bring_to_one_state(group, kept_, standing_);
  }
  settle(group);
  world_ = group;
  ++*num_changes_;
  generation_ = heard_of_ = table.generation;
  has_lost_ = false;
  log::line(log::Topic::comm, "Elastic: generation ", generation_, " has ", group->getSize(), " ranks, at step ",
            standing_.step);
  for (const auto& callback : callbacks_) callback(world_);
}

// A rank that has met goes on in this generation, whatever newer table comes; one that has not goes to that one. All
// have met behind this, or none: who goes on alone would wait for the others in the next group that it makes.
void ElasticRun::settle(const Group& group) {
  if (!current_.end_meeting()) {
    raise<c10::DistBackendError>({kWhere, "the ranks changed while they met", "nothing: they meet again"});
  }
  const watch::PartOf scope("Elastic's meeting");
  barrier(group);
}

void ElasticRun::rebuild_in(const Group& group) {
  if (built_ && standing_.condition == Condition::whole) versions_.collect(standing_.step, *built_);
  built_.reset();  // refers to what is built anew now
  checkpoint::Contents built = build_(group);
  built.insert(built.begin(), kept_.begin(), kept_.end());
  bring_parts_together(group, built, versions_, standing_);
  before_step_.emplace(device_of(group));
  for (const checkpoint::Entry& entry : built) before_step_->keep(entry);
  built_ = std::move(built);
}

void ElasticRun::run(const std::function<void()>& fn) {
  checkpoint::detail::refuse_recording("Elastic::run");
  if (!fn) raise<c10::ValueError>({"Elastic::run", "the function is empty", "pass what a step does"});
  if (in_step_) {
    raise<c10::ValueError>(
        {"Elastic::run", "called inside of another run", "make one step of both, with one commit()"});
  }
  do {
    if (must_meet()) meet();
  } while (!attempt(fn));
}

bool ElasticRun::attempt(const std::function<void()>& fn) {
  const LiveGroupsGuard groups(current_.groups());
  const ThreadRankLabel label({.rank = world_->getRank(), .world_size = world_->getSize()});
  before_step_->take();
  if (build_) versions_.begin_step(standing_.step, *built_);
  vote_ = Vote::none;
  in_step_ = true;
  try {
    fn();
    in_step_ = false;
  } catch (...) {
    in_step_ = false;
    recover(std::current_exception());
    return false;
  }
  end_step();
  return true;
}

void ElasticRun::end_step() {
  if (vote_ == Vote::none) {
    raise<c10::ValueError>({"Elastic::run", c10::str("step ", standing_.step, " ended without commit()"),
                            "end it with if (elastic.commit()) optimizer.step(), on every rank"});
  }
  if (vote_ == Vote::refused) return before_step_->put_back();
  ++standing_.step;
}

void ElasticRun::recover(const std::exception_ptr& error) {
  if (!is_loss(error, generation_)) std::rethrow_exception(error);
  log::line(log::Topic::comm, "Elastic: a rank was lost in step ", standing_.step, ", which is done again");
  has_lost_ = true;
  // Behind commit(), optimizers may have stepped or not.
  if (vote_ == Vote::passed) standing_.condition = Condition::torn;
  before_step_->put_back();
}

bool ElasticRun::is_loss(const std::exception_ptr& error, int64_t generation) const {
  if (!generations_->can_change() || !is_communication_error(error)) return false;
  return generations_->wait([&] { return generations_->has_ended(generation); },
                            steady_clock::now() + options_.loss_timeout);
}

bool ElasticRun::commit(bool fine) {
  checkpoint::detail::refuse_recording("Elastic::commit");
  if (!in_step_ || vote_ != Vote::none) {
    raise<c10::ValueError>({"Elastic::commit", in_step_ ? "called twice in one step" : "called outside of run",
                            "call it once in the function that is passed to run"});
  }
  const watch::PartOf scope("Elastic's commit");
  const at::NoGradGuard no_grad;
  const auto newest = generations_->newest();
  const int64_t step = standing_.step;
  const at::Tensor ballot = at::tensor({int64_t(!fine), newest ? newest->generation : -1, step, -step},
                                       at::device(device_of(world_)).dtype(at::kLong));
  all_reduce_(ballot, world_, c10d::ReduceOp::MAX);
  const at::Tensor count = ballot.cpu();
  const auto* of_all = count.const_data_ptr<int64_t>();
  if (of_all[2] != -of_all[3]) {
    raise<c10::ValueError>({"Elastic::commit", c10::str("ranks are at the steps ", -of_all[3], " to ", of_all[2]),
                            "let an exception that leaves run() end the rank: the others have counted the step"});
  }
  heard_of_ = std::max(heard_of_, of_all[1]);
  vote_ = of_all[0] == 0 ? Vote::passed : Vote::refused;
  if (build_ && vote_ == Vote::passed) versions_.passed();
  return vote_ == Vote::passed;
}

}  // namespace serried::detail
