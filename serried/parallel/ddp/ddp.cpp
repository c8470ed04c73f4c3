// Construction, and what happens around each forward.
#include "serried/parallel/ddp/ddp.h"

#include <ATen/SequenceNumber.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/base/trace.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/watch.h"
#include "serried/parallel/ddp/claim.h"
#include "serried/parallel/ddp/delayed_all_reduce.h"
#include "serried/parallel/ddp/mixed_precision.h"
#include "serried/parallel/ddp/parameter_watch.h"
#include "serried/parallel/ddp/parameters.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/parallel/recompute/frame.h"
#include "serried/tape/facts.h"
#include "serried/tape/module_options.h"
#include "serried/tape/tape.h"

namespace serried {
namespace {

using detail::ManagedParameter;
using detail::Reducer;

constexpr size_t kBroadcastBytes = size_t(250) << 20;

// One line per parameter, the same text where they agree.
std::string describe(const std::vector<ManagedParameter>& parameters) {
  std::string lines;
  for (const ManagedParameter& p : parameters) {
    lines += c10::str(p.name, " ", p.tensor.sizes(), " strides ", p.tensor.strides(), " ",
                      c10::toString(p.tensor.scalar_type()), p.sparse_gradient ? " with sparse gradients" : "", "\n");
  }
  return lines;
}

std::string shown(const std::optional<std::string>& line, size_t count) {
  return line ? *line : c10::str("nothing (it has ", count, " parameters)");
}

// Compares names, sizes, strides and dtypes over the group; ValueError on every rank that names the first parameter
// that differs, and two ranks with what they have.
void verify_same_parameters(const std::vector<ManagedParameter>& parameters, const Group& group) {
  const auto found = detail::first_difference(describe(parameters), group);
  if (!found) return;
  raise<c10::ValueError>({"DistributedDataParallel",
                          c10::str("the ranks wrap different models: parameter ", found->line,
                                   " is\n    on rank 0: ", shown(found->first, found->first_count), "\n    on rank ",
                                   found->rank, ": ", shown(found->other, found->other_count)),
                          "build the same module on every rank"});
}

// All parameters (frozen ones too) and buffers that are not ignored.
std::vector<at::Tensor> module_state(const torch::nn::Module& module, const std::set<std::string>& ignored) {
  std::vector<at::Tensor> state;
  const auto add = [&](const torch::OrderedDict<std::string, at::Tensor>& items) {
    for (const auto& item : items) {
      if (item.value().defined() && ignored.count(item.key()) == 0) state.push_back(item.value());
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return state;
}

// Gives `tensors` the values of rank `source`; autograd does not see it, version counters stay.
void broadcast_tensors(const std::vector<at::Tensor>& tensors, const Group& group, int source) {
  if (tensors.empty() || group->getSize() == 1) return;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> data;
  for (const at::Tensor& tensor : tensors) data.push_back(tensor.detach());
  // A buffer that a pending backward has saved must not look changed: GANs run two forwards before one backward.
  at::AutoDispatchBelowADInplaceOrView no_version_bump;
  c10d::broadcast_coalesced(group, data, kBroadcastBytes, source);
}

// A second run would announce another forward in the middle of the backward of the first.
void check_not_recomputed() {
  if (!detail::is_in_segment()) return;
  raise<c10::ValueError>({"DistributedDataParallel", "forward was called inside of recompute",
                          "call recompute inside of the module's forward, on its blocks"});
}

}  // namespace

namespace {

std::string sync_text(uint64_t value) {
  static constexpr const char* kTexts[] = {"nothing", "gradients", "buffers", "gradients and buffers"};
  return kTexts[value & 3];
}

Group group_of(const DistributedDataParallelOptions& options) {
  if (!options.mesh)
    return options.process_group ? options.process_group : require_current_process_group("DistributedDataParallel");
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
          .reduce_dtype = options.mixed_precision.reduce_dtype ? options.mixed_precision.reduce_dtype
                                                               : options.mixed_precision.param_dtype,
          .limits = detail::bucket_limits(options)};
}

}  // namespace

DataParallelBase::DataParallelBase(std::shared_ptr<torch::nn::Module> module, DistributedDataParallelOptions options)
    : torch::nn::Module("DistributedDataParallel"), wrapped_(std::move(module)), options_(std::move(options)) {
  check_options();
  detail::check_output_dtype("DistributedDataParallel", options_.mixed_precision);
  group_ = group_of(options_);
  ignored_ = {options_.ignore.begin(), options_.ignore.end()};
  register_module("module", wrapped_);
  std::vector<detail::ManagedParameter> parameters = detail::collect_parameters(*wrapped_, ignored_);
  if (parameters.empty()) {
    raise<c10::ValueError>({"DistributedDataParallel", "no parameter of " + wrapped_->name() + " requires a gradient",
                            "use the module as it is, there is nothing to average"});
  }
  check_device(parameters[0].tensor.device());
  detail::check_no_wrapper_inside(*wrapped_, parameters);
  const auto claim =
      std::make_shared<detail::Claim>(parameters, group_, options_.mixed_precision.param_dtype.has_value());
  if (options_.mesh) detail::check_apart(parameters, *options_.mesh);
  if (options_.init_sync) {
    verify_same_parameters(detail::parts_of(parameters), group_);
    sync_state(0);
  }
  if (options_.static_graph && options_.find_unused_parameters) {
    log::warn_once("[DistributedDataParallel] find_unused_parameters is not needed with static_graph");
  }
  detail::DelayedParameters delayed = detail::take_delayed(parameters, options_.delay_all_reduce);
  if (!delayed.parameters.empty())
    delayed_ = std::make_shared<detail::DelayedReducer>(std::move(delayed), group_, claim);
  reducer_ = std::make_shared<Reducer>(std::move(parameters), group_, reducer_options(options_), claim);
  install_hooks();
  watch_ = std::make_shared<detail::ParameterWatch>(wrapped_, ignored_, data_parallel_parameters());
  initial_bucket_sizes_ = reducer_->bucket_sizes();
  print_if_debugging();
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

void DataParallelBase::check_device(at::Device of_module) const {
  if (!options_.device || options_.device->type() == of_module.type()) return;
  raise<c10::ValueError>({"DistributedDataParallel",
                          c10::str("device is ", *options_.device, ", but the module is on ", of_module),
                          "leave out .device, or move the module there before wrapping it"});
}

// Gradients in low precision come through nodes of their own, so hooks belong there.
void DataParallelBase::install_hooks() {
  const MixedPrecision& precision = options_.mixed_precision;
  if (precision.buffer_dtype) detail::cast_buffers(*wrapped_, ignored_, *precision.buffer_dtype);
  if (precision.param_dtype) {
    low_precision_ = std::make_shared<detail::LowPrecision>(*wrapped_, ignored_, *precision.param_dtype);
    low_precision_->lower();
    low_precision_->install_hooks();
  }
  if (const auto dtype = reducer_options(options_).reduce_dtype) {
    log::line(log::Topic::comm, "mixed precision: gradients are reduced in ", *dtype);
  }
  if (delayed_) delayed_->install_hooks();
  reducer_->install_hooks();
  if (low_precision_) low_precision_->restore();
}

void DataParallelBase::prepare_input(at::Tensor& t) const {
  if (!t.defined()) return;
  if (options_.device) t = t.to(*options_.device);
  if (casts_inputs() && t.is_floating_point()) t = t.to(*options_.mixed_precision.param_dtype);
}

void DataParallelBase::abandon_forward() {
  if (low_precision_) low_precision_->restore();
}

void DataParallelBase::sync_state(int source) {
  const watch::PartOf scope("DDP's first state");
  const trace::Span span("broadcast the first state", trace::kSetup);
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& t : module_state(*wrapped_, ignored_)) tensors.push_back(part_of(t));
  broadcast_tensors(tensors, group_, source);
}

std::map<std::string, at::Tensor> DataParallelBase::buffers_to_sync() const {
  std::map<std::string, at::Tensor> buffers;
  for (const auto& item : wrapped_->named_buffers()) {
    if (item.value().defined() && ignored_.count(item.key()) == 0) buffers.emplace(item.key(), item.value());
  }
  return buffers;
}

bool DataParallelBase::will_sync_buffers() const {
  return sync_->buffers_next && options_.sync_buffers && !buffers_to_sync().empty();
}

void DataParallelBase::sync_buffers(int source) {
  const watch::PartOf scope("DDP's buffers");
  std::vector<at::Tensor> tensors;
  for (auto& [name, tensor] : buffers_to_sync()) tensors.push_back(part_of(tensor));
  const trace::Span span("broadcast buffers", trace::kCommunication);
  broadcast_tensors(tensors, group_, source);
}

void DataParallelBase::run_buffer_hook(BufferHookLocation location) {
  if (!buffer_hook_ || buffer_hook_location_ != location || !will_sync_buffers()) return;
  reducer_->wait_at_end(buffer_hook_(group_, buffers_to_sync()));
}

void DataParallelBase::before_forward() {
  check_not_recomputed();
  print_if_debugging();
  if (low_precision_) low_precision_->restore();
  if (c10::GradMode::is_enabled()) notice_new_memory();
  const int source = announce_forward();
  if (c10::GradMode::is_enabled()) {
    const tape::Pause no_part_of_a_step;  // new state and new buckets come once
    if (shares_state()) share_state(source);
    reducer_->prepare_forward(sync_->gradients(), source);
  }
  rely_on_state();
  if (buffer_hook_) {
    run_buffer_hook(BufferHookLocation::pre_forward);
  } else if (sync_->buffers_next && options_.sync_buffers) {
    sync_buffers(source);
  }
  if (low_precision_) low_precision_->lower();
  follow_accumulators();
  first_node_ = at::sequence_number::peek();
}

// torch::load, to() and set_data() put parameters into other memory. That is a new beginning: as at construction, the
// ranks compare what they have and take the values of one.
void DataParallelBase::notice_new_memory() {
  const tape::Pause no_part_of_a_step;
  has_new_memory_ = has_new_memory_ || (watch_ && watch_->has_new_memory());
  if (!has_new_memory_) return;
  if (delayed_) delayed_->follow_memory();
  reducer_->follow_memory();
  has_new_memory_ = false;
  has_new_state_ = options_.init_sync;
}

bool DataParallelBase::shares_state() const {
  return has_new_state_ && sync_->gradients() && c10::GradMode::is_enabled();
}

void DataParallelBase::share_state(int source) {
  try {
    const std::vector<ManagedParameter> parameters = detail::parts_of(managed_parameters());
    verify_same_parameters(parameters, group_);
    if (options_.sync_buffers) {
      sync_state(source);
    } else {  // buffers are each rank's own
      std::vector<at::Tensor> tensors;
      for (const ManagedParameter& parameter : parameters) tensors.push_back(parameter.tensor);
      broadcast_tensors(tensors, group_, source);
    }
    has_new_state_ = false;
  } catch (const c10::DistBackendError& error) {
    throw c10::DistBackendError(c10::str(error.msg(),
                                         "\n  in:  a forward of DistributedDataParallel that found parameters in other "
                                         "memory, as after torch::load, to() or set_data(): every rank calls those"));
  }
}

// In the precision that forward runs in, whose nodes have the hooks.
void DataParallelBase::follow_accumulators() {
  if (!c10::GradMode::is_enabled()) return;
  if (delayed_) delayed_->follow_accumulators();
  reducer_->follow_accumulators();
}

void DataParallelBase::rely_on_state() const {
  if (!tape::is_recording()) return;
  tape::rely_on(tape::training_mode("the module in DistributedDataParallel", wrapped_));
  tape::rely_on(tape::contents_of("the module in DistributedDataParallel", wrapped_));
  tape::rely_on(tape::options_of("the module in DistributedDataParallel", wrapped_));
  const auto changes = [reducer = std::weak_ptr<const Reducer>(reducer_)]() -> uint64_t {
    const auto alive = reducer.lock();
    return alive ? alive->num_changes() : UINT64_MAX;
  };
  tape::rely_on({"changes to buckets, group and hook of DistributedDataParallel", changes, reducer_.get()});
  const auto next = [sync = sync_] { return uint64_t(sync->gradients()) + 2 * uint64_t(sync->buffers_next); };
  tape::rely_on({"what DistributedDataParallel synchronises", next, sync_.get(), sync_text});
}

void DataParallelBase::after_forward(const std::vector<at::Tensor>& outputs) {
  run_buffer_hook(BufferHookLocation::post_forward);
  if (low_precision_) low_precision_->follow(outputs);
  // Buffers that an unsynchronised forward has changed stay this rank's own until gradients are shared again.
  sync_->buffers_next = c10::GradMode::is_enabled() && sync_->gradients();
  if (tape::is_recording()) {
    tape::after_replay([sync = sync_, next = sync_->buffers_next] { sync->buffers_next = next; });
  }
  if (!c10::GradMode::is_enabled()) return;
  const auto pass = std::make_shared<const detail::ForwardPass>(outputs, first_node_, sync_->gradients());
  if (delayed_) delayed_->follow(outputs, pass);
  reducer_->prepare_backward(outputs, pass);
}

DataParallelBase::NoSync DataParallelBase::no_sync(bool on) {
  if (!on) return NoSync(nullptr);
  if (reducer_->is_watched()) {
    raise<c10::ValueError>({"no_sync", "with optimizer_in_backward, gradients are used up by each backward",
                            "make one backward per step: add the losses, or step an optimizer after backward"});
  }
  return NoSync(sync_);
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
  if (low_precision_) low_precision_->restore();
  if (delayed_) delayed_->set_group(group_);
  reducer_->set_group(group_);
  sync_->buffers_next = true;  // whatever the last forward of each rank was
}

void DataParallelBase::set_static_graph() {
  reducer_->set_static_graph();
  options_.static_graph = true;
}

void DataParallelBase::set_sparse_metadata(const std::map<std::string, at::Tensor>& rows) {
  reducer_->set_sparse_rows(rows);
}

void DataParallelBase::reset() {
  if (low_precision_) low_precision_->restore();
  if (delayed_) delayed_->reset();
  reducer_->reset();
}

void DataParallelBase::check_finalized() const {
  reducer_->check_finalized();
}

void DataParallelBase::remove_hooks() {
  watch_.reset();
  if (delayed_) delayed_->remove_hooks();
  reducer_->remove_hooks();
}

std::vector<ManagedParameter> DataParallelBase::managed_parameters() const {
  std::vector<ManagedParameter> managed = reducer_->parameters();
  if (delayed_) managed.insert(managed.end(), delayed_->parameters().begin(), delayed_->parameters().end());
  return managed;
}

std::vector<at::Tensor> DataParallelBase::data_parallel_parameters() const {
  std::vector<at::Tensor> tensors;
  for (const ManagedParameter& parameter : managed_parameters()) tensors.push_back(parameter.tensor);
  return tensors;
}

}  // namespace serried
