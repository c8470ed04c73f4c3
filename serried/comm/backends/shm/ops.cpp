// Each collective as pieces: who offers what to whom, and who takes it.
#include "serried/comm/backends/shm/ops.h"

#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/comm/collectives/reductions.h"

namespace serried::shm {
namespace {

using watch::Kind;

char* bytes_of(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<char*>(tensor.mutable_data_ptr());
}

Piece piece_of(const at::Tensor& tensor) {
  return {.data = bytes_of(tensor), .bytes = int64_t(tensor.nbytes())};
}

Pieces same_for_all(const at::Tensor& tensor) {
  return {.base = bytes_of(tensor), .stride = 0, .bytes = int64_t(tensor.nbytes()), .list = {}, .only = -1};
}

Pieces in_a_row(const at::Tensor& tensor, int64_t piece_bytes) {
  return {.base = bytes_of(tensor), .stride = piece_bytes, .bytes = piece_bytes, .list = {}, .only = -1};
}

Pieces only_for(int peer, Pieces pieces) {
  pieces.only = peer;
  return pieces;
}

Pieces one_each(at::TensorList tensors) {
  Pieces pieces;
  for (const at::Tensor& tensor : tensors) pieces.list.push_back(piece_of(tensor));
  return pieces;
}

/// No piece from any peer: an exchange in which this rank only gives.
Pieces nothing(Place place) {
  return {.base = nullptr, .stride = 0, .bytes = 0, .list = {}, .only = place.rank};
}

Op reduction(Op::Kind kind, const watch::Record& record, const at::Tensor& result, RedOpType op) {
  Op made;
  made.kind = kind;
  made.record = record;
  made.kernel = require_kernel(watch::kind_name(record.kind), result.scalar_type(), op);
  made.element_bytes = int64_t(result.element_size());
  made.count = result.numel();
  return made;
}

#if defined(__x86_64__)
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
#endif

Op exchange(const watch::Record& record, Pieces offers, Pieces sinks) {
  Op made;
  made.kind = Op::Kind::exchange;
  made.record = record;
  made.offers = std::move(offers);
  made.sinks = std::move(sinks);
  return made;
}

}  // namespace

RedOpType engine_op(const c10d::ReduceOp& op) {
  return op.op_ == RedOpType::PREMUL_SUM ? RedOpType::SUM : op.op_;
}

at::Tensor contributed(const at::Tensor& input, const c10d::ReduceOp& op, std::vector<at::Tensor>& kept) {
  if (op.op_ != RedOpType::PREMUL_SUM) return input;
  kept.push_back(detail::premultiplied(input, op));
  return kept.back();
}

// For the instruction set of this machine.
ReduceKernel find_reduce_kernel(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
#if defined(__x86_64__)
  if (has_avx2()) return avx2::find(dtype, op);
#endif
  return baseline::find(dtype, op);
}

PartialReduction find_partial_reduction(c10::ScalarType dtype, c10d::ReduceOp::RedOpType op) {
#if defined(__x86_64__)
  if (has_avx2()) return avx2::find_partial(dtype, op);
#endif
  return baseline::find_partial(dtype, op);
}

ReduceKernel require_kernel(std::string_view where, at::ScalarType dtype, RedOpType op) {
  if (ReduceKernel kernel = find_reduce_kernel(dtype, op)) return kernel;
  raise<c10::ValueError>(
      {where, c10::str("op ", to_string(op), " has no meaning for dtype ", watch::dtype_name(dtype)),
       "bitwise ops take integers and bool; min and max take no complex numbers; avg takes no bool"});
}

Op all_reduce_op(const at::Tensor& input, const at::Tensor& output, RedOpType op) {
  Op made = reduction(Op::Kind::all_reduce, watch::make_record(Kind::all_reduce, input, -1, op), input, op);
  made.input = bytes_of(input);
  made.output = bytes_of(output);
  return made;
}

Op broadcast_op(const at::Tensor& tensor, int root, Place place) {
  const bool is_root = place.rank == root;
  // The root's own sink is its tensor: nothing to copy.
  return exchange(watch::make_record(Kind::broadcast, tensor, root), is_root ? same_for_all(tensor) : nothing(place),
                  only_for(root, same_for_all(tensor)));
}

Op all_gather_op(at::TensorList outputs, const at::Tensor& input, Place) {
  return exchange(watch::make_record(Kind::all_gather, input), same_for_all(input), one_each(outputs));
}

Op all_gather_flat_op(const at::Tensor& output, const at::Tensor& input) {
  return exchange(watch::make_record(Kind::all_gather, input), same_for_all(input),
                  in_a_row(output, int64_t(input.nbytes())));
}

Op gather_rows_op(const at::Tensor& output, const at::Tensor& input, at::IntArrayRef rows) {
  Pieces sinks = same_for_all(input);
  sinks.base = bytes_of(output);
  Op made = exchange(watch::make_record(Kind::all_gather, input), same_for_all(input), std::move(sinks));
  made.rows = rows.vec();
  made.element_bytes = int64_t(input.element_size());
  return made;
}

Op reduce_scatter_op(const at::Tensor& output, at::TensorList inputs, RedOpType op, Place place) {
  // Ranks may get results of different sizes, so the sizes are no part of what must agree.
  watch::Record record = watch::make_record(Kind::reduce_scatter, output, -1, op);
  record.num_dims = 0;
  record.num_elements = 0;
  for (const at::Tensor& input : inputs) record.num_elements += input.numel();
  Op made = reduction(Op::Kind::reduce_pieces, record, output, op);
  made.offers = one_each(inputs);
  made.sinks = only_for(place.rank, same_for_all(output));
  return made;
}

Op reduce_scatter_flat_op(const at::Tensor& output, const at::Tensor& input, RedOpType op, Place place) {
  Op made = reduction(Op::Kind::reduce_pieces, watch::make_record(Kind::reduce_scatter, input, -1, op), output, op);
  made.offers = in_a_row(input, int64_t(output.nbytes()));
  made.sinks = only_for(place.rank, same_for_all(output));
  return made;
}

Op reduce_op(const at::Tensor& tensor, int root, RedOpType op, Place place) {
  Op made = reduction(Op::Kind::reduce_pieces, watch::make_record(Kind::reduce, tensor, root, op), tensor, op);
  made.offers = same_for_all(tensor);
  made.sinks = place.rank == root ? only_for(root, same_for_all(tensor)) : nothing(place);
  return made;
}

Op gather_op(at::TensorList outputs, const at::Tensor& input, int root, Place place) {
  return exchange(watch::make_record(Kind::gather, input, root), same_for_all(input),
                  place.rank == root ? one_each(outputs) : nothing(place));
}

Op scatter_op(const at::Tensor& output, at::TensorList inputs, int root, Place place) {
  return exchange(watch::make_record(Kind::scatter, output, root),
                  place.rank == root ? one_each(inputs) : nothing(place), only_for(root, same_for_all(output)));
}

Op all_to_all_op(at::TensorList outputs, at::TensorList inputs, Place) {
  return exchange(watch::make_record(Kind::all_to_all, inputs.empty() ? at::Tensor() : inputs.front()),
                  one_each(inputs), one_each(outputs));
}

Op all_to_all_flat_op(const at::Tensor& output, const at::Tensor& input, Place place) {
  const int64_t piece = int64_t(input.nbytes()) / place.world_size;
  return exchange(watch::make_record(Kind::all_to_all, input), in_a_row(input, piece), in_a_row(output, piece));
}

Op barrier_op() {
  Op made;
  made.kind = Op::Kind::barrier;
  made.record = watch::make_record(Kind::barrier, at::Tensor());
  return made;
}

}  // namespace serried::shm
