// c10d::Backend over one engine: checks tensors, makes tasks of calls, hands them to the driver.
#pragma once

#include "serried/comm/backends/shm/connect.h"
#include "serried/comm/backends/shm/driver.h"
#include "serried/comm/backends/shm/heap.h"
#include "serried/comm/backends/shm/mailbox.h"
#include "serried/comm/backends/shm/ops.h"
#include "serried/comm/collectives/own_backend.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

namespace serried::shm {

using Store = c10::intrusive_ptr<c10d::Store>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

/// What c10d's option structs have in common.
struct CallOptions {
  std::chrono::milliseconds timeout;
  bool async = true;
};

template <class Options>
CallOptions call_options(const Options& options) {
  return {.timeout = options.timeout, .async = options.asyncOp};
}

/// Calls may come from any thread; collectives are matched across ranks in the order of the calls.
class ShmBackend : public detail::OwnBackend {
 public:
  explicit ShmBackend(const ConnectArgs& args);
  ~ShmBackend() override;

  const std::string getBackendName() const override { return args_.backend; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ms_ = timeout.count(); }

  detail::Capabilities capabilities() const override {
    return {.takes_collectives = true, .compares_calls = true, .places_rows = true};
  }
  void run(const detail::Collective& collective) override;
  WorkPtr start(const detail::Collective& collective) override;

  void setGroupUid(const std::string& name) override;
  watch_page::RankPage* page() override { return &driver_->engine().segment().info(rank_).page; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return driver_->num_issued(); }

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
  void enableCollectivesTiming() override {}
  c10d::ErrorType getError() override;

  /// Whoever waits for the group, on any rank, raises within 100 ms; so does every later call.
  void abort() override;
  void shutdown() override;

  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

  /// A tensor of `size` elements in the symmetric heap: collectives on such tensors copy nothing. It outlives the
  /// group.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

 private:
  Place place() const { return {.rank = rank_, .world_size = size_}; }
  std::chrono::milliseconds timeout_or_default(std::chrono::milliseconds timeout) const;
  WorkPtr issue(c10d::OpType type, Task task, CallOptions options, at::TensorList inputs);
  WorkPtr issue_program(c10d::OpType type, Task task, std::vector<Op> ops, CallOptions options, at::TensorList inputs);
  WorkPtr post(Transfer::Direction direction, const at::Tensor& tensor, int peer, int tag,
               std::chrono::milliseconds timeout = c10d::kUnsetTimeout);
  WorkPtr post(const detail::Collective& peer_call);
  /// `tensor`: which of a rank's tensors it is, of which each has one.
  void check_root(std::string_view where, int64_t root, int64_t tensor = 0) const;
  void fail(const std::string& what) override;
  void close();

  const ConnectArgs args_;
  std::atomic<int64_t> timeout_ms_;
  const std::shared_ptr<Driver> driver_;
  const std::shared_ptr<Heap> heap_;
  const std::shared_ptr<Mailbox> mailbox_;
  std::atomic<bool> closed_{false};
};

}  // namespace serried::shm
