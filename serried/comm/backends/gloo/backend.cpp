// What surrounds each call, and the life of the backend.
#include "serried/comm/backends/gloo/backend.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/agree/own_address.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/agree/says_that_it_waits.h"
#include "serried/comm/collectives/nan_check.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::gloo {
namespace {

Store prefixed(const char* prefix, const Store& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// Another rank of this process may have a live group of the same name: only a name without a group is taken back.
void forget_name(const std::string& name) {
  if (name.empty()) return;
  try {
    c10d::resolve_process_group(name);
  } catch (const std::exception&) {
    try {
      c10d::unregister_process_group(name);
    } catch (const std::exception&) {  // it never was registered
    }
  }
}

void check_root(const watch::Record& record, int size) {
  if (record.root < size) return;
  raise<c10::ValueError>({"gloo", c10::str("the root of ", watch::describe(record), " is not in 0..", size - 1),
                          "pass a rank of this group, not of the world"});
}

// Each process that begins a group says so once.
void say_that_nobody_is_authenticated() {
  log::warn_once(
      "[new_group] gloo between hosts authenticates nobody: whoever reaches its ports can take a rank's place\n"
      "  fix: let only the hosts of the job reach the network between them");
}

}  // namespace

GlooBackend::GlooBackend(const Store& store, int rank, int world_size, const EngineOptions& options)
    : OwnBackend(rank, world_size),
      store_(store),
      options_(options),
      timeout_(options.timeout),
      calls_(make_shared_at_home<OpenCalls>(
          std::make_unique<detail::GroupStatus>(prefixed("watch", store), rank, world_size, options.timeout))) {
  if (rank == 0 && !calls_->status().one_host()) say_that_nobody_is_authenticated();
  EngineOptions chosen = options;
  chosen.address =
      calls_->status().one_host() ? "127.0.0.1" : detail::own_address({store, rank, world_size, options.timeout});
  engine_ = make_engine(prefixed("gloo", store), rank, world_size, chosen);
  // Nobody goes on before all are connected: the connections of one that has used and dropped the group by then would
  // close on those that still connect, and gloo takes that for a failure.
  detail::exchange({store, rank, world_size, options.timeout}, "new_group", "connected", "");
  engine_->setSequenceNumberForGroup();
  if (!calls_->status().is_shared()) compared_ = std::make_unique<ComparedCalls>(engine_, calls_);
}

GlooBackend::~GlooBackend() {
  if (!home_.is_here()) {
    compared_.release();  // its thread is the parent's,
    engine_.release();    // and so are threads and connections of this
    return;
  }
  forget_name(getGroupUid());
  // Rank 0's store need not wait at exit for ranks that may be dead.
  if (calls_->status().failed()) detail::abandon(store_);
  calls_->close();
  const bool is_drained = !on_engine_thread() && calls_->drain(timeout_.load());
  compared_.reset();
  if (is_drained) return;
  std::thread([engine = std::move(engine_)]() mutable { engine.reset(); }).detach();
}

c10::intrusive_ptr<c10d::Backend::Options> GlooBackend::getBackendOptions() {
  return report_options(timeout_.load());
}

void GlooBackend::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ = timeout;
  engine_->setTimeout(timeout);
}

void GlooBackend::setGroupUid(const std::string& name) {
  OwnBackend::setGroupUid(name);
  engine_->setGroupUid(name);
  calls_->status().set_name(name);
}

c10::intrusive_ptr<c10d::Backend> GlooBackend::split(const Store& store, const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  const auto me = std::find(ranks.begin(), ranks.end(), getRank());
  if (me == ranks.end()) return nullptr;
  return merge(store, options, int(me - ranks.begin()), int(ranks.size()));
}

c10::intrusive_ptr<c10d::Backend> GlooBackend::merge(const Store& store, const c10::intrusive_ptr<Options>& options,
                                                     const int& rank, const int& size) {
  home_.require("split");
  EngineOptions chosen = options_;
  if (options) chosen.timeout = options->timeout;
  auto child = c10::make_intrusive<GlooBackend>(store, rank, size, chosen);
  child->set_nan_check(nan_check());
  return child;
}

std::chrono::milliseconds GlooBackend::timeout_or(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

void GlooBackend::fail(const std::string& what) {
  calls_->status().fail({what, detail::kNanFix});
}

void GlooBackend::enter(Plan& plan) {
  detail::GroupStatus& status = calls_->status();
  if (status.failed()) raise_unusable(status, plan.record);
  plan.record.sequence = sequence_ + 1;
  plan.record.same_size = plan.strict ? 1 : 0;
  if (!status.enter(plan.record, watch::fingerprint(plan.record))) raise_failure(status, plan.record);
  ++sequence_;
}

WorkPtr GlooBackend::run(Plan plan, const Tensors& sent, const Issue& issue, Epilogue epilogue) {
  home_.require(watch::kind_name(plan.record.kind));
  std::lock_guard<std::mutex> lock(issue_mutex_);
  check_root(plan.record, getSize());
  check_sent(plan.record, sent);
  enter(plan);
  detail::SeenCall seen;
  try {
    seen = detail::see_call(*this, plan.record);
    seen.begin(plan.record.sequence, /*at_once=*/true);
    const Call call{plan.record, timeout_or(plan.timeout), seen};
    const WorkPtr work = compared_ ? compared_->add(call.record, call.timeout, issue) : issue(*engine_);
    return remember(watch_collective(work, calls_, call, std::move(epilogue)));
  } catch (...) {
    // gloo refused the arguments before it took a tag of its own: nothing was sent.
    seen.end(/*failed=*/true);
    calls_->status().leave(sequence_--);
    throw;
  }
}

WorkPtr GlooBackend::run_peer(watch::Record record, const Tensors& sent, const Issue& issue) {
  home_.require(watch::kind_name(record.kind));
  if (calls_->status().failed()) raise_unusable(calls_->status(), record);
  check_sent(record, sent);
  const Call call{record, timeout_.load(), detail::see_call(*this, record)};
  try {
    return remember(watch_peer(issue(*engine_), calls_, call));
  } catch (const c10::Error&) {
    call.seen.end(/*failed=*/true);
    throw;  // of the arguments
  } catch (const std::exception& error) {
    // gloo's own, of a connection that has broken before.
    call.seen.end(/*failed=*/true);
    if (calls_->status().failed()) raise_failure(calls_->status(), record);
    raise_broken(calls_->status(), call, 0, error.what());
  }
}

void GlooBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  home_.require("barrier");
  Plan plan{watch::make_record(watch::Kind::barrier, {}), timeout_or(options.timeout)};
  const auto began = std::chrono::steady_clock::now();
  {
    std::lock_guard<std::mutex> lock(issue_mutex_);
    enter(plan);
  }
  const detail::SaysThatItWaits says(calls_->status().page(), plan.record.sequence, began);
  try {
    const auto meet = [options, wait_all_ranks](c10d::Backend& engine) {
      engine.monitoredBarrier(options, wait_all_ranks);
      return WorkPtr();
    };
    detail::run_seen(*this, plan.record, [&](const detail::SeenCall&) {
      if (!compared_) return void(meet(*engine_));
      compared_->add(plan.record, plan.timeout, meet)->wait();
    });
  } catch (const std::exception&) {
    const auto waited = std::chrono::steady_clock::now() - began;
    const int64_t ms = std::chrono::duration_cast<std::chrono::milliseconds>(waited).count();
    raise_broken(calls_->status(), {plan.record, plan.timeout}, ms, "timeout");
  }
}

void GlooBackend::waitForPendingWorks() {
  home_.require("waitForPendingWorks");
  if (calls_->drain(timeout_.load())) return;
  raise_broken(calls_->status(), {calls_->status().newest(getRank()), timeout_.load()}, timeout_.load().count(),
               "timeout");
}

c10d::ErrorType GlooBackend::getError() {
  return calls_->status().failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void GlooBackend::abort() {
  home_.require("abort");
  calls_->status().fail({c10::str("rank ", getRank(), " aborted the group"), "look at why that rank gave up"});
  calls_->abort_waits();
}

void GlooBackend::shutdown() {
  home_.require("shutdown");
  calls_->drain(timeout_.load());
  calls_->status().say_left();
}

}  // namespace serried::gloo
