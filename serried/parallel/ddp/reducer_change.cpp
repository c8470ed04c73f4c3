// What changes a reducer between two backwards: new buckets, another group, a hook, a rank without input.
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/GradMode.h>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/collectives/collectives.h"
#include "serried/parallel/ddp/parameters.h"
#include "serried/parallel/ddp/reducer.h"

namespace serried::detail {
namespace {

// Per parameter: its place in the order of all, and its bucket.
at::Tensor to_tensor(const BucketAssignment& assignment, size_t num_parameters) {
  at::Tensor table = at::empty({2, int64_t(num_parameters)}, at::kLong);
  auto rows = table.accessor<int64_t, 2>();
  int64_t place = 0;
  for (size_t b = 0; b < assignment.size(); ++b) {
    for (size_t index : assignment[b]) {
      rows[0][place] = int64_t(index);
      rows[1][place++] = int64_t(b);
    }
  }
  return table;
}

BucketAssignment from_tensor(const at::Tensor& table) {
  BucketAssignment assignment;
  const auto rows = table.accessor<int64_t, 2>();
  for (int64_t place = 0; place < table.size(1); ++place) {
    assignment.resize(size_t(rows[1][place]) + 1);
    assignment.back().push_back(size_t(rows[0][place]));
  }
  return assignment;
}

// A sparse gradient of zeros, with one sparse dim as embeddings have.
at::Tensor no_rows(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  const at::Tensor rows = parameter.detach().narrow(0, 0, 0);
  return at::sparse_coo_tensor(at::empty({1, 0}, rows.options().dtype(at::kLong)), rows, parameter.sizes());
}

bool has_one_dtype_each(const BucketAssignment& assignment, const std::vector<ManagedParameter>& parameters) {
  return std::all_of(assignment.begin(), assignment.end(), [&](const std::vector<size_t>& members) {
    const at::Tensor& first = parameters[members.at(0)].tensor;
    return std::all_of(members.begin(), members.end(), [&](size_t member) {
      const at::Tensor& tensor = parameters[member].tensor;
      return tensor.scalar_type() == first.scalar_type() && tensor.device() == first.device();
    });
  });
}

}  // namespace

bool Reducer::is_rebuild_due() const {
  const bool rebuilds = options_.static_graph || !options_.find_unused_parameters;
  return !has_rebuilt_ && rebuilds && !last_arrival_.empty();
}

bool Reducer::rebuild_buckets(int source) {
  if (!is_rebuild_due()) return false;
  has_rebuilt_ = true;
  std::vector<size_t> arrival = last_arrival_;
  std::vector<bool> arrived(parameters_.size());
  for (size_t index : arrival) arrived[index] = true;
  // Parameters of a static graph that are never used come last.
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!arrived[i]) arrival.push_back(i);
  }
  const BucketAssignment mine = rebuilt_buckets(parts_of(parameters_), options_.limits, arrival);
  const at::Tensor agreed = to_tensor(mine, parameters_.size());
  broadcast_(agreed, group_, {.src = source});
  replace_buckets(from_tensor(agreed));
  log::line(log::Topic::comm, "buckets rebuilt: ", buckets_.size());
  return true;
}

// Gradients that lie in the old buckets move over, by a copy: the new buckets may have the same memory.
void Reducer::replace_buckets(const BucketAssignment& assignment) {
  at::NoGradGuard no_grad;
  std::vector<std::pair<size_t, at::Tensor>> saved;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& grad = parameters_[i].tensor.grad();
    const Bucket& bucket = buckets_[locations_[i].bucket];
    if (!grad.defined() || bucket.gradients.empty()) continue;
    const at::Tensor& view = bucket.views[locations_[i].slot];
    if (is_same_memory(part_of(grad), view)) saved.emplace_back(i, view.clone());
  }
  make_buckets(assignment);
  for (const auto& [index, values] : saved) {
    const Bucket& bucket = buckets_[locations_[index].bucket];
    if (bucket.gradients.empty()) continue;
    bucket.views[locations_[index].slot].copy_(values);
    parameters_[index].tensor.mutable_grad() = bucket.gradients[locations_[index].slot];
  }
}

void Reducer::follow_memory() {
  if (round_.active) reset();
  if (parameters_.empty()) return;
  BucketAssignment assignment;
  for (const Bucket& bucket : buckets_) assignment.push_back(bucket.members);
  if (!has_one_dtype_each(assignment, parameters_)) {
    assignment = initial_buckets(parts_of(parameters_), options_.limits);
    has_rebuilt_ = false;
    last_arrival_.clear();
  }
  memory_ = BucketMemory(parameters_, group_, options_.reduce_dtype);
  replace_buckets(assignment);
}

void Reducer::set_comm_hook(CommHook hook) {
  if (comm_hook_) {
    raise<c10::ValueError>({"register_comm_hook", "this module has the hook \"" + comm_hook_->name() + "\" already",
                            "register one hook, once; hooks::fp16_compress(hook) and others wrap another hook"});
  }
  comm_hook_ = std::move(hook);
  ++num_changes_;
}

void Reducer::wait_at_end(std::vector<HookFuture> futures) {
  std::lock_guard<std::mutex> lock(mutex_);
  awaited_at_end_.insert(awaited_at_end_.end(), futures.begin(), futures.end());
}

void Reducer::set_static_graph() {
  if (options_.static_graph) return log::warn_once("[set_static_graph] the graph is static already");
  if (num_iterations_ > 0) {
    raise<c10::ValueError>({"set_static_graph", c10::str("called after ", num_iterations_, " iterations"),
                            "call it before the first forward, or pass static_graph = true"});
  }
  options_.static_graph = true;
}

// Ranks that are new there have seen no backward: all begin as at construction, with the same buckets.
void Reducer::set_group(Group group) {
  reset();
  group_ = std::move(group);
  memory_ = BucketMemory(parameters_, group_, options_.reduce_dtype);
  if (!parameters_.empty()) replace_buckets(initial_buckets(parts_of(parameters_), options_.limits));
  has_rebuilt_ = false;
  last_arrival_.clear();
  expected_fires_.clear();
  static_used_anywhere_.clear();
  awaited_at_end_.clear();
  sparse_rows_.clear();
}

std::string Reducer::bucket_sizes() const {
  std::vector<int64_t> sizes;
  for (const Bucket& bucket : buckets_) sizes.push_back(bucket.num_bytes(parameters_));
  return c10::Join(", ", sizes);
}

void Reducer::check_finalized() const {
  if (!round_.active) return;
  raise<c10::ValueError>({"check_finalized", "the last backward did not end: not every bucket has been reduced",
                          "look for an exception in backward; the next forward, or reset(), begins anew"});
}

void Reducer::shadow_backward() {
  if (parameters_.empty()) return;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const ManagedParameter& parameter : parameters_) {
    parameter.tensor.mutable_grad().reset();
    if (parameter.sparse_gradient) parameter.tensor.mutable_grad() = no_rows(parameter.tensor);
  }
  start_round();
  if (round_.counting) {
    finish_counting();
    // Once this rank has input, its graph will be that of the others.
    const int* fires = round_.used_anywhere.data_ptr<int>();
    expected_fires_.assign(fires, fires + parameters_.size());
  } else {
    mark_unused(std::vector<bool>(parameters_.size()));
  }
  finish_buckets();
  if (last_arrival_.empty()) {
    for (size_t i = 0; i < parameters_.size(); ++i) last_arrival_.push_back(i);
  }
  round_.active = false;
}

}  // namespace serried::detail
