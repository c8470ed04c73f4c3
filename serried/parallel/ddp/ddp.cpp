// Construction, and what happens around each forward.
#include "serried/parallel/ddp/ddp.h"

#include <c10/core/GradMode.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/parallel/ddp/verify.h"

namespace serried {

using detail::Reducer;

namespace {

Group group_of(const DistributedDataParallelOptions& options) {
  if (!options.mesh) return options.process_group ? options.process_group : require_current_process_group();
  if (options.process_group) {
    raise<c10::ValueError>({"DistributedDataParallel", "both process_group and mesh are given", "pass one of them"});
  }
  if (options.mesh->ndim() != 1) {
    raise<c10::ValueError>({"DistributedDataParallel", "needs a mesh of one axis, got " + options.mesh->to_string(),
                            "pass a slice of it, such as mesh[\"dp\"]"});
  }
  return options.mesh->get_group(0);
}

detail::ReducerOptions reducer_options(const DistributedDataParallelOptions& options) {
  return {.find_unused_parameters = options.find_unused_parameters,
          .gradient_as_bucket_view = options.gradient_as_bucket_view,
          .static_graph = options.static_graph,
          .skip_unused_allreduce = options.skip_unused_allreduce,
          .batched_grad_copy = options.batched_grad_copy,
          .stats_every = options.stats_every,
          .limits = detail::bucket_limits(options)};
}

}  // namespace

DataParallelBase::DataParallelBase(std::shared_ptr<torch::nn::Module> module, DistributedDataParallelOptions options)
    : torch::nn::Module("DistributedDataParallel"), wrapped_(std::move(module)), options_(std::move(options)) {
  check_options();
  group_ = group_of(options_);
  ignored_ = {options_.ignore.begin(), options_.ignore.end()};
  register_module("module", wrapped_);
  std::vector<detail::ManagedParameter> parameters = detail::collect_parameters(*wrapped_, ignored_);
  if (parameters.empty()) {
    raise<c10::ValueError>({"DistributedDataParallel", "no parameter of " + wrapped_->name() + " requires a gradient",
                            "use the module as it is, there is nothing to average"});
  }
  if (options_.init_sync) {
    detail::verify_same_parameters(parameters, group_);
    sync_initial_state();
  }
  if (options_.static_graph && options_.find_unused_parameters) {
    log::warn_once("[DistributedDataParallel] find_unused_parameters is not needed with static_graph");
  }
  reducer_ = std::make_shared<Reducer>(std::move(parameters), group_, reducer_options(options_));
  reducer_->install_hooks();
  initial_bucket_sizes_ = reducer_->bucket_sizes();
}

DataParallelBase::~DataParallelBase() = default;

void DataParallelBase::check_options() const {
  if (!wrapped_) {
    raise<c10::ValueError>({"DistributedDataParallel", "the module is empty", "construct it before wrapping it"});
  }
  if (options_.stats_every < 1) {
    raise<c10::ValueError>({"DistributedDataParallel", c10::str("stats_every is ", options_.stats_every),
                            "pass the number of iterations between two samples, 1 or more"});
  }
  detail::check_names_exist(*wrapped_, options_.ignore);
}

void DataParallelBase::sync_initial_state() {
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : detail::module_state(*wrapped_, ignored_)) tensors.push_back(tensor);
  detail::broadcast_tensors(tensors, group_, 0);
}

std::map<std::string, at::Tensor> DataParallelBase::buffers_to_sync() const {
  std::map<std::string, at::Tensor> buffers;
  for (const auto& item : wrapped_->named_buffers()) {
    if (item.value().defined() && ignored_.count(item.key()) == 0) buffers.emplace(item.key(), item.value());
  }
  return buffers;
}

bool DataParallelBase::will_sync_buffers() const {
  return sync_buffers_next_ && options_.sync_buffers && !buffers_to_sync().empty();
}

void DataParallelBase::sync_buffers() {
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : buffers_to_sync()) tensors.push_back(tensor);
  detail::broadcast_tensors(tensors, group_, 0);
}

void DataParallelBase::run_buffer_hook(BufferHookLocation location) {
  if (!buffer_hook_ || buffer_hook_location_ != location || !will_sync_buffers()) return;
  reducer_->wait_at_end(buffer_hook_(group_, buffers_to_sync()));
}

void DataParallelBase::before_forward() {
  if (c10::GradMode::is_enabled()) reducer_->prepare_forward(sync_gradients_);
  if (buffer_hook_) return run_buffer_hook(BufferHookLocation::pre_forward);
  if (sync_buffers_next_ && options_.sync_buffers) sync_buffers();
}

void DataParallelBase::after_forward(const std::vector<at::Tensor>& outputs) {
  run_buffer_hook(BufferHookLocation::post_forward);
  if (!c10::GradMode::is_enabled()) {
    sync_buffers_next_ = false;
    return;
  }
  // Buffers that an unsynchronised forward has changed stay this rank's own until gradients are shared again.
  sync_buffers_next_ = sync_gradients_;
  reducer_->prepare_backward(outputs, sync_gradients_);
}

void DataParallelBase::register_comm_hook(CommHook hook) {
  reducer_->set_comm_hook(std::move(hook));
}

void DataParallelBase::register_buffer_hook(BufferHook hook, BufferHookLocation location) {
  if (!hook) raise<c10::ValueError>({"register_buffer_hook", "the hook is empty", "pass a function"});
  buffer_hook_ = std::move(hook);
  buffer_hook_location_ = location;
}

void DataParallelBase::set_process_group(Group group) {
  if (!group) {
    raise<c10::ValueError>({"set_process_group", "the group is null", "pass the group that this rank is in"});
  }
  group_ = std::move(group);
  reducer_->set_group(group_);
}

void DataParallelBase::set_static_graph() {
  reducer_->set_static_graph();
  options_.static_graph = true;
}

void DataParallelBase::reset() {
  reducer_->reset();
}

void DataParallelBase::check_finalized() const {
  reducer_->check_finalized();
}

void DataParallelBase::remove_hooks() {
  reducer_->remove_hooks();
}

std::vector<at::Tensor> DataParallelBase::data_parallel_parameters() const {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : reducer_->parameters()) tensors.push_back(parameter.tensor);
  return tensors;
}

}  // namespace serried
