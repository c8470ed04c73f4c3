// DistributedDataParallel: every rank has the whole module and a part of the batch; gradients are averages.
#pragma once

#include <torch/nn/module.h>

#include <exception>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "serried/base/trace.h"
#include "serried/parallel/ddp/comm_hook.h"
#include "serried/parallel/ddp/inputs.h"
#include "serried/parallel/ddp/logging_data.h"
#include "serried/parallel/ddp/options.h"
#include "serried/parallel/join.h"
#include "serried/tensor/visit.h"

namespace serried {

namespace detail {
class DelayedReducer;
class LowPrecision;
struct ManagedParameter;
class ParameterWatch;
class Reducer;
}  // namespace detail

/// When a hook on buffers runs.
enum class BufferHookLocation { pre_forward, post_forward };

/// Instead of the broadcast of buffers: gets them by name. Its futures are waited for at the end of backward.
using BufferHook = std::function<std::vector<HookFuture>(const Group&, const std::map<std::string, at::Tensor>&)>;

/// What does not depend on the type of the module.
class DataParallelBase : public torch::nn::Module, public Joinable {
 public:
  DataParallelBase(std::shared_ptr<torch::nn::Module> module, DistributedDataParallelOptions options);
  ~DataParallelBase() override;
  DataParallelBase(const DataParallelBase&) = delete;

  class NoSync;

  /// While the guard lives, gradients add up on this rank only. The forward belongs inside, too. With false the guard
  /// does nothing, so that the last of several batches needs no branch. Guards nest, and may end in any order.
  ///     { auto guard = ddp.no_sync(); ddp(x).sum().backward(); }
  ///     for (int i = 0; i < n; ++i) { auto guard = ddp.no_sync(i + 1 < n); ddp(x[i]).sum().backward(); }
  [[nodiscard]] NoSync no_sync(bool on = true);

  /// Does with full buckets what `hook` says instead of averaging them, from the next backward on; once.
  void register_comm_hook(CommHook hook);

  void register_buffer_hook(BufferHook hook, BufferHookLocation location = BufferHookLocation::post_forward);

  /// Goes on with the ranks of `group`, after a loss or with newcomers, whose wrappers may be just made. Communicates
  /// nothing: parameters stay as they are, and have to be the same on all ranks. Buckets are laid out as at
  /// construction; what a backward that failed has left is dropped, the gradients it touched included.
  void set_process_group(Group group);
  const Group& process_group() const { return group_; }
  int rank() const { return group_->getRank(); }

  /// Before the first forward: every iteration will use the same parameters, equally often.
  void set_static_graph();

  /// By name of parameter, the rows of its sparse gradient that any rank touches in the next backward, the same on
  /// every rank: those rows are averaged as a dense tensor, and hooks see them so. Holds for one backward.
  void set_sparse_metadata(const std::map<std::string, at::Tensor>& rows);

  /// Gives up a backward that did not end, with its gradients; the next forward does it, too.
  void reset();
  void check_finalized() const;
  void remove_hooks();

  /// Whether the next forward will take rank 0's buffers.
  bool will_sync_buffers() const;

  /// The parameters whose gradients are averaged.
  std::vector<at::Tensor> data_parallel_parameters() const;

  /// Everything there is to know, under PyTorch's keys.
  LoggingData logging_data() const;

  const DistributedDataParallelOptions& options() const { return options_; }
  detail::Reducer& reducer() { return *reducer_; }

  /// For join. Not with delay_all_reduce; with SyncBatchNorm, whose statistics need all ranks, only if
  /// throw_on_early_termination is set.
  void main_hook(const JoinNotice& notice) override;
  void post_hook(int last_joiner) override;
  Group join_group() const override { return group_; }
  at::Device join_device() const override;
  void join_begins(const JoinOptions& options) override;
  void join_ends() override;

 protected:
  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);

  bool casts_inputs() const {
    return options_.mixed_precision.param_dtype && options_.mixed_precision.cast_forward_inputs;
  }
  bool prepares_inputs() const { return options_.device || casts_inputs(); }
  void prepare_input(at::Tensor& t) const;

  /// Gives parameters back their precision where forward throws.
  class ForwardScope {
   public:
    explicit ForwardScope(DataParallelBase& base) : base_(base) { base_.before_forward(); }
    ~ForwardScope() {
      if (std::uncaught_exceptions() > num_exceptions_) base_.abandon_forward();
    }
    ForwardScope(const ForwardScope&) = delete;

   private:
    DataParallelBase& base_;
    const trace::Span span_{"forward", trace::kForward};
    const int num_exceptions_ = std::uncaught_exceptions();
  };

 private:
  void abandon_forward();
  void notice_new_memory();
  bool shares_state() const;
  void share_state(int source);
  void follow_accumulators();
  void check_options() const;
  void check_device(at::Device of_module) const;
  void install_hooks();
  void print_if_debugging();
  std::vector<detail::ManagedParameter> managed_parameters() const;
  void sync_state(int source);
  void sync_buffers(int source);
  int announce_forward();
  void take_divisor(const JoinNotice& notice);
  void run_buffer_hook(BufferHookLocation location);
  void rely_on_state() const;
  std::map<std::string, at::Tensor> buffers_to_sync() const;

  std::shared_ptr<torch::nn::Module> wrapped_;
  DistributedDataParallelOptions options_;
  Group group_;
  std::set<std::string> ignored_;
  uint64_t first_node_ = 0;  // that the running forward makes for autograd
  std::shared_ptr<detail::Reducer> reducer_;
  std::shared_ptr<detail::DelayedReducer> delayed_;      // null: nothing is delayed
  std::shared_ptr<detail::LowPrecision> low_precision_;  // null: parameters keep their precision
  std::shared_ptr<detail::ParameterWatch> watch_;        // null: hooks are removed
  bool has_new_memory_ = false;                          // that the buckets do not know of yet
  bool has_new_state_ = false;                           // that the ranks have not agreed on yet
  /// Apart, because a graph that relies on them may outlive this.
  struct Switches {
    int num_no_sync = 0;       // guards alive
    bool buffers_next = true;  // in the next forward

    bool gradients() const { return num_no_sync == 0; }
  };
  const std::shared_ptr<Switches> sync_ = std::make_shared<Switches>();
  bool joined_ = false;
  JoinOptions join_options_;
  std::string initial_bucket_sizes_;
  int64_t printed_iteration_ = -1;
  BufferHook buffer_hook_;
  BufferHookLocation buffer_hook_location_ = BufferHookLocation::post_forward;
};

/// What no_sync returns: it can be moved, and so be kept in a std::optional. One that was moved away does nothing.
class [[nodiscard]] DataParallelBase::NoSync {
 public:
  NoSync(NoSync&&) noexcept = default;
  NoSync& operator=(NoSync&& other) noexcept {
    NoSync taken(std::move(other));
    std::swap(sync_, taken.sync_);  // what this one held ends here
    return *this;
  }
  ~NoSync() {
    if (sync_) --sync_->num_no_sync;
  }

 private:
  friend class DataParallelBase;
  explicit NoSync(std::shared_ptr<Switches> sync) : sync_(std::move(sync)) {
    if (sync_) ++sync_->num_no_sync;
  }

  std::shared_ptr<Switches> sync_;  // null: does nothing
};

/// Wraps a module holder or a shared_ptr to a module; calls take and return what its forward does.
///     Net net;
///     serried::DistributedDataParallel ddp(net, {.process_group = world});
///     loss(ddp(x), y).backward();        // gradients are averages over the ranks when backward returns
template <class Holder>
class DistributedDataParallel : public DataParallelBase {
 public:
  explicit DistributedDataParallel(Holder module, DistributedDataParallelOptions options = {})
      : DataParallelBase(shared(module), std::move(options)), module_(std::move(module)) {}

  /// The holder given.
  Holder& module() { return module_; }
  const Holder& module() const { return module_; }

  template <class... Args>
  auto forward(Args&&... args) {
    const auto run = [this](auto&&... inputs) { return this->run(std::forward<decltype(inputs)>(inputs)...); };
    if (!prepares_inputs()) return run(std::forward<Args>(args)...);
    return detail::with_prepared([this](at::Tensor& t) { prepare_input(t); }, run, std::forward<Args>(args)...);
  }

  template <class... Args>
  auto operator()(Args&&... args) {
    return forward(std::forward<Args>(args)...);
  }

 private:
  template <class... Args>
  auto run(Args&&... args) {
    const ForwardScope scope(*this);
    std::vector<at::Tensor> tensors;
    if constexpr (std::is_void_v<decltype(module_->forward(std::forward<Args>(args)...))>) {
      module_->forward(std::forward<Args>(args)...);
      after_forward(tensors);
    } else {
      auto output = module_->forward(std::forward<Args>(args)...);
      auto collect = [&](at::Tensor& t) { tensors.push_back(t); };
      detail::for_each_tensor(output, collect);
      after_forward(tensors);
      return output;
    }
  }

  template <class Impl>
  static std::shared_ptr<torch::nn::Module> shared(const std::shared_ptr<Impl>& module) {
    return module;
  }
  template <class ModuleHolder>
  static std::shared_ptr<torch::nn::Module> shared(const ModuleHolder& module) {
    return module.ptr();
  }

  Holder module_;
};

}  // namespace serried
