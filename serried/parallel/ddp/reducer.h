// Averages gradients while backward runs: own code because c10d's Reducer cannot keep its buckets in shared memory.
//
// One backward is one round. It begins when a gradient flows into an output of the wrapped module, or into a parameter
// if the backward goes through a forward of the wrapper; a backward that does not is local. It ends in a callback of
// the autograd engine, when backward is through: every bucket has been reduced, or an error says which gradients did
// not come.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "serried/parallel/ddp/bucket.h"
#include "serried/parallel/ddp/bucket_assignment.h"
#include "serried/parallel/ddp/claim.h"
#include "serried/parallel/ddp/comm_hook.h"
#include "serried/parallel/ddp/forward_passes.h"
#include "serried/parallel/ddp/gradient_hooks.h"
#include "serried/parallel/ddp/step_times.h"

namespace serried::detail {

struct ReducerOptions {
  bool find_unused_parameters = false;
  bool gradient_as_bucket_view = true;
  bool static_graph = false;
  bool skip_unused_allreduce = false;
  bool batched_grad_copy = false;
  int stats_every = 100;
  std::optional<at::ScalarType> reduce_dtype = {};  // of buckets of floating gradients; none: the parameters'
  BucketLimits limits;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(std::vector<ManagedParameter> parameters, Group group, ReducerOptions options, std::shared_ptr<Claim> claim);
  Reducer(const Reducer&) = delete;

  /// Hooks on the parameters; apart from construction because they hold a weak pointer to this.
  void install_hooks();
  void remove_hooks();

  /// The hooks on the nodes that parameters have now: torch::load, to() and set_data() make them forget theirs.
  void follow_accumulators();

  /// Parameters have other memory, maybe of another dtype: lays the buckets out anew.
  void follow_memory();

  /// Before a forward that records gradients: clears what a failed backward left, rebuilds buckets when it is time.
  void prepare_forward(bool synchronise, int source = 0);

  /// After it: backward will come through `outputs`, or out of another part of `pass`.
  void prepare_backward(const std::vector<at::Tensor>& outputs, ForwardPasses::PassPtr pass);

  /// Takes the gradients' average elsewhere; ValueError if there is a hook already.
  void set_comm_hook(CommHook hook);
  const std::optional<CommHook>& comm_hook() const { return comm_hook_; }

  /// Called for each parameter after its bucket has been averaged, in the order of buckets.
  void on_averaged(std::function<void(size_t parameter)> callback) { on_averaged_ = std::move(callback); }
  bool is_watched() const { return bool(on_averaged_); }

  /// Called before each backward communicates: ranks that have joined are told. Empty: nobody has to be.
  void before_round(std::function<void()> callback) { before_round_ = std::move(callback); }

  /// Futures that the end of the next backward waits for.
  void wait_at_end(std::vector<HookFuture> futures);

  /// By name of parameter, the rows of its sparse gradient that any rank touches in the next backward.
  void set_sparse_rows(const std::map<std::string, at::Tensor>& rows);

  void set_static_graph();
  bool is_static_graph() const { return options_.static_graph; }

  /// Drops the state of a round that did not end, with the gradients it touched.
  void reset();

  /// Goes on with the ranks of another group; buckets are made anew there.
  void set_group(Group group);

  /// What the sum over ranks is divided by; none: the size of the group.
  void set_divisor(std::optional<double> divisor) {
    if (divisor != divisor_) ++num_changes_;
    divisor_ = divisor;
  }

  /// Stands in for a rank that has no more input: adds zeros to every bucket of the other ranks' backward.
  void shadow_backward();

  /// Rebuilds the buckets if it is time, as rank `source` finds best; every rank calls it at the same point. Whether it
  /// did.
  bool rebuild_buckets(int source = 0);
  bool is_rebuild_due() const;

  /// ValueError if the last backward did not finish.
  void check_finalized() const;

  const std::vector<ManagedParameter>& parameters() const { return parameters_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const std::vector<size_t>& arrival_order() const { return last_arrival_; }
  bool has_rebuilt_buckets() const { return has_rebuilt_; }
  bool can_be_static() const { return can_be_static_; }
  std::string bucket_sizes() const;  // bytes: "1048576, 26214400"
  size_t unused_bytes() const;
  /// Counts what changes the way gradients are averaged: new buckets, another group, a hook, another divisor.
  uint64_t num_changes() const { return num_changes_; }
  int64_t num_iterations() const { return num_iterations_; }
  const StepTimes& times() const { return times_; }
  const StepStatistics& statistics() const { return statistics_; }
  const std::string& last_error() const { return last_error_; }

 private:
  using Node = torch::autograd::Node;

  struct Location {
    size_t bucket;
    size_t slot;
  };
  /// What the running backward has done so far.
  struct Round {
    bool active = false;
    bool counting = false;  // the first of a static graph: gradients are counted now and reduced at the end
    std::vector<int> num_fired;
    std::vector<bool> ready;
    std::vector<bool> used;  // has a gradient on this rank
    size_t next_bucket = 0;  // buckets are launched strictly in order, the same on all ranks
    std::vector<size_t> arrival;
    at::Tensor scale = {};  // of gradients on their way into the bucket; undefined: as they are
    bool divides_in_reduction = false;
    at::Tensor used_anywhere = {};
    c10::intrusive_ptr<c10d::Work> used_work = {};
  };

  void make_buckets(const BucketAssignment& assignment);
  void enter(const ForwardPass& pass);
  void trace_local_backward();
  void replace_buckets(const BucketAssignment& assignment);
  void start_round();
  void begin_round();
  void on_gradient(size_t index);
  void check_count(size_t index) const;
  void warn_of_second_order() const;
  void mark_ready(size_t index);
  void mark_unused(const std::vector<bool>& used);
  std::vector<bool> used_by_this_backward() const;
  std::vector<bool> used_by_open_passes() const;
  void contribute(size_t index);
  void copy_into_bucket(const at::Tensor& part, const at::Tensor& view) const;
  void contribute_sparse(size_t index);
  void give_sparse_gradient(size_t index);
  void launch_ready_buckets();
  void launch(size_t index);
  void launch_used_map();
  void end_round();
  void finish_counting();
  void finish_buckets();
  void finish_bucket(size_t index);
  void give_gradient(size_t index, const Location& location);
  bool is_used_anywhere(size_t index);
  bool looks_for_unused() const;
  bool is_unused_here(const Bucket& bucket) const;
  bool divides_in_reduction() const;
  c10::intrusive_ptr<c10d::Work> start_reduction(const Bucket& bucket) const;
  bool holds_gradients(const Bucket& bucket) const;
  void log_unused() const;
  void raise_if_nan(const Bucket& bucket) const;
  [[noreturn]] void raise_missing() const;
  [[noreturn]] void raise_ready_twice(size_t index) const;

  const std::vector<ManagedParameter> parameters_;
  Group group_;
  ReducerOptions options_;
  std::shared_ptr<Claim> claim_;  // null: hooks are removed
  std::optional<CommHook> comm_hook_;
  std::function<void(size_t)> on_averaged_;
  std::function<void()> before_round_;
  std::optional<double> divisor_;

  GradientHooks hooks_;  // per parameter
  BucketMemory memory_;
  std::vector<Bucket> buckets_;
  std::vector<Location> locations_;  // per parameter

  mutable std::mutex mutex_;
  Round round_;
  ForwardPasses passes_;
  std::vector<bool> touched_;  // per parameter: by backwards that were local, since the last round
  std::vector<HookFuture> awaited_at_end_;
  std::map<size_t, at::Tensor> sparse_rows_;  // per parameter, sorted; where given, those rows are reduced as dense
  std::vector<size_t> last_arrival_;
  bool has_rebuilt_ = false;
  uint64_t num_changes_ = 0;
  std::vector<int> expected_fires_;  // per parameter, of a static graph; empty before its first iteration
  std::vector<bool> static_used_anywhere_;
  std::vector<bool> last_used_;
  bool can_be_static_ = true;
  int64_t num_iterations_ = 0;
  StepTimes times_;
  int traced_task_ = -1;  // the newest backward of this rank alone that is in the trace
  StepStatistics statistics_;
  std::string last_error_;
};

}  // namespace serried::detail
