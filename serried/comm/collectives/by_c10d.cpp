// One function per kind of collective: what is sent, c10d's call, and what is done with what came.
#include "serried/comm/collectives/door.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>

#include "serried/comm/collectives/chained_work.h"
#include "serried/comm/collectives/pieces.h"
#include "serried/comm/collectives/reductions.h"

namespace serried::detail {
namespace {

using RedOpType = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;

/// What c10d has started, and what is left to do after it.
struct Started {
  WorkPtr work;
  std::function<void()> after = nullptr;
};

// Dtypes that any backend can carry under their own name, so that its checks and messages speak of them.
bool is_common(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kByte:
    case at::kChar:
    case at::kInt:
    case at::kLong: return true;
    default: return false;
  }
}

// What only moves may move as bytes: a backend that cannot name the dtype still carries it. Dims of one element may
// have any stride, which a view as bytes would not take.
at::Tensor carried(const at::Tensor& x) {
  return is_common(x.scalar_type()) ? x : x.as_strided({x.numel()}, {1}).view(at::kByte);
}

at::Tensor carried_flat(const at::Tensor& x) {
  return carried(x).view({-1});
}

Tensors all_flat(at::TensorList pieces) {
  Tensors flat;
  for (const at::Tensor& piece : pieces) flat.push_back(carried_flat(piece));
  return flat;
}

std::vector<int64_t> lengths(const Tensors& flat) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& piece : flat) sizes.push_back(piece.numel());
  return sizes;
}

// Backends without complex numbers can add their parts.
at::Tensor addable(const at::Tensor& x, RedOpType op) {
  return x.is_complex() && op == RedOpType::SUM ? at::view_as_real(x) : x;
}

WorkPtr start_reduction(c10d::Backend& backend, const at::Tensor& x, const c10d::ReduceOp& op, const Collective& c) {
  Tensors tensors{addable(x, op.op_)};
  if (c.kind == watch::Kind::reduce) {
    c10d::ReduceOptions options;
    options.reduceOp = op;
    options.rootRank = c.root;
    options.timeout = c.timeout;
    return backend.reduce(tensors, options);
  }
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  options.timeout = c.timeout;
  return backend.allreduce(tensors, options);
}

// Reduces `x` in place; `then` is run once it holds the result. Not every backend has AVG and PREMUL_SUM, but every one
// can add.
Started reduce_in_place(c10d::Backend& backend, const at::Tensor& x, const Collective& c, std::function<void()> then) {
  const RedOpType op = c.op->op_;
  if (op == RedOpType::PREMUL_SUM) x.copy_(premultiplied(x, *c.op));
  const bool is_average = op == RedOpType::AVG;
  const int64_t count = backend.getSize();
  const at::Tensor reduced = is_average ? average_addends(x, count) : x;
  const bool adds = is_average || op == RedOpType::PREMUL_SUM;
  const WorkPtr work = start_reduction(backend, reduced, adds ? c10d::ReduceOp(RedOpType::SUM) : *c.op, c);
  if (!is_average) return {work, std::move(then)};
  return {work, [x, reduced, count, then = std::move(then)] {
            write_average(x, reduced, count);
            if (then) then();
          }};
}

Started all_reduce(c10d::Backend& backend, const Collective& c) {
  const at::Tensor &input = c.inputs[0], &output = c.outputs[0];
  if (!output.is_same(input)) output.copy_(input);
  return reduce_in_place(backend, output, c, nullptr);
}

// Only the root gets the result.
Started reduce(c10d::Backend& backend, const Collective& c) {
  const at::Tensor sum = c.inputs[0].clone();
  const at::Tensor output = backend.getRank() == c.root ? c.outputs[0] : at::Tensor();
  return reduce_in_place(backend, sum, c, [sum, output] {
    if (output.defined()) output.copy_(sum);
  });
}

// c10d's reduce_scatter takes equal pieces only; Gloo's is an all_reduce inside, so nothing is lost by saying so.
Started reduce_scatter(c10d::Backend& backend, const Collective& c) {
  const at::Tensor output = c.outputs[0];
  const bool is_flat = c.inputs.size() == 1;
  Tensors flat;
  for (const at::Tensor& piece : c.inputs) flat.push_back(piece.view({-1}));
  const at::Tensor whole = at::cat(flat);
  int64_t begin = is_flat ? backend.getRank() * output.numel() : 0;
  for (int rank = 0; !is_flat && rank < backend.getRank(); ++rank) begin += c.inputs[rank].numel();
  return reduce_in_place(backend, whole, c, [output, whole, begin] {
    output.copy_(whole.narrow(0, begin, output.numel()).view(output.sizes()));
  });
}

WorkPtr gather_flat(c10d::Backend& backend, const at::Tensor& output, const at::Tensor& input, const Collective& c) {
  at::Tensor from = carried_flat(input), to = carried_flat(output);
  c10d::AllgatherOptions options;
  options.timeout = c.timeout;
  return backend._allgather_base(to, from, options);
}

// Pieces of different sizes travel padded to the longest.
Started all_gather(c10d::Backend& backend, const Collective& c) {
  if (c.outputs.size() == 1) return {gather_flat(backend, c.outputs[0], c.inputs[0], c)};
  const Tensors flat = all_flat(c.outputs);
  int64_t longest = 0;
  for (const at::Tensor& piece : flat) longest = std::max(longest, piece.numel());
  const at::Tensor mine = carried_flat(c.inputs[0]);
  const at::Tensor from = at::zeros({longest}, mine.options());
  from.narrow(0, 0, mine.numel()).copy_(mine);
  const at::Tensor to = at::empty({backend.getSize() * longest}, from.options());
  return {gather_flat(backend, to, from, c), [flat, to, longest] {
            for (size_t rank = 0; rank < flat.size(); ++rank) {
              flat[rank].copy_(to.narrow(0, int64_t(rank) * longest, flat[rank].numel()));
            }
          }};
}

Started exchange(c10d::Backend& backend, const Tensors& sent, const Tensors& flat, const Collective& c) {
  c10d::AllToAllOptions options;
  options.timeout = c.timeout;
  // Backends take sizes by reference and may move them away.
  if (sent.size() == 1) {
    at::Tensor from = sent[0], to = flat[0];
    std::vector<int64_t> equal, equal_too;
    return {backend.alltoall_base(to, from, equal, equal_too, options)};
  }
  const std::vector<int64_t> received_sizes = lengths(flat);
  at::Tensor from = at::cat(sent);
  at::Tensor to = at::empty({sum_of(received_sizes)}, from.options());
  std::vector<int64_t> input_sizes = lengths(sent), output_sizes = received_sizes;
  return {backend.alltoall_base(to, from, output_sizes, input_sizes, options), [flat, to, received_sizes] {
            const Tensors received = to.split_with_sizes(received_sizes);
            for (size_t rank = 0; rank < flat.size(); ++rank) flat[rank].copy_(received[rank]);
          }};
}

Started all_to_all(c10d::Backend& backend, const Collective& c) {
  return exchange(backend, all_flat(c.inputs), all_flat(c.outputs), c);
}

// c10d's gather and scatter take equal pieces only; an exchange in which only the root gets, or gives, takes any.
Started gather(c10d::Backend& backend, const Collective& c) {
  const watch::PartOf scope("gather");
  const at::Tensor mine = carried_flat(c.inputs[0]);
  Tensors sent(size_t(backend.getSize()), mine.narrow(0, 0, 0)), flat = sent;
  sent[size_t(c.root)] = mine;
  return exchange(backend, sent, backend.getRank() == c.root ? all_flat(c.outputs) : flat, c);
}

Started scatter(c10d::Backend& backend, const Collective& c) {
  const watch::PartOf scope("scatter");
  const at::Tensor mine = carried_flat(c.outputs[0]);
  Tensors flat(size_t(backend.getSize()), mine.narrow(0, 0, 0)), sent = flat;
  flat[size_t(c.root)] = mine;
  return exchange(backend, backend.getRank() == c.root ? all_flat(c.inputs) : sent, flat, c);
}

Started broadcast(c10d::Backend& backend, const Collective& c) {
  Tensors tensors{carried(c.outputs[0])};
  c10d::BroadcastOptions options;
  options.rootRank = c.root;
  options.timeout = c.timeout;
  return {backend.broadcast(tensors, options)};
}

Started barrier(c10d::Backend& backend, const Collective& c) {
  c10d::BarrierOptions options;
  options.timeout = c.timeout;
  return {backend.barrier(options)};
}

Started begin(c10d::Backend& backend, const Collective& c) {
  Tensors tensors = (c.kind == watch::Kind::recv ? c.outputs : c.inputs).vec();
  switch (c.kind) {
    case watch::Kind::all_reduce: return all_reduce(backend, c);
    case watch::Kind::reduce: return reduce(backend, c);
    case watch::Kind::reduce_scatter: return reduce_scatter(backend, c);
    case watch::Kind::all_gather: return all_gather(backend, c);
    case watch::Kind::all_to_all: return all_to_all(backend, c);
    case watch::Kind::gather: return gather(backend, c);
    case watch::Kind::scatter: return scatter(backend, c);
    case watch::Kind::broadcast: return broadcast(backend, c);
    case watch::Kind::barrier: return barrier(backend, c);
    case watch::Kind::send: return {backend.send(tensors, c.root, c.tag)};
    case watch::Kind::recv: return {backend.recv(tensors, c.root, c.tag)};
    default: TORCH_INTERNAL_ASSERT(false, "no call of c10d for ", watch::kind_name(c.kind));
  }
}

}  // namespace

WorkPtr start_by_c10d(c10d::Backend& backend, const Collective& collective) {
  const at::AutoDispatchBelowADInplaceOrView below;
  ChainedWorkOptions options{collective.where, backend.getBackendName()};
  // A send and a receive have no options: their timeout is that of the wait.
  if (collective.is_point_to_point() && collective.timeout != c10d::kUnsetTimeout) options.timeout = collective.timeout;
  Started started = in_our_words(options.where, options.backend, [&] { return begin(backend, collective); });
  return c10::make_intrusive<ChainedWork>(std::move(started.work), std::move(started.after), std::move(options));
}

}  // namespace serried::detail
