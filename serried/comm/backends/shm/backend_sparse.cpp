// all_reduce of sparse tensors: everybody gathers everybody's entries and adds them up.
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_validate_sparse_coo_tensor_args.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/shm/backend.h"
#include "serried/comm/backends/shm/tensors.h"

namespace serried::shm {
namespace {

/// All ranks' rows of `mine` (dim 0), in rank order; `rows` says how many each has.
at::Tensor gather_rows(Runner& engine, const at::Tensor& mine, const at::Tensor& rows, Op like) {
  const int64_t* counts = rows.const_data_ptr<int64_t>();
  Tensors pieces;
  for (int rank = 0; rank < engine.world_size(); ++rank) {
    std::vector<int64_t> sizes = mine.sizes().vec();
    sizes[0] = counts[rank];
    pieces.push_back(at::empty(sizes, mine.options()));
  }
  Op op = all_gather_op(pieces, mine, {.rank = engine.rank(), .world_size = engine.world_size()});
  op.timeout = like.timeout;
  run(engine, op);
  return at::cat(pieces);
}

/// Entries that lie outside of this rank's tensor would be written beside it.
void check_fits(const at::Tensor& indices, const at::Tensor& values, const at::Tensor& like) {
  try {
    at::_validate_sparse_coo_tensor_args(indices, values, like.sizes(), /*is_coalesced=*/false);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    raise<c10::DistBackendError>({"all_reduce",
                                  c10::str("entries of another rank do not fit into the sparse ",
                                           watch::describe_tensor(like), ": ", text.substr(0, text.find('\n'))),
                                  "pass sparse tensors of the same size on every rank"});
  }
}

/// The sum over ranks, coalesced.
at::Tensor sum_sparse(Runner& engine, const at::Tensor& input, const Op& like) {
  const at::Tensor coalesced = input.coalesce();
  const at::Tensor indices = coalesced.indices().t().contiguous();  // entries along dim 0
  const at::Tensor values = coalesced.values().contiguous();
  at::Tensor mine = at::empty({1}, at::kLong);
  mine.fill_(values.size(0));
  at::Tensor rows = at::empty({engine.world_size()}, at::kLong);
  Op op = all_gather_flat_op(rows, mine);
  op.timeout = like.timeout;
  run(engine, op);
  const at::Tensor all_indices = gather_rows(engine, indices, rows, like);
  const at::Tensor all_values = gather_rows(engine, values, rows, like);
  check_fits(all_indices.t(), all_values, input);
  return at::_sparse_coo_tensor_unsafe(all_indices.t(), all_values, input.sizes(), input.options(), false).coalesce();
}

}  // namespace

WorkPtr ShmBackend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = only("all_reduce", tensors);
  if (tensor.layout() != at::kSparse || !tensor.device().is_cpu() || options.reduceOp != RedOpType::SUM) {
    raise<c10::ValueError>({"all_reduce",
                            c10::str("sparse all_reduce of ", watch::describe_tensor(tensor), " with layout ",
                                     tensor.layout(), " on ", tensor.device()),
                            "pass a sparse COO tensor on the CPU and the op SUM"});
  }
  check_sent("all_reduce", tensors);
  Task task;
  task.outputs = tensors;
  task.op.record.kind = watch::Kind::all_reduce;
  Op like;
  like.timeout = timeout_or_default(options.timeout);
  task.program = [tensor, like](Runner& engine) {
    at::AutoDispatchBelowAutograd guard;
    at::Tensor(tensor).copy_(sum_sparse(engine, tensor.detach(), like));
  };
  return issue(c10d::OpType::_ALLREDUCE_SPARSE, std::move(task), call_options(options), tensors);
}

}  // namespace serried::shm
