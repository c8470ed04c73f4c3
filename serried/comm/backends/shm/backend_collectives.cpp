// Collectives as the door describes them: each is one Op of the engine.
#include "serried/comm/backends/shm/backend.h"

namespace serried::shm {
namespace {

using detail::Collective;
using watch::Kind;

c10d::OpType type_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce: return c10d::OpType::ALLREDUCE;
    case Kind::reduce: return c10d::OpType::REDUCE;
    case Kind::reduce_scatter: return c10d::OpType::REDUCE_SCATTER;
    case Kind::all_gather: return c10d::OpType::ALLGATHER;
    case Kind::gather: return c10d::OpType::GATHER;
    case Kind::scatter: return c10d::OpType::SCATTER;
    case Kind::all_to_all: return c10d::OpType::ALLTOALL;
    case Kind::broadcast: return c10d::OpType::BROADCAST;
    case Kind::barrier: return c10d::OpType::BARRIER;
    default: return c10d::OpType::UNKNOWN;
  }
}

Op reduced_to_root(const Collective& c, const at::Tensor& input, RedOpType op, Place place) {
  Op made = reduce_op(input, c.root, op, place);
  const at::Tensor& output = c.outputs[0];
  made.sinks.base = output.numel() == 0 ? nullptr : static_cast<char*>(output.mutable_data_ptr());
  return made;
}

Op plain_op_of(const Collective& c, at::TensorList inputs, RedOpType op, Place place) {
  const bool is_flat = inputs.size() == 1 && c.outputs.size() == 1;
  switch (c.kind) {
    case Kind::all_reduce: return all_reduce_op(inputs[0], c.outputs[0], op);
    case Kind::reduce: return reduced_to_root(c, inputs[0], op, place);
    case Kind::reduce_scatter:
      return is_flat ? reduce_scatter_flat_op(c.outputs[0], inputs[0], op, place)
                     : reduce_scatter_op(c.outputs[0], inputs, op, place);
    case Kind::all_gather:
      if (!c.rows.empty()) return gather_rows_op(c.outputs[0], inputs[0], c.rows);
      return is_flat ? all_gather_flat_op(c.outputs[0], inputs[0]) : all_gather_op(c.outputs, inputs[0], place);
    case Kind::all_to_all:
      return is_flat ? all_to_all_flat_op(c.outputs[0], inputs[0], place) : all_to_all_op(c.outputs, inputs, place);
    case Kind::gather: return gather_op(c.outputs, inputs[0], c.root, place);
    case Kind::scatter: return scatter_op(c.outputs[0], inputs, c.root, place);
    case Kind::broadcast: return broadcast_op(c.outputs[0], c.root, place);
    case Kind::barrier: return barrier_op();
    default: TORCH_INTERNAL_ASSERT(false, "no Op for ", watch::kind_name(c.kind));
  }
}

// PREMUL_SUM is the one reduction that changes what is sent.
Op op_of(const Collective& c, Place place, Tensors& kept) {
  if (c.op == nullptr) return plain_op_of(c, c.inputs, c10d::ReduceOp::UNUSED, place);
  const RedOpType op = engine_op(*c.op);
  if (op == c.op->op_) return plain_op_of(c, c.inputs, op, place);
  Tensors inputs;
  for (const at::Tensor& input : c.inputs) inputs.push_back(contributed(input, *c.op, kept));
  return plain_op_of(c, inputs, op, place);
}

}  // namespace

void ShmBackend::run(const Collective& c) {
  if (c.is_point_to_point()) {
    post(c)->wait();
    return;
  }
  const detail::ProfiledScope event(args_.backend, c.kind, c.inputs);
  Tensors kept;
  Op op = op_of(c, place(), kept);
  op.timeout = timeout_or_default(c.timeout);
  detail::run_seen(*this, op.record, [&](const detail::SeenCall& seen) { driver_->run_now(op, seen); });
}

WorkPtr ShmBackend::start(const Collective& c) {
  if (c.is_point_to_point()) return post(c);
  Task task;
  task.op = op_of(c, place(), task.keep_alive);
  task.outputs = c.outputs.vec();
  task.keep_alive.insert(task.keep_alive.end(), c.inputs.begin(), c.inputs.end());
  return issue(type_of(c.kind), std::move(task), {.timeout = c.timeout}, c.inputs);
}

WorkPtr ShmBackend::post(const Collective& c) {
  const bool sends = c.kind == Kind::send;
  return post(sends ? Transfer::Direction::send : Transfer::Direction::receive, sends ? c.inputs[0] : c.outputs[0],
              c.root, c.tag, c.timeout);
}

}  // namespace serried::shm
