// The steps as collectives on local tensors. Equal parts travel in one block; uneven ones with sizes of their own.
#include <algorithm>

#include <ATen/ATen.h>

#include "serried/comm/collectives/ops.h"
#include "serried/tape/tape.h"
#include "serried/tensor/redistribute/exchange.h"
#include "serried/tensor/redistribute/packing.h"
#include "serried/tensor/redistribute/redistribute.h"
#include "serried/tensor/redistribute/reduce.h"

namespace serried::detail {
namespace {

using spmd::Step;

// What every kind of step asks of the mesh.
struct Scene {
  const Spec& spec;
  const Step& step;
  StartedStep* started;
  Position at;
  int64_t num_ranks = 1;  // of the step's axes together
  int64_t rank = 0;       // among them, row-major

  Scene(const Spec& spec_, const Step& step_, StartedStep* started_)
      : spec(spec_), step(step_), started(started_), at(spec_.mesh.position()) {
    for (int64_t axis : step.axes) {
      num_ranks *= at.mesh_shape[axis];
      rank = rank * at.mesh_shape[axis] + at.coordinate[axis];
    }
  }

  Group group() const {
    return step.axes.size() == 1 ? spec.mesh.get_group(step.axes[0]) : spec.mesh.get_merged_group(step.axes);
  }

  WorkPtr* work() const { return work_of(started); }

  // To pack into: what is on its way needs memory of its own.
  Memory memory() const { return started == nullptr ? scratch : own_memory; }

  // The coordinate of the step's `index`-th rank.
  c10::DimVector coordinate(int64_t index) const {
    c10::DimVector coordinate(at.coordinate.begin(), at.coordinate.end());
    for (auto axis = step.axes.rbegin(); axis != step.axes.rend(); ++axis) {
      coordinate[*axis] = index % at.mesh_shape[*axis];
      index /= at.mesh_shape[*axis];
    }
    return coordinate;
  }

  // `size` cut by one axis after the other: what each of the step's ranks gets.
  std::vector<int64_t> cut(int64_t size) const {
    std::vector<int64_t> parts{size};
    for (int64_t axis : step.axes) {
      std::vector<int64_t> finer;
      finer.reserve(parts.size() * at.mesh_shape[axis]);
      for (int64_t part : parts) {
        for (int64_t i = 0; i < at.mesh_shape[axis]; ++i) finer.push_back(chunk(part, at.mesh_shape[axis], i).size);
      }
      parts = std::move(finer);
    }
    return parts;
  }

  bool is_even(int64_t size) const { return size % num_ranks == 0; }

  // By ops that give their result rather than fill one: a recorder sees whether what they started is left behind.
  bool by_pieces(int64_t size) const { return !is_even(size) || (started != nullptr && tape::is_recording()); }

  // Size of `dim` on this rank after the step.
  int64_t size_after(int64_t dim) const { return local_size(spec.sizes[dim], dim, step.after, at); }
};

c10::DimVector resized(c10::IntArrayRef sizes, int64_t dim, int64_t size) {
  c10::DimVector changed(sizes.begin(), sizes.end());
  changed[dim] = size;
  return changed;
}

bool leads(c10::IntArrayRef sizes, int64_t dim) {
  return std::all_of(sizes.begin(), sizes.begin() + dim, [](int64_t size) { return size == 1; });
}

at::Tensor all_gather(const at::Tensor& local, const Scene& scene) {
  const int64_t dim = scene.step.from.dim();
  const int64_t size = scene.size_after(dim);
  if (scene.by_pieces(size)) return ops::all_gather(local, scene.group(), dim, scene.cut(size), scene.work());
  at::Tensor result = at::empty(resized(local.sizes(), dim, size), local.options());
  if (leads(local.sizes(), dim)) {
    ops::all_gather_into(result, local.contiguous(), scene.group(), scene.work());
    return result;
  }
  const at::Tensor buffer = scene.memory()(result.sizes(), local.options());
  ops::all_gather_into(buffer, local.contiguous(), scene.group(), scene.work());
  run_after(scene.started, [=, parts = scene.num_ranks] { unpack(result, dim, parts, buffer); });
  return result;
}

// `result` in the tensor's own dtype, and what its reduction leaves to do.
at::Tensor finished(const Reduction& reduction, const at::Tensor& result, const Scene& scene) {
  if (reduction.divide_by != 1) run_after(scene.started, [result, by = reduction.divide_by] { result.div_(by); });
  return reduction.as_bytes ? result.view(at::kBool) : result;
}

at::Tensor all_reduce(const at::Tensor& local, bool owned, const Scene& scene) {
  const Reduction reduction = reduction_of(scene.step, scene.at.mesh_shape, local.scalar_type());
  if (!owned || !local.is_contiguous()) {
    return finished(reduction, ops::all_reduce(reduction.sent(local), scene.group(), reduction.op, scene.work()),
                    scene);
  }
  const at::Tensor sent = reduction.sent(local);
  ops::all_reduce_(sent, scene.group(), reduction.op, scene.work());
  return finished(reduction, sent, scene);
}

at::Tensor reduce_scatter(const at::Tensor& local, const Scene& scene) {
  const Reduction reduction = reduction_of(scene.step, scene.at.mesh_shape, local.scalar_type());
  const int64_t dim = scene.step.to.dim();
  const int64_t size = local.size(dim);
  const at::Tensor sent = reduction.sent(local.contiguous());
  if (scene.by_pieces(size)) {
    return finished(reduction,
                    ops::reduce_scatter(sent, scene.group(), dim, scene.cut(size), reduction.op, scene.work()), scene);
  }
  at::Tensor result = at::empty(resized(local.sizes(), dim, size / scene.num_ranks), sent.options());
  const bool in_row = leads(local.sizes(), dim);
  ops::reduce_scatter_into(result, in_row ? sent : packed(sent, dim, scene.num_ranks, scene.memory()), scene.group(),
                           reduction.op, scene.work());
  return finished(reduction, result, scene);
}

at::Tensor all_to_all(const at::Tensor& local, const Scene& scene) {
  const int64_t split = scene.step.to.dim();
  const int64_t concat = scene.step.from.dim();
  const int64_t size = scene.size_after(concat);
  if (scene.by_pieces(size) || scene.by_pieces(local.size(split))) {
    return ops::all_to_all(local, scene.group(), split, concat, scene.cut(local.size(split)), scene.cut(size),
                           watch::hash_sizes({split, concat, local.size(split), size}), scene.work());
  }
  const at::Tensor x = local.contiguous();
  const bool in_row = leads(x.sizes(), split);
  const at::Tensor sent = in_row ? x : packed(x, split, scene.num_ranks, scene.memory());
  const c10::DimVector piece = resized(x.sizes(), split, x.size(split) / scene.num_ranks);
  at::Tensor result = at::empty(resized(piece, concat, size), x.options());
  if (leads(piece, concat)) {
    ops::all_to_all_into(result, sent, scene.group(), scene.work());
    return result;
  }
  // The packed input, if there is one, lies in the scratch already.
  const at::Tensor buffer = (in_row ? scene.memory() : own_memory)(result.sizes(), x.options());
  ops::all_to_all_into(buffer, sent, scene.group(), scene.work());
  run_after(scene.started, [=, parts = scene.num_ranks] { unpack(result, concat, parts, buffer); });
  return result;
}

// Where a cut is strided the part is several spans.
at::Tensor slice(const at::Tensor& local, const Scene& scene) {
  const bool strided =
      std::any_of(scene.step.after.begin(), scene.step.after.end(), [](const Placement& p) { return p.is_strided(); });
  if (!strided) {
    const c10::DimVector begin = local_offsets(scene.spec.sizes, scene.step.after, scene.at);
    const c10::DimVector origin = local_offsets(scene.spec.sizes, scene.step.before, scene.at);
    const c10::DimVector sizes = local_sizes(scene.spec.sizes, scene.step.after, scene.at);
    at::Tensor part = local;
    for (int64_t dim = 0; dim < local.dim(); ++dim) {
      if (sizes[dim] == part.size(dim)) continue;
      part = part.narrow(dim, sizes[dim] == 0 ? 0 : begin[dim] - origin[dim], sizes[dim]);
    }
    return part.clone(at::MemoryFormat::Contiguous);
  }
  const PartBoxes before(scene.spec.sizes, scene.step.before, scene.at);
  const PartBoxes after(scene.spec.sizes, scene.step.after, scene.at);
  at::Tensor result = at::empty(after.local_sizes(), local.options());
  for (const spmd::Box& box : common_boxes(before, after)) {
    after.view(result, box).copy_(before.view(local, box));
  }
  return result;
}

// Equal values already are an average or an extreme of each other; a sum must count the value once.
at::Tensor to_partial(const at::Tensor& local, const Scene& scene) {
  const ReduceKind kind = scene.step.to.reduce();
  if (kind == ReduceKind::avg)
    reduction_of({scene.step.kind, scene.step.axes, {}, {}, scene.step.after, {}}, scene.at.mesh_shape,
                 local.scalar_type());
  if (scene.rank == 0 || is_idempotent(kind)) return local.clone(at::MemoryFormat::Contiguous);
  return identity_like(local, kind);
}

bool gathers_all(const Step& step) {
  for (size_t axis = 0; axis < step.before.size(); ++axis) {
    if (step.before[axis] == step.after[axis]) continue;
    if (!step.before[axis].is_shard() || !step.after[axis].is_replicate()) return false;
  }
  return std::all_of(step.axes.begin(), step.axes.end(), [&](int64_t axis) { return step.after[axis].is_replicate(); });
}

// Puts everybody's part, which lie in `arrived` one after the other, where the target wants it.
void place_parts(const at::Tensor& arrived, const std::vector<PartBoxes>& sources, const PartBoxes& target,
                 const at::Tensor& result) {
  int64_t begin = 0;
  for (const PartBoxes& source : sources) {
    const c10::DimVector sizes = source.local_sizes();
    const int64_t count = c10::multiply_integers(sizes);
    const at::Tensor part = arrived.narrow(0, begin, count).view(sizes);
    for (const spmd::Box& box : common_boxes(source, target)) target.view(result, box).copy_(source.view(part, box));
    begin += count;
  }
}

// Every peer wants the whole part: nothing to pack.
at::Tensor gather_boxes(const at::Tensor& local, const Scene& scene, std::vector<PartBoxes> sources, PartBoxes target) {
  std::vector<int64_t> counts;
  for (const PartBoxes& source : sources) counts.push_back(c10::multiply_integers(source.local_sizes()));
  const at::Tensor arrived = ops::all_gather(local.contiguous().view({-1}), scene.group(), 0, counts, scene.work());
  at::Tensor result = at::empty(target.local_sizes(), local.options());
  run_after(scene.started, [arrived, result, sources = std::move(sources), target = std::move(target)] {
    place_parts(arrived, sources, target, result);
  });
  return result;
}

at::Tensor exchange(const at::Tensor& local, const Scene& scene) {
  std::vector<PartBoxes> sources;
  std::vector<PartBoxes> targets;
  for (int64_t peer = 0; peer < scene.num_ranks; ++peer) {
    const c10::DimVector coordinate = scene.coordinate(peer);
    const Position there{scene.at.mesh_shape, coordinate};
    sources.emplace_back(scene.spec.sizes, scene.step.before, there);
    targets.emplace_back(scene.spec.sizes, scene.step.after, there);
  }
  const PartBoxes& mine = sources[scene.rank];
  const PartBoxes& wanted = targets[scene.rank];
  if (gathers_all(scene.step)) return gather_boxes(local, scene, std::move(sources), wanted);
  Exchange exchange{mine, wanted, {}, {}, scene.spec.sizes};
  for (int64_t peer = 0; peer < scene.num_ranks; ++peer) {
    exchange.sends.push_back(common_boxes(mine, targets[peer]));
    exchange.receives.push_back(common_boxes(sources[peer], wanted));
  }
  return exchange_boxes(local, scene.group(), std::move(exchange), local.options(), scene.started);
}

}  // namespace

at::Tensor run_step(const at::Tensor& local, bool owned, const Spec& spec, const Step& step, StartedStep* started) {
  const Scene scene(spec, step, started);
  switch (step.kind) {
    case Step::Kind::slice: return slice(local, scene);
    case Step::Kind::all_gather: return all_gather(local, scene);
    case Step::Kind::all_reduce: return all_reduce(local, owned, scene);
    case Step::Kind::reduce_scatter: return reduce_scatter(local, scene);
    case Step::Kind::all_to_all: return all_to_all(local, scene);
    case Step::Kind::to_partial: return to_partial(local, scene);
    case Step::Kind::exchange: return exchange(local, scene);
  }
  return local;
}

}  // namespace serried::detail
