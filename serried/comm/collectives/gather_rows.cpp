// gather_rows_into: an all_gather of buffers in which several tensors lie, each of which arrives whole.
#include <ATen/ops/empty.h>

#include "serried/base/error.h"
#include "serried/comm/collectives/op.h"
#include "serried/comm/collectives/rows.h"

namespace serried::detail {
namespace {

// Backends write by the table without a look at it.
void check_table(const at::Tensor& whole, const at::Tensor& x, int num_ranks, at::IntArrayRef numbers) {
  const RowTable table{numbers, num_ranks, 1};
  bool fits = numbers.size() % RowTable::kFields == 0 && whole.is_contiguous() &&
              whole.scalar_type() == x.scalar_type() && whole.device() == x.device();
  for (size_t i = 0; fits && i < table.size(); ++i) {
    const RowsOfTensor t = table[i];
    const int64_t each = (t.rows + num_ranks - 1) / num_ranks;
    fits = t.from >= 0 && t.to >= 0 && t.outer >= 0 && t.rows >= 0 && t.inner >= 0 &&
           t.from + t.outer * each * t.inner <= x.numel() && t.to + t.outer * t.rows * t.inner <= whole.numel();
  }
  if (fits) return;
  raise<c10::ValueError>({"gather_rows_into",
                          c10::str("the table ", numbers, " does not fit ", watch::describe_tensor(x), " on each of ",
                                   num_ranks, " ranks and ", watch::describe_tensor(whole)),
                          "name places inside of a contiguous output of the input's dtype"});
}

struct GatherRowsInto {
  static constexpr const char* kName = "gather_rows_into";
  static constexpr bool kWrites = true;
  static constexpr const char* kArguments =
      "Tensor(a!) output, Tensor x, __torch__.torch.classes.c10d.ProcessGroup group, int[] table";

  static void kernel(const at::Tensor& whole, const at::Tensor& x, const Group& group, at::IntArrayRef table,
                     TimeoutMs timeout, WorkPtr* started) {
    const int num_ranks = group->getSize();
    check_table(whole, x, num_ranks, table);
    const at::Tensor input = x.contiguous();
    Collective gather{.kind = watch::Kind::all_gather,
                      .where = "all_gather",
                      .inputs = input,
                      .outputs = whole,
                      .timeout = in_milliseconds(timeout),
                      .rows = table};
    if (!table.empty() && places_rows(group, input)) return carry_out(group, gather, started);
    const at::Tensor gathered = at::empty({num_ranks * input.numel()}, input.options());
    gather.outputs = gathered;
    gather.rows = {};
    carry_out(group, gather, started, [=, table = table.vec()] { copy_gathered(table, num_ranks, gathered, whole); });
  }
  static void refuse_gradient(const at::Tensor& whole, const at::Tensor& x, const Group&, at::IntArrayRef) {
    refuse_gradient_into(whole, x);
  }

 private:
  static void copy_gathered(at::IntArrayRef numbers, int num_ranks, const at::Tensor& gathered,
                            const at::Tensor& whole) {
    if (!gathered.device().is_cpu()) return copy_rows(numbers, num_ranks, gathered, whole);
    const RowTable table{numbers, num_ranks, int64_t(gathered.element_size())};
    const int64_t bytes = int64_t(gathered.nbytes()) / num_ranks;
    const char* from = static_cast<const char*>(gathered.const_data_ptr());
    char* to = static_cast<char*>(whole.mutable_data_ptr());
    for (int r = 0; r < num_ranks; ++r) {
      place_rows(table, r, {.data = from + r * bytes, .begin = 0, .end = bytes}, to);
    }
  }
};

using GatherRowsIntoOp = PlainOp<GatherRowsInto, const at::Tensor&, const Group&, at::IntArrayRef>;

TORCH_LIBRARY_FRAGMENT(serried, m) {
  GatherRowsIntoOp::define(m);
}

TORCH_LIBRARY_IMPL(serried, CompositeExplicitAutograd, m) {
  GatherRowsIntoOp::on_devices(m);
}

TORCH_LIBRARY_IMPL(serried, Meta, m) {
  GatherRowsIntoOp::on_meta(m);
}

TORCH_LIBRARY_IMPL(serried, Autograd, m) {
  GatherRowsIntoOp::on_autograd(m);
}

TORCH_LIBRARY_IMPL(serried, ADInplaceOrView, m) {
  GatherRowsIntoOp::on_version_count(m);
}

}  // namespace

void ops::gather_rows_into(const at::Tensor& whole, const at::Tensor& x, const Group& group, at::IntArrayRef table,
                           WorkPtr* started) {
  GatherRowsIntoOp::call_or_start(whole, x, group, table, {}, started);
}

}  // namespace serried::detail
