// The collectives of c10d::Backend: each checks its tensors and becomes one task.
#include <numeric>
#include <span>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/shm/backend.h"
#include "serried/comm/backends/shm/tensors.h"

namespace serried::shm {
namespace {

using c10d::OpType;

// Works up to this size are tried on the caller's thread: handing them over would cost more than doing them.
constexpr int64_t kTryNowBytes = 64 << 10;

// Coalesced tensors that together fit are reduced as one.
constexpr int64_t kFlattenBytes = 1 << 20;

int64_t bytes_of(const Op& op) {
  return op.kind == Op::Kind::all_reduce ? op.count * op.element_bytes : op.offers.bytes;
}

// What messages and the trace call them all.
watch::Record record_of(const std::vector<Op>& ops) {
  watch::Record record = ops.front().record;
  for (const Op& op : std::span(ops).subspan(1)) {
    record.num_elements += op.record.num_elements;
    if (op.record.dtype != record.dtype) record.dtype = -1;
  }
  return record;
}

at::Tensor kept(std::string_view where, const at::Tensor& tensor, Task& task) {
  at::Tensor dense = readable(where, tensor);
  task.keep_alive.push_back(dense);
  return dense;
}

void check_numel(std::string_view where, const at::Tensor& tensor, int64_t expected) {
  check_count(where, c10::str("elements in ", watch::describe_tensor(tensor)), tensor.numel(), expected);
}

/// What a rank gives itself. Before anything is sent: nobody else knows its size.
void check_own(std::string_view where, const at::Tensor& output, const at::Tensor& input) {
  if (output.numel() == input.numel()) return;
  raise<c10::ValueError>({where,
                          c10::str("this rank's own piece is ", watch::describe_tensor(input), ", and its place ",
                                   watch::describe_tensor(output)),
                          "let the sizes of what a rank gives itself agree"});
}

}  // namespace

WorkPtr ShmBackend::issue(OpType type, Task task, CallOptions options, at::TensorList inputs) {
  task.op.timeout = timeout_or_default(options.timeout);
  // Nobody else needs the thread of a caller that waits at once.
  const auto now = !options.async                                       ? Driver::Now::always
                   : !task.program && bytes_of(task.op) <= kTryNowBytes ? Driver::Now::if_peers_are_there
                                                                        : Driver::Now::no;
  task.seen = detail::see_call(*this, task.op.record);
  const detail::SeenWait waiting(now == Driver::Now::always ? task.seen : detail::SeenCall());
  const char* event = type == OpType::_ALLREDUCE_SPARSE ? "sparse_all_reduce" : watch::kind_name(task.op.record.kind);
  auto work = c10::make_intrusive<CollectiveWork>(rank_, type, detail::Profiled(args_.backend, event, inputs),
                                                  driver_->num_issued() + 1, std::move(task), driver_);
  driver_->issue(work, now);
  return remember(work);
}

WorkPtr ShmBackend::issue_program(OpType type, Task task, std::vector<Op> ops, CallOptions options,
                                  at::TensorList inputs) {
  for (Op& op : ops) op.timeout = timeout_or_default(options.timeout);
  if (!ops.empty()) task.op.record = record_of(ops);
  task.program = [ops = std::move(ops)](Runner& engine) mutable {
    for (Op& op : ops) shm::run(engine, op);
  };
  return issue(type, std::move(task), options, inputs);
}

void ShmBackend::check_root(std::string_view where, int64_t root, int64_t tensor) const {
  if (root < 0 || root >= size_) {
    raise<c10::ValueError>({where, c10::str("rank ", root, " is not in a group of ", size_),
                            c10::str("pass a rank from 0 to ", size_ - 1)});
  }
  if (tensor == 0) return;
  raise<c10::ValueError>(
      {where, c10::str("the root tensor is ", tensor, ", and every rank has one"), "pass rootTensor 0"});
}

WorkPtr ShmBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_root("broadcast", options.rootRank, options.rootTensor);
  Task task;
  const at::Tensor tensor = writable("broadcast", only("broadcast", tensors), task);
  if (rank_ == options.rootRank) check_sent("broadcast", tensor);
  task.outputs = tensors;
  task.op = broadcast_op(tensor, int(options.rootRank), place());
  return issue(OpType::BROADCAST, std::move(task), call_options(options), tensors);
}

WorkPtr ShmBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  if (only("all_reduce", tensors).layout() == at::kSparse) return allreduce_sparse(tensors, options);
  Task task;
  const at::Tensor tensor = writable("all_reduce", tensors.front(), task);
  check_sent("all_reduce", tensor);
  const at::Tensor input = contributed(tensor, options.reduceOp, task.keep_alive);
  task.outputs = tensors;
  task.op = all_reduce_op(input, tensor, engine_op(options.reduceOp));
  return issue(OpType::ALLREDUCE, std::move(task), call_options(options), tensors);
}

WorkPtr ShmBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  if (tensors.empty()) raise<c10::ValueError>({"all_reduce_coalesced", "got no tensors", "pass one or more"});
  Task task;
  Tensors dense;
  int64_t bytes = 0;
  bool one_dtype = true;
  for (const at::Tensor& tensor : tensors) {
    dense.push_back(writable("all_reduce_coalesced", tensor, task));
    bytes += int64_t(dense.back().nbytes());
    one_dtype &= dense.back().scalar_type() == dense.front().scalar_type();
  }
  check_sent("all_reduce_coalesced", dense);
  task.outputs = tensors;
  const RedOpType reduction = engine_op(options.reduceOp);
  if (!one_dtype || bytes > kFlattenBytes || dense.size() < 2) {
    std::vector<Op> ops;
    for (const at::Tensor& tensor : dense) {
      const at::Tensor input = contributed(tensor, options.reduceOp, task.keep_alive);
      ops.push_back(all_reduce_op(input, tensor, reduction));
    }
    return issue_program(OpType::ALLREDUCE_COALESCED, std::move(task), std::move(ops), call_options(options), tensors);
  }
  Tensors flat_views;
  for (const at::Tensor& tensor : dense) flat_views.push_back(tensor.detach().view({-1}));
  const at::Tensor flat = at::cat(flat_views);
  task.keep_alive.push_back(flat);
  const at::Tensor input = contributed(flat, options.reduceOp, task.keep_alive);
  task.op = all_reduce_op(input, flat, reduction);
  task.after = [earlier = std::move(task.after), flat, flat_views] {
    int64_t begin = 0;
    for (const at::Tensor& view : flat_views) {
      view.copy_(flat.narrow(0, begin, view.numel()));
      begin += view.numel();
    }
    if (earlier) earlier();
  };
  return issue(OpType::ALLREDUCE_COALESCED, std::move(task), call_options(options), tensors);
}

WorkPtr ShmBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_root("reduce", options.rootRank, options.rootTensor);
  Task task;
  const at::Tensor tensor = writable("reduce", only("reduce", tensors), task);
  check_sent("reduce", tensor);
  const at::Tensor input = contributed(tensor, options.reduceOp, task.keep_alive);
  task.outputs = tensors;
  task.op = reduce_op(input, int(options.rootRank), engine_op(options.reduceOp), place());
  task.op.sinks.base = tensor.numel() == 0 ? nullptr : static_cast<char*>(tensor.mutable_data_ptr());
  return issue(OpType::REDUCE, std::move(task), call_options(options), tensors);
}

WorkPtr ShmBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr const char* where = "all_gather";
  Task task;
  const at::Tensor input = kept(where, only(where, inputs), task);
  check_count(where, "output lists", int64_t(outputs.size()), 1);
  check_count(where, "outputs", int64_t(outputs.front().size()), size_);
  check_sent(where, input);
  Tensors dense;
  for (const at::Tensor& output : outputs.front()) {
    check_dtype(where, output, input);
    dense.push_back(writable(where, output, task));
  }
  check_own(where, dense[rank_], input);
  task.outputs = outputs.front();
  task.op = all_gather_op(dense, input, place());
  return issue(OpType::ALLGATHER, std::move(task), call_options(options), inputs);
}

WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, options);
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::AllgatherOptions& options) {
  constexpr const char* where = "all_gather";
  check_count(where, "outputs", int64_t(outputs.size()), int64_t(inputs.size()));
  Task task;
  std::vector<Op> ops;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor input = kept(where, inputs[i], task);
    check_sent(where, input);
    check_dtype(where, outputs[i], input);
    check_numel(where, outputs[i], input.numel() * size_);
    ops.push_back(all_gather_flat_op(writable(where, outputs[i], task), input));
  }
  task.outputs = outputs;
  if (ops.size() != 1)
    return issue_program(OpType::COALESCED, std::move(task), std::move(ops), call_options(options), inputs);
  task.op = std::move(ops.front());
  return issue(OpType::_ALLGATHER_BASE, std::move(task), call_options(options), inputs);
}

WorkPtr ShmBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  constexpr const char* where = "all_gather_coalesced";
  check_count(where, "output lists", int64_t(outputs.size()), size_);
  Task task;
  std::vector<Op> ops;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const at::Tensor input = kept(where, inputs[i], task);
    check_sent(where, input);
    Tensors dense;
    for (const Tensors& list : outputs) {
      check_count(where, "outputs per rank", int64_t(list.size()), int64_t(inputs.size()));
      check_dtype(where, list[i], input);
      dense.push_back(writable(where, list[i], task));
    }
    check_own(where, dense[rank_], input);
    ops.push_back(all_gather_op(dense, input, place()));
  }
  for (const Tensors& list : outputs) task.outputs.insert(task.outputs.end(), list.begin(), list.end());
  return issue_program(OpType::ALLGATHER_COALESCED, std::move(task), std::move(ops), call_options(options), inputs);
}

WorkPtr ShmBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  constexpr const char* where = "gather";
  check_root(where, options.rootRank);
  const bool is_root = rank_ == options.rootRank;
  Task task;
  const at::Tensor input = kept(where, only(where, inputs), task);
  check_sent(where, input);
  check_count(where, "output lists", int64_t(outputs.size()), is_root ? 1 : 0);
  Tensors dense;
  if (is_root) {
    check_count(where, "outputs", int64_t(outputs.front().size()), size_);
    task.outputs = outputs.front();
    for (const at::Tensor& output : outputs.front()) {
      check_dtype(where, output, input);
      dense.push_back(writable(where, output, task));
    }
    check_own(where, dense[rank_], input);
  }
  task.op = gather_op(dense, input, int(options.rootRank), place());
  return issue(OpType::GATHER, std::move(task), call_options(options), inputs);
}

WorkPtr ShmBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  constexpr const char* where = "scatter";
  check_root(where, options.rootRank);
  const bool is_root = rank_ == options.rootRank;
  Task task;
  const at::Tensor output = writable(where, only(where, outputs), task);
  check_count(where, "input lists", int64_t(inputs.size()), is_root ? 1 : 0);
  Tensors dense;
  if (is_root) {
    check_count(where, "inputs", int64_t(inputs.front().size()), size_);
    for (const at::Tensor& input : inputs.front()) {
      check_dtype(where, input, output);
      dense.push_back(kept(where, input, task));
    }
    check_own(where, output, dense[rank_]);
    check_sent(where, dense);
  }
  task.outputs = outputs;
  task.op = scatter_op(output, dense, int(options.rootRank), place());
  return issue(OpType::SCATTER, std::move(task), call_options(options),
               is_root ? at::TensorList(inputs.front()) : at::TensorList());
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  constexpr const char* where = "reduce_scatter";
  check_count(where, "input lists", int64_t(inputs.size()), 1);
  check_count(where, "inputs", int64_t(inputs.front().size()), size_);
  Task task;
  const at::Tensor output = writable(where, only(where, outputs), task);
  Tensors dense;
  for (const at::Tensor& input : inputs.front()) {
    check_dtype(where, input, output);
    const at::Tensor readable_input = kept(where, input, task);
    check_sent(where, readable_input);
    dense.push_back(contributed(readable_input, options.reduceOp, task.keep_alive));
  }
  check_numel(where, inputs.front()[rank_], output.numel());
  task.outputs = outputs;
  task.op = reduce_scatter_op(output, dense, engine_op(options.reduceOp), place());
  return issue(OpType::REDUCE_SCATTER, std::move(task), call_options(options), inputs.front());
}

WorkPtr ShmBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                         const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                    const c10d::ReduceScatterOptions& options) {
  constexpr const char* where = "reduce_scatter";
  check_count(where, "outputs", int64_t(outputs.size()), int64_t(inputs.size()));
  Task task;
  std::vector<Op> ops;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_dtype(where, outputs[i], inputs[i]);
    check_numel(where, inputs[i], outputs[i].numel() * size_);
    const at::Tensor dense = kept(where, inputs[i], task);
    check_sent(where, dense);
    const at::Tensor input = contributed(dense, options.reduceOp, task.keep_alive);
    ops.push_back(
        reduce_scatter_flat_op(writable(where, outputs[i], task), input, engine_op(options.reduceOp), place()));
  }
  task.outputs = outputs;
  if (ops.size() != 1) {
    return issue_program(OpType::REDUCE_SCATTER_TENSOR_COALESCED, std::move(task), std::move(ops),
                         call_options(options), inputs);
  }
  task.op = std::move(ops.front());
  return issue(OpType::_REDUCE_SCATTER_BASE, std::move(task), call_options(options), inputs);
}

namespace {

/// Views of `tensor` along dim 0, one per rank: by `sizes`, or equal where there are none.
Tensors cut(const char* where, const at::Tensor& tensor, const std::vector<int64_t>& sizes, int num_ranks) {
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  std::vector<int64_t> each = sizes;
  if (each.empty()) {
    if (rows % num_ranks != 0) {
      raise<c10::ValueError>({where,
                              c10::str("dim 0 of ", watch::describe_tensor(tensor), " is not divisible by ", num_ranks),
                              "pass split sizes"});
    }
    each.assign(num_ranks, rows / num_ranks);
  }
  check_count(where, "split sizes", int64_t(each.size()), num_ranks);
  check_count(where, c10::str("rows of ", watch::describe_tensor(tensor), " in the split sizes"),
              std::accumulate(each.begin(), each.end(), int64_t(0)), rows);
  Tensors pieces;
  int64_t begin = 0;
  for (const int64_t size : each) {
    pieces.push_back(tensor.narrow(0, begin, size));
    begin += size;
  }
  return pieces;
}

}  // namespace

WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                  std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  constexpr const char* where = "all_to_all";
  check_dtype(where, output, input);
  Task task;
  const at::Tensor from = kept(where, input, task);
  check_sent(where, from);
  const at::Tensor to = writable(where, output, task);
  at::AutoDispatchBelowAutograd guard;
  const Tensors inputs = cut(where, from.detach(), input_sizes, size_);
  const Tensors outputs = cut(where, to.detach(), output_sizes, size_);
  check_own(where, outputs[rank_], inputs[rank_]);
  task.outputs = {output};
  task.op = all_to_all_op(outputs, inputs, place());
  return issue(OpType::ALLTOALL_BASE, std::move(task), call_options(options), input);
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  constexpr const char* where = "all_to_all";
  check_count(where, "outputs", int64_t(outputs.size()), size_);
  check_count(where, "inputs", int64_t(inputs.size()), size_);
  Task task;
  Tensors from;
  Tensors to;
  for (int peer = 0; peer < size_; ++peer) {
    check_dtype(where, outputs[peer], inputs.front());
    check_dtype(where, inputs[peer], inputs.front());
    from.push_back(kept(where, inputs[peer], task));
    to.push_back(writable(where, outputs[peer], task));
  }
  check_own(where, to[rank_], from[rank_]);
  check_sent(where, from);
  task.outputs = outputs;
  task.op = all_to_all_op(to, from, place());
  return issue(OpType::ALLTOALL, std::move(task), call_options(options), inputs);
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions& options) {
  Task task;
  task.op = barrier_op();
  return issue(OpType::BARRIER, std::move(task), call_options(options), {});
}

}  // namespace serried::shm
