// What surrounds each call, and the life of the backend.
#include "serried/comm/backends/mpi/backend.h"

#include <algorithm>
#include <utility>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "serried/base/error.h"
#include "serried/comm/backends/mpi/meeting.h"
#include "serried/comm/collectives/nan_check.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::mpi {
namespace {

std::shared_ptr<detail::GroupStatus> make_status(const Store& store, int rank, int world_size,
                                                 std::chrono::milliseconds timeout) {
  return make_shared_at_home<detail::GroupStatus>(c10::make_intrusive<c10d::PrefixStore>("watch", store), rank,
                                                  world_size, timeout);
}

int most_tag() {
  const std::lock_guard<std::mutex> turn(turns());
  int* value = nullptr;
  int found = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &value, &found);
  constexpr int kPromised = 32767;
  return found != 0 ? *value : kPromised;
}

}  // namespace

MpiBackend::MpiBackend(const Store& store, int rank, int world_size, const MpiOptions& options)
    : OwnBackend(rank, world_size), store_(store), options_(options), timeout_(options.timeout) {
  auto status = make_status(store, rank, world_size, options.timeout);
  MPI_Comm comm = meet({store, rank, world_size, options.timeout});
  lane_ = std::make_shared<Lane>(comm, std::move(status), options.piece_bytes);
  most_tag_ = most_tag();
}

MpiBackend::~MpiBackend() {
  if (!home_.is_here()) return;
  // Rank 0's store need not wait at exit for ranks that may be dead.
  if (status().failed()) detail::abandon(store_);
  lane_->drain(timeout_.load());
  if (!lane_->close()) open_group_.spoil();
}

c10::intrusive_ptr<c10d::Backend::Options> MpiBackend::getBackendOptions() {
  return report_options(timeout_.load());
}

void MpiBackend::setGroupUid(const std::string& name) {
  OwnBackend::setGroupUid(name);
  status().set_name(name);
}

uint64_t MpiBackend::getSequenceNumberForGroup() {
  const std::lock_guard<std::mutex> lock(issue_mutex_);
  return sequence_;
}

c10::intrusive_ptr<c10d::Backend> MpiBackend::split(const Store& store, const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto me = std::find(ranks.begin(), ranks.end(), getRank());
  if (me == ranks.end()) return nullptr;
  return merge(store, options, int(me - ranks.begin()), int(ranks.size()));
}

c10::intrusive_ptr<c10d::Backend> MpiBackend::merge(const Store& store, const c10::intrusive_ptr<Options>& options,
                                                    const int& rank, const int& size) {
  home_.require("split");
  MpiOptions chosen = options_;
  if (options) chosen.timeout = options->timeout;
  auto child = c10::make_intrusive<MpiBackend>(store, rank, size, chosen);
  child->set_nan_check(nan_check());
  return child;
}

std::chrono::milliseconds MpiBackend::timeout_or(std::chrono::milliseconds timeout) const {
  return timeout == c10d::kUnsetTimeout ? timeout_.load() : timeout;
}

void MpiBackend::check_root(const char* where, int64_t root) const {
  if (root >= 0 && root < size_) return;
  raise<c10::ValueError>(
      {where, c10::str("rank ", root, " is not in a group of ", size_), c10::str("pass a rank from 0 to ", size_ - 1)});
}

void MpiBackend::check_tag(const char* where, int tag) const {
  if (tag >= 0 && tag <= most_tag_) return;
  raise<c10::ValueError>(
      {where, c10::str("the tag is ", tag, "; this MPI takes 0..", most_tag_), "pass a tag from that range"});
}

void MpiBackend::fail(const std::string& what) {
  status().fail({what, detail::kNanFix});
}

void MpiBackend::check_open(const watch::Record& record) {
  if (status().failed()) gloo::raise_unusable(status(), record);
  if (!closed_) return;
  raise<c10::DistBackendError>({watch::kind_name(record.kind), "the group is closed", "make a new group"});
}

void MpiBackend::enter(Plan& plan) {
  check_open(plan.record);
  plan.record.sequence = sequence_ + 1;
  if (!status().enter(plan.record, watch::fingerprint(plan.record))) gloo::raise_failure(status(), plan.record);
  ++sequence_;
  const watch::Record before = std::exchange(before_, plan.record);
  // Where ranks share memory, the last of those that disagree has seen it, and sends nothing.
  if (!status().is_shared()) plan.steps.insert(plan.steps.begin(), compare_step(plan.record, before, size_));
}

WorkPtr MpiBackend::issue(Plan plan, std::chrono::milliseconds timeout) {
  home_.require(watch::kind_name(plan.record.kind));
  const std::lock_guard<std::mutex> lock(issue_mutex_);
  enter(plan);
  const gloo::Call call{plan.record, timeout_or(timeout), detail::see_call(*this, plan.record)};
  call.seen.begin(plan.record.sequence, /*at_once=*/true);
  auto work = c10::make_intrusive<CallWork>(std::move(plan), call, lane_);
  Lane::add(lane_, work);
  return remember(work);
}

WorkPtr MpiBackend::issue_peer_call(Plan plan, std::chrono::milliseconds timeout) {
  check_open(plan.record);
  const gloo::Call call{plan.record, timeout_or(timeout), detail::see_call(*this, plan.record)};
  auto work = c10::make_intrusive<CallWork>(std::move(plan), call, lane_);
  Lane::add(lane_, work);
  return remember(work);
}

void MpiBackend::run(const detail::Collective& collective) {
  start(collective)->wait();
}

WorkPtr MpiBackend::start(const detail::Collective& c) {
  home_.require(c.where);
  if (c.is_point_to_point()) {
    check_tag(c.where, c.tag);
    if (c.root != -1 || c.kind == watch::Kind::send) check_root(c.where, c.root);
    return issue_peer_call(plan_of(c, rank_, size_), c.timeout);
  }
  const bool has_root = c.kind == watch::Kind::reduce || c.kind == watch::Kind::broadcast ||
                        c.kind == watch::Kind::gather || c.kind == watch::Kind::scatter;
  if (has_root) check_root(c.where, c.root);
  return issue(plan_of(c, rank_, size_), c.timeout);
}

void MpiBackend::waitForPendingWorks() {
  home_.require("waitForPendingWorks");
  const auto timeout = timeout_.load();
  if (lane_->drain(timeout)) return;
  gloo::raise_broken(status(), {status().newest(getRank()), timeout}, timeout.count(), "timeout");
}

c10d::ErrorType MpiBackend::getError() {
  return status().failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void MpiBackend::abort() {
  home_.require("abort");
  status().fail({c10::str("rank ", getRank(), " aborted the group"), "look at why that rank gave up"});
}

void MpiBackend::shutdown() {
  home_.require("shutdown");
  closed_ = true;
  lane_->drain(timeout_.load());
  status().say_left();
}

}  // namespace serried::mpi
