// Each call of c10d::Backend: its record, what it sends, and the same call on gloo.
#include <ATen/ops/cat.h>

#include "serried/base/error.h"
#include "serried/comm/backends/gloo/backend.h"
#include "serried/comm/backends/gloo/gaps.h"

namespace serried::gloo {
namespace {

using watch::Kind;
using watch::make_record;
using watch::Record;

// Several tensors in one call count as one record: the shape of the first, the elements of all.
Record record_of(Kind kind, const Tensors& tensors, int64_t root = -1,
                 c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED) {
  Record record = make_record(kind, tensors.empty() ? at::Tensor() : tensors.front(), int(root), op);
  if (tensors.size() < 2) return record;
  record.num_elements = 0;
  for (const at::Tensor& tensor : tensors) record.num_elements += tensor.numel();
  return record;
}

Tensors first_list(const TensorLists& lists) {
  return lists.empty() ? Tensors() : lists.front();
}

void check_lists(bool fit, const char* call, const char* wanted) {
  if (fit) return;
  raise<c10::ValueError>({call, "the lists of tensors do not fit", c10::str("pass ", wanted)});
}

// gloo would refuse these too, but only after this rank has told the others that it comes.
bool fit_root(const TensorLists& lists, bool is_root, int size) {
  return is_root ? lists.size() == 1 && int(lists.front().size()) == size : lists.empty();
}

void check_piece(const at::Tensor& piece, const at::Tensor& output) {
  if (piece.numel() == output.numel() && piece.scalar_type() == output.scalar_type()) return;
  raise<c10::ValueError>({"reduce_scatter",
                          c10::str("the output is ", watch::describe_tensor(output), ", but this rank's part is ",
                                   watch::describe_tensor(piece)),
                          "pass an output of that dtype and number of elements"});
}

template <class Options>
Options with_op(Options options, const c10d::ReduceOp& op) {
  options.reduceOp = op;
  return options;
}

// gloo wants the output's shape to be the input's; c10d only that the numbers of elements fit.
at::Tensor flat_view(const at::Tensor& tensor) {
  return tensor.is_contiguous() ? tensor.view(-1) : tensor;
}

}  // namespace

WorkPtr GlooBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_memory("broadcast", tensors);
  check_carried("broadcast", tensors, /*takes_complex=*/true);
  const Tensors sent = options.rootRank == getRank() ? tensors : Tensors();
  return run({record_of(Kind::broadcast, tensors, options.rootRank), options.timeout}, sent,
             [=](c10d::Backend& engine) mutable { return engine.broadcast(tensors, options); });
}

WorkPtr GlooBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_memory("all_reduce", tensors);
  check_reduction("all_reduce", tensors, options.reduceOp);
  Reduced reduced = make_reduced(tensors, options.reduceOp, getSize());
  return run(
      {record_of(Kind::all_reduce, tensors, -1, options.reduceOp), options.timeout}, tensors,
      [=](c10d::Backend& engine) mutable { return engine.allreduce(reduced.buffers, with_op(options, reduced.op)); },
      {reduced.restore, tensors});
}

WorkPtr GlooBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_reduction("all_reduce", tensors, options.reduceOp);
  return run({record_of(Kind::all_reduce, tensors, -1, options.reduceOp), options.timeout}, tensors,
             [=](c10d::Backend& engine) mutable { return engine.allreduce_sparse(tensors, options); });
}

WorkPtr GlooBackend::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  check_reduction("all_reduce", tensors, options.reduceOp);
  Reduced reduced = make_reduced(tensors, options.reduceOp, getSize());
  return run({record_of(Kind::all_reduce, tensors, -1, options.reduceOp), options.timeout}, tensors,
             [=](c10d::Backend& engine) mutable {
               return engine.allreduce_coalesced(reduced.buffers, with_op(options, reduced.op));
             },
             {reduced.restore, tensors});
}

WorkPtr GlooBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_memory("reduce", tensors);
  check_reduction("reduce", tensors, options.reduceOp);
  Reduced reduced = make_reduced(tensors, options.reduceOp, getSize());
  return run(
      {record_of(Kind::reduce, tensors, options.rootRank, options.reduceOp), options.timeout}, tensors,
      [=](c10d::Backend& engine) mutable { return engine.reduce(reduced.buffers, with_op(options, reduced.op)); },
      {options.rootRank == getRank() ? reduced.restore : std::function<void()>(), tensors});
}

WorkPtr GlooBackend::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_lists(inputs.size() == 1 && fit_root(outputs, true, getSize()), "all_gather",
              "one input, and one list of an output per rank");
  check_carried("all_gather", inputs);
  return run({record_of(Kind::all_gather, inputs), options.timeout, true}, inputs,
             [=](c10d::Backend& engine) mutable { return engine.allgather(outputs, inputs, options); });
}

WorkPtr GlooBackend::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  check_carried("all_gather", {input, output});
  return run({make_record(Kind::all_gather, input), options.timeout, true}, {input},
             [=](c10d::Backend& engine) mutable {
               at::Tensor flat_output = flat_view(output);
               at::Tensor flat_input = flat_view(input);
               return engine._allgather_base(flat_output, flat_input, options);
             });
}

WorkPtr GlooBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_carried("all_gather", inputs);
  return run({record_of(Kind::all_gather, inputs), options.timeout, true}, inputs,
             [=](c10d::Backend& engine) mutable { return engine.allgather_coalesced(outputs, inputs, options); });
}

WorkPtr GlooBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  check_carried("all_gather", inputs);
  return run({record_of(Kind::all_gather, inputs), options.timeout, true}, inputs, [=](c10d::Backend& engine) mutable {
    Tensors flat_outputs;
    Tensors flat_inputs;
    for (const at::Tensor& output : outputs) flat_outputs.push_back(flat_view(output));
    for (const at::Tensor& input : inputs) flat_inputs.push_back(flat_view(input));
    return engine.allgather_into_tensor_coalesced(flat_outputs, flat_inputs, options);
  });
}

WorkPtr GlooBackend::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  check_lists(inputs.size() == 1 && fit_root(outputs, options.rootRank == getRank(), getSize()), "gather",
              "one input, and at the root alone one list of an output per rank");
  check_carried("gather", inputs);
  return run({record_of(Kind::gather, inputs, options.rootRank), options.timeout, true}, inputs,
             [=](c10d::Backend& engine) mutable { return engine.gather(outputs, inputs, options); });
}

WorkPtr GlooBackend::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  check_lists(outputs.size() == 1 && fit_root(inputs, options.rootRank == getRank(), getSize()), "scatter",
              "one output, and at the root alone one list of an input per rank");
  check_memory("scatter", outputs);
  check_memory("scatter", first_list(inputs));
  check_carried("scatter", outputs);
  return run({record_of(Kind::scatter, outputs, options.rootRank), options.timeout, true}, first_list(inputs),
             [=](c10d::Backend& engine) mutable { return engine.scatter(outputs, inputs, options); });
}

WorkPtr GlooBackend::run_reduce_scatter(const Record& record, Tensors buffers, Tensors pieces, const Tensors& outputs,
                                        const c10d::ReduceScatterOptions& options) {
  for (size_t i = 0; i < outputs.size(); ++i) check_piece(pieces[i], outputs[i]);
  check_reduction("reduce_scatter", buffers, options.reduceOp);
  Reduced reduced = make_reduced(buffers, options.reduceOp, getSize());
  c10d::AllreduceCoalescedOptions reduction;
  reduction.reduceOp = reduced.op;
  reduction.timeout = options.timeout;
  const auto copy = [restore = reduced.restore, pieces = std::move(pieces), outputs] {
    if (restore) restore();
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].copy_(pieces[i].view_as(outputs[i]));
  };
  const auto issue = [=](c10d::Backend& engine) mutable {
    return buffers.size() == 1 ? engine.allreduce(reduced.buffers, reduction)
                               : engine.allreduce_coalesced(reduced.buffers, reduction);
  };
  return run({record, options.timeout}, buffers, issue, {copy, outputs});
}

WorkPtr GlooBackend::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  const Tensors parts = first_list(inputs);
  check_lists(outputs.size() == 1 && inputs.size() == 1 && int(parts.size()) == getSize(), "reduce_scatter",
              "one output and one list of an input per rank");
  Tensors flat;
  for (const at::Tensor& part : parts) flat.push_back(part.reshape(-1));
  const at::Tensor buffer = at::cat(flat);
  int64_t begin = 0;
  for (int r = 0; r < getRank(); ++r) begin += parts[r].numel();
  const at::Tensor piece = buffer.narrow(0, begin, parts[getRank()].numel());
  return run_reduce_scatter(record_of(Kind::reduce_scatter, parts, -1, options.reduceOp), {buffer}, {piece}, outputs,
                            options);
}

WorkPtr GlooBackend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr GlooBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  check_lists(outputs.size() == inputs.size() && !inputs.empty(), "reduce_scatter", "as many outputs as inputs");
  Tensors buffers;
  Tensors pieces;
  for (const at::Tensor& input : inputs) {
    buffers.push_back(input.reshape(-1).clone());
    const int64_t count = input.numel() / getSize();
    pieces.push_back(buffers.back().narrow(0, getRank() * count, count));
    check_lists(count * getSize() == input.numel(), "reduce_scatter", "inputs that the number of ranks divides");
  }
  return run_reduce_scatter(record_of(Kind::reduce_scatter, inputs, -1, options.reduceOp), buffers, pieces, outputs,
                            options);
}

WorkPtr GlooBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                   std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  check_memory("all_to_all", {input, output});
  check_carried("all_to_all", {input, output});
  const bool even = output_sizes.empty() && input_sizes.empty();
  return run({make_record(Kind::all_to_all, input), options.timeout, even}, {input},
             [=](c10d::Backend& engine) mutable {
               return engine.alltoall_base(output, input, output_sizes, input_sizes, options);
             });
}

WorkPtr GlooBackend::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  check_lists(int(inputs.size()) == getSize() && int(outputs.size()) == getSize(), "all_to_all",
              "an input and an output per rank");
  check_carried("all_to_all", inputs);
  return run({record_of(Kind::all_to_all, inputs), options.timeout}, inputs,
             [=](c10d::Backend& engine) mutable { return engine.alltoall(outputs, inputs, options); });
}

WorkPtr GlooBackend::barrier(const c10d::BarrierOptions& options) {
  return run({make_record(Kind::barrier, {}), options.timeout}, {},
             [=](c10d::Backend& engine) mutable { return engine.barrier(options); });
}

WorkPtr GlooBackend::send(Tensors& tensors, int peer, int tag) {
  check_memory("send", tensors);
  return run_peer(record_of(Kind::send, tensors, peer), tensors,
                  [=](c10d::Backend& engine) mutable { return engine.send(tensors, peer, tag); });
}

WorkPtr GlooBackend::recv(Tensors& tensors, int peer, int tag) {
  check_memory("recv", tensors);
  return run_peer(record_of(Kind::recv, tensors, peer), {},
                  [=](c10d::Backend& engine) mutable { return engine.recv(tensors, peer, tag); });
}

WorkPtr GlooBackend::recvAnysource(Tensors& tensors, int tag) {
  check_memory("recv", tensors);
  return run_peer(record_of(Kind::recv, tensors), {},
                  [=](c10d::Backend& engine) mutable { return engine.recvAnysource(tensors, tag); });
}

}  // namespace serried::gloo
