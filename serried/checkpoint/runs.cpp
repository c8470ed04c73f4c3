// From spans per dim to runs of bytes.
#include "serried/checkpoint/runs.h"

#include "serried/checkpoint/limits.h"

namespace serried::checkpoint::detail {
namespace {

constexpr int64_t kFewRuns = 4;

// The last dim of which not all is held; -1: all of all.
int64_t cut_dim(const Region& region) {
  for (int64_t dim = int64_t(region.sizes.size()) - 1; dim >= 0; --dim) {
    const std::vector<Span>& spans = region.spans[size_t(dim)];
    const bool is_whole = spans.size() == 1 && spans[0] == Span{0, region.sizes[size_t(dim)]};
    if (!is_whole) return dim;
  }
  return -1;
}

int64_t elements_behind(const Region& region, int64_t dim) {
  int64_t count = 1;
  for (size_t d = size_t(dim + 1); d < region.sizes.size(); ++d) count *= region.sizes[d];
  return count;
}

int64_t num_indices(const std::vector<Span>& spans) {
  int64_t count = 0;
  for (const Span& span : spans) count += span.size;
  return count;
}

// Joins runs that touch.
class Joiner {
 public:
  explicit Joiner(const std::function<void(const Run&)>& visit) : visit_(visit) {}
  void add(const Run& run) {
    if (pending_.num_bytes > 0 && pending_.in_file + pending_.num_bytes == run.in_file) {
      pending_.num_bytes += run.num_bytes;
      return;
    }
    flush();
    pending_ = run;
  }
  void flush() {
    if (pending_.num_bytes > 0) visit_(pending_);
    pending_ = {};
  }

 private:
  const std::function<void(const Run&)>& visit_;
  Run pending_ = {};
};

// Calls `visit` with the row-major number of each combination of indices that the dims before `end` have.
void for_each_outer(const Region& region, int64_t end, int64_t dim, int64_t number,
                    const std::function<void(int64_t)>& visit) {
  if (dim == end) return visit(number);
  for (const Span& span : region.spans[size_t(dim)]) {
    for (int64_t i = span.begin; i < span.end(); ++i) {
      for_each_outer(region, end, dim + 1, number * region.sizes[size_t(dim)] + i, visit);
    }
  }
}

}  // namespace

Region Region::whole(c10::IntArrayRef sizes) {
  Region region{sizes.vec(), {}};
  for (int64_t size : sizes) {
    region.spans.push_back(size > 0 ? std::vector<Span>{{0, size}} : std::vector<Span>{});
  }
  return region;
}

Region Region::of(c10::IntArrayRef sizes, const Placements& placements, const Position& at) {
  Region region{sizes.vec(), {}};
  for (size_t dim = 0; dim < sizes.size(); ++dim) {
    region.spans.push_back(owned_spans(sizes[dim], int64_t(dim), placements, at));
  }
  return region;
}

Region Region::of(const Spec& spec, const Placements& placements) {
  return of(spec.sizes, placements, spec.mesh.position());
}

Region Region::of(const Spec& spec) {
  return of(spec, spec.placements);
}

std::vector<int64_t> Region::part_sizes() const {
  std::vector<int64_t> sizes;
  for (const std::vector<Span>& each : spans) sizes.push_back(num_indices(each));
  return sizes;
}

int64_t Region::num_elements() const {
  int64_t count = 1;
  for (const std::vector<Span>& each : spans) count *= num_indices(each);
  return count;
}

void for_each_run(const Region& region, int64_t element_bytes, const std::function<void(const Run&)>& visit) {
  if (region.num_elements() == 0) return;
  Joiner joiner(visit);
  const int64_t dim = cut_dim(region);
  if (dim < 0) return visit({0, 0, region.num_elements() * element_bytes});
  const int64_t row_bytes = elements_behind(region, dim) * element_bytes;
  int64_t in_part = 0;
  for_each_outer(region, dim, 0, 0, [&](int64_t number) {
    for (const Span& span : region.spans[size_t(dim)]) {
      const int64_t num_bytes = span.size * row_bytes;
      joiner.add({(number * region.sizes[size_t(dim)] + span.begin) * row_bytes, in_part, num_bytes});
      in_part += num_bytes;
    }
  });
  joiner.flush();
}

Placements rows_instead(const Spec& spec) {
  // The first rank's part is as large as any; all ranks of the mesh must come to the same answer.
  const c10::DimVector first(size_t(spec.mesh.ndim()), 0);
  const Region region = Region::of(spec.sizes, spec.placements, {spec.mesh.shape(), first});
  const int64_t dim = cut_dim(region);
  if (dim <= 0 && (dim < 0 || region.spans[0].size() <= 1)) return {};
  const int64_t element_bytes = int64_t(c10::elementSize(spec.dtype));
  int64_t num_runs = int64_t(region.spans[size_t(dim)].size());
  for (int64_t d = 0; d < dim; ++d) num_runs *= num_indices(region.spans[size_t(d)]);
  if (num_runs <= kFewRuns) return {};
  if (region.num_elements() * element_bytes / num_runs >= format_limits().short_run) return {};
  Placements rows = spec.placements;
  for (Placement& placement : rows) {
    if (placement.is_shard()) placement = Shard(0);
  }
  return rows;
}

}  // namespace serried::checkpoint::detail
