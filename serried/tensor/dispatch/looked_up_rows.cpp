// One mark per row of the table, and the largest of all ranks: lists of rows differ in length from rank to rank.
#include "serried/tensor/dispatch/looked_up_rows.h"

#include <ATen/ATen.h>

#include "serried/base/error.h"
#include "serried/tape/recorder.h"
#include "serried/tensor/dispatch/handlers.h"
#include "serried/tensor/dispatch/local_only.h"
#include "serried/tensor/meta.h"
#include "serried/tensor/redistribute/redistribute.h"

namespace serried::detail {

at::Tensor rows_of_all_ranks(const at::Tensor& rows, int64_t num_rows, const DeviceMesh& mesh) {
  if (tape::is_replayed()) {
    raise<c10::NotImplementedError>({"embedding_renorm_",
                                     "which rows of a sharded table the ranks look up is read on the host, and a "
                                     "replay does not do that",
                                     "run this step eagerly, or build the Embedding without max_norm"});
  }
  const DTensorMeta* meta = dtensor_meta(rows);
  const at::Tensor mine = meta != nullptr ? whole_local(*meta) : rows;
  const LocalOnly local_only;
  const at::Tensor marks = at::zeros({num_rows}, mine.options().dtype(at::kInt));
  marks.index_fill_(0, mine.reshape(-1).to(at::kLong), 1);
  const Placements pending(size_t(mesh.ndim()), Partial(ReduceKind::max));
  const SpecPtr spec = spec_of_result(marks, mesh, pending, marks.sizes());
  const at::Tensor all = redistribute_local(marks, *spec, Placements(size_t(mesh.ndim())));
  return all.nonzero().view(-1).to(mine.scalar_type());
}

}  // namespace serried::detail
