// What all our backends share, whether a collective comes through the door or by c10d's own calls on the group.
#pragma once

#include "serried/base/fork.h"
#include "serried/base/watch_page.h"
#include "serried/comm/collectives/black_box.h"
#include "serried/comm/collectives/collective.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <mutex>
#include <vector>

namespace serried::detail {

/// What a backend can do by itself. The door (door.h) does the rest around it.
struct Capabilities {
  bool takes_collectives = false;    // OwnBackend::run and start: any dtype, any reduction, pieces of any size
  at::DeviceType device = at::kCPU;  // of the tensors in them
  bool compares_calls = false;       // of all ranks, before anything is sent
  bool places_rows = false;          // takes Collective::rows
};

/// A c10d::Backend that the door knows. The door looks for NaN before `run` and `start`; overrides of c10d's calls,
/// which users may make on a group, do so themselves by `check_sent`.
class OwnBackend : public c10d::Backend {
 public:
  OwnBackend(int rank, int size);
  ~OwnBackend() override;

  virtual Capabilities capabilities() const = 0;
  /// Blocks until this rank may use its outputs and reuse its inputs; on the calling thread, without a Work.
  virtual void run(const Collective& collective);
  /// Outputs may be used once the Work has been waited for; until then the Work keeps the tensors alive.
  virtual WorkPtr start(const Collective& collective);

  /// Where the group checks for NaN: warns or raises a ValueError of the call `where` if this rank is about to send
  /// one. Whoever raises does not come, so the group fails for its peers too.
  void check_sent(const char* where, at::TensorList sent) {
    if (nan_check() != watch::NanCheck::off) look_for_nan(where, sent);
  }
  void check_sent(const watch::Record& call, at::TensorList sent) {
    if (nan_check() != watch::NanCheck::off) look_for_nan(watch::describe(call).c_str(), sent);
  }
  watch::NanCheck nan_check() const { return nan_check_.load(std::memory_order_relaxed); }
  void set_nan_check(watch::NanCheck mode) { nan_check_ = mode; }

  /// Where this rank says what those who look from outside want to know; null where nobody can look.
  virtual watch_page::RankPage* page() { return nullptr; }

  /// From here on the group's calls are in the black box, under this name.
  void setGroupUid(const std::string& name) override;
  const black_box::GroupLog& log() const { return log_; }

  /// There is nothing to launch together: calls in between start at once, and the Work of the end waits for all.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

 protected:
  /// Ends the group for all ranks, because `what` keeps this one from coming.
  virtual void fail(const std::string& what) = 0;

  /// Every Work passes here before it is handed out: calls may be collected for one.
  WorkPtr remember(WorkPtr work);

  /// What getBackendOptions gives: always the same object, so that what callers write there stays, but for what the
  /// group knows itself. (c10d's splitGroup writes the child's name and timeout into it.)
  c10::intrusive_ptr<Options> report_options(std::chrono::milliseconds timeout);

  const HomeProcess home_;

 private:
  void look_for_nan(const char* where, at::TensorList sent);

  black_box::GroupLog log_;
  std::atomic<watch::NanCheck> nan_check_;
  std::mutex options_mutex_;  // guards the pointer below
  c10::intrusive_ptr<Options> options_;
  std::mutex coalescing_mutex_;  // guards the two below
  bool coalescing_ = false;
  std::vector<WorkPtr> coalesced_;
};

/// Null where `backend` is not one of ours.
OwnBackend* as_own(c10d::Backend& backend);

/// One more step of training has averaged its gradients over `group`: `serried top` shows how many there are a second.
void count_step(const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Those of `backend`, none where it is not one of ours.
Capabilities capabilities_of(c10d::Backend& backend);

}  // namespace serried::detail
