// Every method of c10d::Backend, done at once: outputs get this rank's own input where shapes allow, else stay.
#include "serried/comm/backends/factories.h"

#include <algorithm>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "serried/base/error.h"

namespace serried {
namespace {

using c10d::OpType;
using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Done before anybody can ask.
class FakeWork final : public c10d::Work {
 public:
  FakeWork(int rank, OpType type, Tensors outputs) : Work(rank, type), outputs_(std::move(outputs)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future_->markCompleted(c10::IValue(outputs_));
    finish();
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  int sourceRank() const override { return 0; }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

[[noreturn]] void raise_shape(const char* op, const std::string& what) {
  raise<c10::ValueError>({op, what, "pass what the same call takes on a group of this size"});
}

void check_count(const char* op, const char* list, size_t size, size_t expected) {
  if (size != expected) raise_shape(op, c10::str(list, " has ", size, " tensors, not ", expected));
}

class FakeBackend final : public c10d::Backend {
 public:
  FakeBackend(int rank, int size, std::chrono::milliseconds timeout, bool error_on_collective)
      : Backend(rank, size),
        options_(c10::make_intrusive<Options>("fake", timeout)),
        error_on_collective_(error_on_collective) {}

  const std::string getBackendName() const override { return "fake"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void startCoalescing() override {}
  WorkPtr endCoalescing() override { return done("coalesced", OpType::COALESCED, {}); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void waitForPendingWorks() override {}
  void enableCollectivesTiming() override {}
  c10d::ErrorType getError() override { return c10d::ErrorType::SUCCESS; }
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override { return at::empty({size}, options); }
  void monitoredBarrier(const c10d::BarrierOptions&, bool) override { done("barrier", OpType::BARRIER, {}); }

  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>&, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    const auto mine = std::find(ranks.begin(), ranks.end(), rank_);
    if (mine == ranks.end()) return nullptr;
    return c10::make_intrusive<FakeBackend>(int(mine - ranks.begin()), int(ranks.size()), options->timeout,
                                            error_on_collective_);
  }
  c10::intrusive_ptr<Backend> merge(const c10::intrusive_ptr<c10d::Store>&, const c10::intrusive_ptr<Options>& options,
                                    const int& rank, const int& size) override {
    return c10::make_intrusive<FakeBackend>(rank, size, options->timeout, error_on_collective_);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    check_root("broadcast", options.rootRank);
    return done("broadcast", OpType::BROADCAST, tensors);
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return done("all_reduce", OpType::ALLREDUCE, tensors);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions&) override {
    return done("all_reduce", OpType::_ALLREDUCE_SPARSE, tensors);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override {
    return done("all_reduce", OpType::ALLREDUCE_COALESCED, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_root("reduce", options.rootRank);
    return done("reduce", OpType::REDUCE, tensors);
  }

  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check_count("all_gather", "the list of output lists", outputs.size(), inputs.size());
    Tensors all;
    for (size_t i = 0; i < inputs.size(); ++i) fill("all_gather", outputs[i], inputs[i], all);
    return done("all_gather", OpType::ALLGATHER, all);
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    gather_flat(output, input);
    return done("all_gather", OpType::_ALLGATHER_BASE, {output});
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check_count("all_gather", "the list of output lists", outputs.size(), size_t(size_));
    Tensors all;
    for (Tensors& of_rank : outputs) {
      check_count("all_gather", "an output list", of_rank.size(), inputs.size());
      for (size_t i = 0; i < inputs.size(); ++i) copy(of_rank[i], inputs[i]);
      all.insert(all.end(), of_rank.begin(), of_rank.end());
    }
    return done("all_gather", OpType::ALLGATHER_COALESCED, all);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    check_count("all_gather", "the output list", outputs.size(), inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) gather_flat(outputs[i], inputs[i]);
    return done("all_gather", OpType::ALLGATHER_COALESCED, outputs);
  }

  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    check_root("gather", options.rootRank);
    check_count("gather", "the input list", inputs.size(), 1);
    check_count("gather", "the list of output lists", outputs.size(), options.rootRank == rank_ ? 1 : 0);
    Tensors all;
    if (options.rootRank == rank_) fill("gather", outputs[0], inputs[0], all);
    return done("gather", OpType::GATHER, all);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    check_root("scatter", options.rootRank);
    check_count("scatter", "the output list", outputs.size(), 1);
    check_count("scatter", "the list of input lists", inputs.size(), options.rootRank == rank_ ? 1 : 0);
    if (options.rootRank == rank_) {
      check_count("scatter", "the input list", inputs[0].size(), size_t(size_));
      copy(outputs[0], inputs[0][size_t(rank_)]);
    }
    return done("scatter", OpType::SCATTER, outputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions&) override {
    check_count("reduce_scatter", "the list of input lists", inputs.size(), outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      check_count("reduce_scatter", "an input list", inputs[i].size(), size_t(size_));
      copy(outputs[i], inputs[i][size_t(rank_)]);
    }
    return done("reduce_scatter", OpType::REDUCE_SCATTER, outputs);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions&) override {
    scatter_flat(output, input);
    return done("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {output});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions&) override {
    check_count("reduce_scatter", "the input list", inputs.size(), outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) scatter_flat(outputs[i], inputs[i]);
    return done("reduce_scatter", OpType::REDUCE_SCATTER_TENSOR_COALESCED, outputs);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                        std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions&) override {
    c10d::checkSplitSizes(input_sizes, input, size_);
    c10d::checkSplitSizes(output_sizes, output, size_);
    exchange_flat(output, input, output_sizes, input_sizes);
    return done("all_to_all", OpType::ALLTOALL_BASE, {output});
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    check_count("all_to_all", "the output list", outputs.size(), size_t(size_));
    check_count("all_to_all", "the input list", inputs.size(), size_t(size_));
    for (size_t i = 0; i < outputs.size(); ++i) copy(outputs[i], inputs[i]);
    return done("all_to_all", OpType::ALLTOALL, outputs);
  }

  WorkPtr send(Tensors& tensors, int peer, int) override {
    check_root("send", peer);
    return done("send", OpType::SEND, tensors);
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    check_root("recv", peer);
    return done("recv", OpType::RECV, tensors);
  }
  WorkPtr recvAnysource(Tensors& tensors, int) override { return done("recv", OpType::RECVANYSOURCE, tensors); }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return done("barrier", OpType::BARRIER, {}); }

 private:
  WorkPtr done(const char* op, OpType type, const Tensors& outputs) {
    if (error_on_collective_) {
      raise<c10::DistBackendError>({op, "the fake group was made with error_on_collective = true",
                                    "make it without that option where collectives must pass"});
    }
    ++sequence_;
    return c10::make_intrusive<FakeWork>(rank_, type, outputs);
  }

  void check_root(const char* op, int64_t root) const {
    if (root < 0 || root >= size_) raise_shape(op, c10::str("rank ", root, " is not in 0..", size_ - 1));
  }

  // Below autograd: a real backend writes bytes that autograd never sees.
  static void copy(at::Tensor& output, const at::Tensor& input) {
    const at::AutoDispatchBelowAutograd guard;
    if (output.sizes() == input.sizes()) output.copy_(input);
  }

  void fill(const char* op, Tensors& outputs, const at::Tensor& input, Tensors& all) const {
    check_count(op, "an output list", outputs.size(), size_t(size_));
    for (at::Tensor& output : outputs) copy(output, input);
    all.insert(all.end(), outputs.begin(), outputs.end());
  }

  void gather_flat(at::Tensor& output, const at::Tensor& input) const {
    if (output.numel() != input.numel() * size_) {
      raise_shape("all_gather", c10::str("the output has ", output.numel(), " elements, not ", input.numel() * size_));
    }
    const at::AutoDispatchBelowAutograd guard;
    if (output.is_contiguous()) output.view({size_, input.numel()}).copy_(input.reshape({1, input.numel()}));
  }

  void scatter_flat(at::Tensor& output, const at::Tensor& input) const {
    if (input.numel() != output.numel() * size_) {
      raise_shape("reduce_scatter",
                  c10::str("the input has ", input.numel(), " elements, not ", output.numel() * size_));
    }
    const at::AutoDispatchBelowAutograd guard;
    output.copy_(input.reshape({size_, output.numel()}).select(0, rank_).reshape(output.sizes()));
  }

  // What comes from a rank is what goes to it, or to this rank, where sizes allow.
  void exchange_flat(const at::Tensor& output, const at::Tensor& input, const std::vector<int64_t>& output_sizes,
                     const std::vector<int64_t>& input_sizes) const {
    const auto cut = [&](const at::Tensor& x, const std::vector<int64_t>& sizes) {
      return sizes.empty() ? x.tensor_split(size_) : x.split_with_sizes(sizes);
    };
    const Tensors sent = cut(input, input_sizes);
    Tensors received = cut(output, output_sizes);
    for (size_t rank = 0; rank < received.size(); ++rank) {
      const bool fits = received[rank].sizes() == sent[rank].sizes();
      copy(received[rank], sent[fits ? rank : size_t(rank_)]);
    }
  }

  const c10::intrusive_ptr<Options> options_;
  const bool error_on_collective_;
  uint64_t sequence_ = 0;
};

}  // namespace

Group make_fake_group(const FactoryArgs& args) {
  reject_unknown_options(args, {"error_on_collective"});
  const auto found = args.options.find("error_on_collective");
  const bool error_on_collective = found != args.options.end() && found->second.toBool();
  return make_group(args,
                    c10::make_intrusive<FakeBackend>(args.rank, args.world_size, args.timeout, error_on_collective));
}

}  // namespace serried
