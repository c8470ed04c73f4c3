// MPI's collectives with the watch around every call: sequence numbers, mismatches, who is missing, NaN.
#pragma once

#include "serried/comm/backends/mpi/lane.h"
#include "serried/comm/backends/mpi/plan.h"
#include "serried/comm/collectives/own_backend.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace serried::mpi {

using Store = c10::intrusive_ptr<c10d::Store>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

struct MpiOptions {
  std::chrono::milliseconds timeout{};
  int64_t piece_bytes = kPieceBytes;
};

/// Calls are made by one thread at a time, in the same order on every rank; Works may be waited for on any thread.
/// The destructor waits for collectives under way, up to the timeout, and two seconds for messages; once the group has
/// failed it waits for nothing, and MPI keeps what it may still write to.
class MpiBackend : public detail::OwnBackend {
 public:
  MpiBackend(const Store& store, int rank, int world_size, const MpiOptions& options);
  ~MpiBackend() override;

  const std::string getBackendName() const override { return "mpi"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  detail::Capabilities capabilities() const override { return {.takes_collectives = true, .compares_calls = true}; }
  void run(const detail::Collective& collective) override;
  WorkPtr start(const detail::Collective& collective) override;

  void setGroupUid(const std::string& name) override;
  watch_page::RankPage* page() override { return &status().page(); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const Store& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<Backend> merge(const Store& store, const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool) override { barrier(options)->wait(); }

  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void waitForPendingWorks() override;
  void enableCollectivesTiming() override {}
  c10d::ErrorType getError() override;

  /// Fails the group: whoever waits for it, on any rank that shares this host, raises within 100 ms.
  void abort() override;
  void shutdown() override;

 private:
  detail::GroupStatus& status() { return lane_->status(); }
  WorkPtr issue(Plan plan, std::chrono::milliseconds timeout);
  WorkPtr issue_joined(const char* where, std::vector<Plan> plans, std::chrono::milliseconds timeout);
  WorkPtr issue_peer_call(Plan plan, std::chrono::milliseconds timeout);
  void check_open(const watch::Record& record);
  void enter(Plan& plan);
  void fail(const std::string& what) override;
  void check_root(const char* where, int64_t root) const;
  void check_tag(const char* where, int tag) const;
  WorkPtr transfer(watch::Kind kind, Tensors& tensors, int peer, int tag);
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds timeout) const;

  const Store store_;
  const MpiOptions options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  OpenGroup open_group_;
  std::shared_ptr<Lane> lane_;
  int most_tag_ = 0;
  std::atomic<bool> closed_{false};
  std::mutex issue_mutex_;  // guards the two below, and keeps them in the order of the lane
  uint64_t sequence_ = 0;
  watch::Record before_;
};

}  // namespace serried::mpi
