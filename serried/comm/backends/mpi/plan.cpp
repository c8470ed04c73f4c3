// One function per kind of collective. What a rank calls decides which call of MPI it makes only where the watch has
// made sure that all ranks called alike: MPI itself would mix up different calls in silence.
#include "serried/comm/backends/mpi/plan.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/mpi/library.h"
#include "serried/comm/backends/mpi/operations.h"
#include "serried/comm/backends/shm/ops.h"
#include "serried/comm/collectives/reductions.h"

namespace serried::mpi {
namespace {

using detail::Collective;
using detail::Failure;
using watch::Kind;
using RedOpType = c10d::ReduceOp::RedOpType;
using Tensors = std::vector<at::Tensor>;
using Parts = std::vector<Part>;

struct Ranks {
  int rank;
  int size;
};

Part part_of(const at::Tensor& x) {
  return {x.const_data_ptr(), int64_t(x.nbytes())};
}

void* place_of(const at::Tensor& x) {
  return x.numel() == 0 ? nullptr : x.mutable_data_ptr();
}

/// One per rank: tensors, or equal parts of a single one.
Parts parts_of(at::TensorList tensors, int size, bool written) {
  Parts parts;
  for (const at::Tensor& x : tensors)
    parts.push_back({written ? place_of(x) : x.const_data_ptr(), int64_t(x.nbytes())});
  if (parts.size() != 1) return parts;
  const auto* begin = static_cast<const char*>(parts[0].data);
  const int64_t bytes = parts[0].bytes / size;
  parts.clear();
  for (int r = 0; r < size; ++r) parts.push_back({begin + r * bytes, bytes});
  return parts;
}

// MPI reads nothing that it writes: a copy where they share memory.
at::Tensor apart(const at::Tensor& input, at::TensorList outputs) {
  const bool shared =
      std::any_of(outputs.begin(), outputs.end(), [&](const at::Tensor& output) { return output.is_alias_of(input); });
  return shared ? input.clone() : input;
}

watch::Record record_of(Kind kind, at::TensorList tensors, int root = -1, RedOpType op = c10d::ReduceOp::UNUSED) {
  watch::Record record = watch::make_record(kind, tensors.empty() ? at::Tensor() : tensors[0], root, op);
  if (tensors.size() < 2) return record;
  record.num_elements = 0;
  for (const at::Tensor& x : tensors) record.num_elements += x.numel();
  return record;
}

std::vector<int64_t> lengths(at::TensorList tensors) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& x : tensors) sizes.push_back(x.numel());
  return sizes;
}

bool all_equal(const std::vector<int64_t>& sizes) {
  return std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size == sizes[0]; });
}

// Pieces that differ must differ alike on all ranks, where the collective itself does not say what they count on.
void compare_pieces(watch::Record& record, const std::vector<int64_t>& sizes) {
  if (record.sizes_of_all == 0 && !all_equal(sizes)) record.sizes_of_all = watch::hash_sizes({sizes});
}

// ---- Reductions: what is added up, where the sum goes, and what is then done with it.

struct Addends {
  at::Tensor value;
  RedOpType op;
};

Addends addends_of(const char* where, const at::Tensor& x, const c10d::ReduceOp& op, int size) {
  shm::require_kernel(where, x.scalar_type(), shm::engine_op(op));
  if (op.op_ == RedOpType::AVG && x.scalar_type() == at::kUInt64) {
    raise<c10::ValueError>(
        {where, c10::str("mpi has no avg of ", watch::describe_tensor(x)), "reduce with sum, then divide"});
  }
  if (op.op_ == RedOpType::PREMUL_SUM) return {detail::premultiplied(x, op), RedOpType::SUM};
  if (op.op_ == RedOpType::AVG) return {detail::average_addends(x, size).contiguous(), RedOpType::SUM};
  return {x, op.op_};
}

std::function<void()> average_into(const Collective& c, const at::Tensor& output, const at::Tensor& sum, int size) {
  if (c.op->op_ != RedOpType::AVG) return nullptr;
  return [output, sum, size] { detail::write_average(output, sum, size); };
}

Step all_reduce_step(const at::Tensor& in, const at::Tensor& out, RedOpType op) {
  return {[in, out, op](MPI_Comm comm, Posted& posted) {
    post_all_reduce(comm, in.const_data_ptr(), place_of(out), in.numel(), reduction_of(in.scalar_type(), op), posted);
  }};
}

// Addends that are no longer the input are added up where they are.
const at::Tensor& sum_of(const Addends& addends, const at::Tensor& input, const at::Tensor& output) {
  const at::Tensor& value = addends.value;
  const bool fits = value.scalar_type() == output.scalar_type() && value.sizes() == output.sizes();
  return value.is_same(input) || fits ? output : value;
}

Plan all_reduce(const Collective& c, Ranks ranks) {
  const Addends addends = addends_of(c.where, c.inputs[0], *c.op, ranks.size);
  const at::Tensor sum = sum_of(addends, c.inputs[0], c.outputs[0]);
  return {record_of(c.kind, c.inputs, -1, c.op->op_),
          {all_reduce_step(addends.value, sum, addends.op)},
          average_into(c, c.outputs[0], sum, ranks.size)};
}

Plan reduce(const Collective& c, Ranks ranks) {
  const Addends addends = addends_of(c.where, c.inputs[0], *c.op, ranks.size);
  const bool is_root = ranks.rank == c.root;
  const at::Tensor sum = is_root ? sum_of(addends, c.inputs[0], c.outputs[0]) : at::Tensor();
  const auto post = [addends, sum, root = c.root](MPI_Comm comm, Posted& posted) {
    const at::Tensor& in = addends.value;
    post_reduce(comm, in.const_data_ptr(), sum.defined() ? place_of(sum) : nullptr, in.numel(), root,
                reduction_of(in.scalar_type(), addends.op), posted);
  };
  return {record_of(c.kind, c.inputs, c.root, c.op->op_),
          {{post}},
          is_root ? average_into(c, c.outputs[0], sum, ranks.size) : nullptr};
}

// Averages of integers need more than their sum: all ranks get that of everything.
Plan average_scattered(Plan plan, const Addends& addends, const at::Tensor& output, int64_t begin, int size) {
  const at::Tensor& sum = addends.value;
  plan.steps = {all_reduce_step(sum, sum, addends.op)};
  plan.after = [sum, output, begin, size] {
    std::vector<int64_t> sizes = output.sizes().vec();
    if (sum.dim() == 2) sizes.insert(sizes.begin(), sum.size(0));
    detail::write_average(output, sum.narrow(-1, begin, output.numel()).reshape(sizes), size);
  };
  return plan;
}

Plan reduce_scatter(const Collective& c, Ranks ranks) {
  const at::Tensor& output = c.outputs[0];
  std::vector<int64_t> counts = lengths(c.inputs);
  Tensors flat;
  for (const at::Tensor& piece : c.inputs) flat.push_back(piece.view({-1}));
  const at::Tensor whole = flat.size() == 1 ? apart(flat[0], output) : at::cat(flat);
  if (counts.size() == 1) counts.assign(size_t(ranks.size), output.numel());
  const Addends addends = addends_of(c.where, whole, *c.op, ranks.size);
  Plan plan{record_of(c.kind, whole, -1, c.op->op_), {}};
  compare_pieces(plan.record, counts);
  const bool is_average = c.op->op_ == RedOpType::AVG;
  if (is_average && at::isIntegralType(output.scalar_type(), /*includeBool=*/false)) {
    const int64_t begin = std::accumulate(counts.begin(), counts.begin() + ranks.rank, int64_t(0));
    return average_scattered(std::move(plan), addends, output, begin, ranks.size);
  }
  const at::Tensor& in = addends.value;
  const at::Tensor sum = in.scalar_type() == output.scalar_type() ? output : at::empty(output.sizes(), in.options());
  plan.steps = {{[addends, sum, counts](MPI_Comm comm, Posted& posted) {
    post_reduce_scatter(comm, addends.value.const_data_ptr(), place_of(sum), counts,
                        reduction_of(addends.value.scalar_type(), addends.op), posted);
  }}};
  plan.after = average_into(c, output, sum, ranks.size);
  return plan;
}

// ---- Moves.

Step exchange_step(Parts sent, Parts received) {
  const auto post = [sent = std::move(sent), received = std::move(received)](MPI_Comm comm, Posted& posted) {
    post_exchange(comm, sent, received, posted);
  };
  return {post};
}

// MPI takes a shorter message than it was promised without a word.
Step sizes_step(const watch::Record& record, const Parts& sent, const Parts& received, int rank) {
  struct Sizes {
    std::vector<int64_t> sent, wanted, coming;
  };
  const auto sizes = std::make_shared<Sizes>();
  for (const Part& part : sent) sizes->sent.push_back(part.bytes);
  for (const Part& part : received) sizes->wanted.push_back(part.bytes);
  sizes->coming.resize(received.size());
  const auto post = [sizes](MPI_Comm comm, Posted& posted) {
    post_exchange_of_numbers(comm, sizes->sent.data(), sizes->coming.data(), posted);
  };
  const auto check = [sizes, rank, text = watch::describe(record)](const Posted&) -> Failure {
    for (size_t peer = 0; peer < sizes->wanted.size(); ++peer) {
      if (sizes->coming[peer] == sizes->wanted[peer]) continue;
      return {c10::str("sizes differ in ", text, ": rank ", peer, " sends ", sizes->coming[peer], " bytes to rank ",
                       rank, ", which takes ", sizes->wanted[peer]),
              c10::str("make what rank ", peer, " sends as long as what rank ", rank, " receives from it")};
    }
    return {};
  };
  return {post, check};
}

Plan exchange(watch::Record record, Parts sent, Parts received, int rank) {
  Step sizes = sizes_step(record, sent, received, rank);
  return {record, {std::move(sizes), exchange_step(std::move(sent), std::move(received))}};
}

Plan all_gather(const Collective& c, Ranks ranks) {
  const at::Tensor input = apart(c.inputs[0], c.outputs);
  Plan plan{record_of(c.kind, input), {}};
  plan.kept = {input};
  if (!all_equal(lengths(c.outputs))) {
    compare_pieces(plan.record, lengths(c.outputs));
    plan.steps = {exchange_step(Parts(size_t(ranks.size), part_of(input)), parts_of(c.outputs, ranks.size, true))};
    return plan;
  }
  plan.record.same_size = 1;
  const bool is_flat = c.outputs.size() == 1;
  const at::Tensor all = is_flat ? c.outputs[0] : at::empty({ranks.size, input.numel()}, input.options());
  plan.steps = {
      {[input, all](MPI_Comm comm, Posted& posted) { post_all_gather(comm, part_of(input), place_of(all), posted); }}};
  if (is_flat) return plan;
  plan.after = [all, outputs = c.outputs.vec()] {
    for (size_t r = 0; r < outputs.size(); ++r) outputs[r].copy_(all[int64_t(r)].view(outputs[r].sizes()));
  };
  return plan;
}

Plan all_to_all(const Collective& c, Ranks ranks) {
  Tensors inputs;
  for (const at::Tensor& input : c.inputs) inputs.push_back(apart(input, c.outputs));
  Plan plan = exchange(record_of(c.kind, c.inputs), parts_of(inputs, ranks.size, false),
                       parts_of(c.outputs, ranks.size, true), ranks.rank);
  plan.kept = std::move(inputs);
  return plan;
}

Plan gather(const Collective& c, Ranks ranks) {
  const at::Tensor input = apart(c.inputs[0], c.outputs);
  Parts sent(size_t(ranks.size)), received(size_t(ranks.size));
  sent[size_t(c.root)] = part_of(input);
  if (ranks.rank == c.root) received = parts_of(c.outputs, ranks.size, true);
  Plan plan = exchange(record_of(c.kind, input, c.root), std::move(sent), std::move(received), ranks.rank);
  plan.kept = {input};
  return plan;
}

Plan scatter(const Collective& c, Ranks ranks) {
  Tensors inputs;
  for (const at::Tensor& input : c.inputs) inputs.push_back(apart(input, c.outputs));
  const at::Tensor& output = c.outputs[0];
  Parts sent(size_t(ranks.size)), received(size_t(ranks.size));
  if (ranks.rank == c.root) sent = parts_of(inputs, ranks.size, false);
  received[size_t(c.root)] = {place_of(output), int64_t(output.nbytes())};
  Plan plan = exchange(record_of(c.kind, output, c.root), std::move(sent), std::move(received), ranks.rank);
  plan.kept = std::move(inputs);
  return plan;
}

Plan broadcast(const Collective& c, Ranks) {
  const at::Tensor& x = c.outputs[0];
  const Part part{place_of(x), int64_t(x.nbytes())};
  return {record_of(c.kind, x, c.root),
          {{[part, root = c.root](MPI_Comm comm, Posted& posted) { post_broadcast(comm, part, root, posted); }}}};
}

Plan barrier(const Collective& c, Ranks) {
  return {record_of(c.kind, {}), {{[](MPI_Comm comm, Posted& posted) { post_barrier(comm, posted); }}}};
}

Plan send(const Collective& c, Ranks) {
  const Part part = part_of(c.inputs[0]);
  return {record_of(c.kind, c.inputs, c.root), {{[part, peer = c.root, tag = c.tag](MPI_Comm comm, Posted& posted) {
            post_send(comm, part, peer, tag, posted);
          }}}};
}

Plan receive(const Collective& c, Ranks) {
  const at::Tensor& x = c.outputs[0];
  const Part part{place_of(x), int64_t(x.nbytes())};
  const watch::Record record = record_of(c.kind, x, c.root);
  const auto check = [part, text = watch::describe(record)](const Posted& posted) -> Failure {
    const MPI_Status& status = posted.statuses.front();
    MPI_Count bytes = 0;
    require(MPI_Get_elements_x(&status, MPI_BYTE, &bytes), "MPI_Get_elements_x");
    if (bytes == part.bytes) return {};
    return {c10::str(text, " takes ", part.bytes, " bytes, but rank ", status.MPI_SOURCE, " sent ", int64_t(bytes)),
            "receive into a tensor of the size and dtype that is sent"};
  };
  const auto post = [part, peer = c.root, tag = c.tag](MPI_Comm comm, Posted& posted) {
    post_receive(comm, part, peer, tag, posted);
  };
  return {record, {{post, check}}};
}

Plan plan_of_kind(const Collective& c, Ranks ranks) {
  switch (c.kind) {
    case Kind::all_reduce: return all_reduce(c, ranks);
    case Kind::reduce: return reduce(c, ranks);
    case Kind::reduce_scatter: return reduce_scatter(c, ranks);
    case Kind::all_gather: return all_gather(c, ranks);
    case Kind::all_to_all: return all_to_all(c, ranks);
    case Kind::gather: return gather(c, ranks);
    case Kind::scatter: return scatter(c, ranks);
    case Kind::broadcast: return broadcast(c, ranks);
    case Kind::barrier: return barrier(c, ranks);
    case Kind::send: return send(c, ranks);
    case Kind::recv: return receive(c, ranks);
    default: TORCH_INTERNAL_ASSERT(false, "no plan for ", watch::kind_name(c.kind));
  }
}

bool agree(const watch::Record& a, const watch::Record& b) {
  return watch::fingerprint(a) == watch::fingerprint(b) || watch::differ_in_knowledge(a, b);
}

}  // namespace

Plan plan_of(const Collective& c, int rank, int size) {
  const at::AutoDispatchBelowADInplaceOrView below;
  Plan plan = plan_of_kind(c, {rank, size});
  plan.outputs = c.outputs.vec();
  plan.kept.insert(plan.kept.end(), c.inputs.begin(), c.inputs.end());
  return plan;
}

Plan joined(std::vector<Plan> plans) {
  Plan all{plans.front().record, {}};
  all.record.num_elements = 0;
  std::vector<Step> rounds;
  std::vector<std::function<void()>> ends;
  for (Plan& plan : plans) {
    all.record.num_elements += plan.record.num_elements;
    if (plan.record.dtype != all.record.dtype) all.record.dtype = -1;
    rounds.insert(rounds.end(), plan.steps.begin(), plan.steps.end());
    if (plan.after) ends.push_back(std::move(plan.after));
    all.outputs.insert(all.outputs.end(), plan.outputs.begin(), plan.outputs.end());
    all.kept.insert(all.kept.end(), plan.kept.begin(), plan.kept.end());
  }
  all.steps = {{[rounds](MPI_Comm comm, Posted& posted) {
    for (const Step& round : rounds) round.post(comm, posted);
  }}};
  all.after = [ends] {
    for (const auto& end : ends) end();
  };
  return all;
}

Step compare_step(const watch::Record& record, const watch::Record& before, int size) {
  const auto records = std::make_shared<std::vector<watch::Record>>(size_t(size) + 1);
  records->back() = record;  // what this rank sends
  const auto post = [records](MPI_Comm comm, Posted& posted) {
    post_all_gather(comm, {&records->back(), sizeof(watch::Record)}, records->data(), posted);
  };
  const auto check = [records, before](const Posted&) -> Failure {
    const std::vector<watch::Record>& all = *records;
    for (size_t r = 1; r + 1 < all.size(); ++r) {
      for (size_t lower = 0; lower < r; ++lower) {
        if (agree(all[lower], all[r])) continue;
        return {watch::mismatch_text(int(lower), all[lower], int(r), all[r], before),
                watch::mismatch_fix(all[lower], all[r])};
      }
    }
    return {};
  };
  return {post, check};
}

}  // namespace serried::mpi
