// c10d's Gloo with the watch around every call: sequence numbers, mismatches, who is missing, NaN.
#pragma once

#include "serried/comm/backends/gloo/compared_calls.h"
#include "serried/comm/backends/gloo/engine.h"
#include "serried/comm/backends/gloo/work.h"
#include "serried/comm/collectives/own_backend.h"

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>

namespace serried::gloo {

using Store = c10::intrusive_ptr<c10d::Store>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

/// Calls are made by one thread at a time, in the same order on every rank; Works may be waited for on any thread.
/// The destructor waits for collectives under way, up to the timeout; once the group has failed it waits for nothing:
/// gloo cannot give up a collective before its timeout, so a thread of its own then takes the engine apart. So it does
/// where the last owner goes in a callback, on a thread of the engine. Sends and receives that are waited for raise.
class GlooBackend : public detail::OwnBackend {
 public:
  GlooBackend(const Store& store, int rank, int world_size, const EngineOptions& options);
  ~GlooBackend() override;

  const std::string getBackendName() const override { return "gloo"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  /// gloo knows c10d's calls alone.
  detail::Capabilities capabilities() const override { return {.compares_calls = true}; }
  void setGroupUid(const std::string& name) override;
  watch_page::RankPage* page() override { return &calls_->status().page(); }
  void setSequenceNumberForGroup() override { engine_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return engine_->getSequenceNumberForGroup(); }

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<Backend> split(const Store& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override;
  c10::intrusive_ptr<Backend> merge(const Store& store, const c10::intrusive_ptr<Options>& options, const int& rank,
                                    const int& size) override;

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
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
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

  WorkPtr send(Tensors& tensors, int peer, int tag) override;
  WorkPtr recv(Tensors& tensors, int peer, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  void waitForPendingWorks() override;
  void enableCollectivesTiming() override { engine_->enableCollectivesTiming(); }
  c10d::ErrorType getError() override;

  /// Fails the group: whoever waits for it, on any rank that shares this host, raises within 100 ms.
  void abort() override;
  void shutdown() override;

 private:
  /// A collective before it is issued. `strict`: gloo needs equal sizes where the watch would let them differ.
  struct Plan {
    watch::Record record;
    std::chrono::milliseconds timeout;
    bool strict = false;
  };

  WorkPtr run(Plan plan, const Tensors& sent, const Issue& issue, Epilogue epilogue = {});

  /// gloo's own reduce_scatter copies its output only in `wait` and has no future; this one is an all_reduce of copies
  /// as well, but complete when its Work is. `pieces[i]` is this rank's part of buffers[i], to be copied to outputs[i].
  WorkPtr run_reduce_scatter(const watch::Record& record, Tensors buffers, Tensors pieces, const Tensors& outputs,
                             const c10d::ReduceScatterOptions& options);
  WorkPtr run_peer(watch::Record record, const Tensors& sent, const Issue& issue);
  void fail(const std::string& what) override;
  void enter(Plan& plan);
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds timeout) const;

  const Store store_;
  EngineOptions options_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::shared_ptr<OpenCalls> calls_;
  c10::intrusive_ptr<c10d::Backend> engine_;
  std::unique_ptr<ComparedCalls> compared_;  // null: the page that ranks share compares
  std::mutex issue_mutex_;                   // guards sequence_, and keeps it in the order of gloo's own tags
  uint64_t sequence_ = 0;
};

}  // namespace serried::gloo
