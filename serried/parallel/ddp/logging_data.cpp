// Gathers what DistributedDataParallel knows under the keys that tools for PyTorch look for.
#include "serried/parallel/ddp/logging_data.h"

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <algorithm>
#include <cstdlib>
#include <ostream>
#include <set>

#include "serried/base/env.h"
#include "serried/base/log.h"
#include "serried/parallel/ddp/ddp.h"
#include "serried/parallel/ddp/reducer.h"
#include "serried/parallel/sync_batchnorm.h"

namespace serried {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "N/A";
}

const char* debug_level_name() {
  switch (c10d::debug_level()) {
    case c10d::DebugLevel::Off: return "OFF";
    case c10d::DebugLevel::Info: return "INFO";
    case c10d::DebugLevel::Detail: return "DETAIL";
  }
  return "OFF";
}

std::string bucket_members(const detail::Reducer& reducer) {
  std::vector<std::string> buckets;
  for (const detail::Bucket& bucket : reducer.buckets()) buckets.push_back(c10::Join(" ", bucket.members));
  return c10::Join(", ", buckets);
}

using Values = std::map<std::string, c10::IValue>;

void add_parameters(Values& values, const detail::Reducer& reducer) {
  std::set<std::string> dtypes;
  int64_t bytes = 0;
  for (const detail::ManagedParameter& parameter : reducer.parameters()) {
    dtypes.insert(c10::toString(parameter.tensor.scalar_type()));
    bytes += int64_t(parameter.tensor.nbytes());
  }
  values["dtypes"] = c10::Join(", ", dtypes);
  values["num_parameter_tensors"] = int64_t(reducer.parameters().size());
  values["total_parameter_size_bytes"] = bytes;
}

void add_times(Values& values, const detail::StepStatistics& statistics) {
  const detail::StepTimes& last = statistics.last();
  values["forward_compute_time"] = last.forward();
  values["backward_compute_time"] = last.backward();
  values["backward_comm_time"] = last.communication();
  values["backward_compute_comm_overlap_time"] = last.overlap();
  values["avg_forward_compute_time"] = statistics.average(&detail::StepTimes::forward);
  values["avg_backward_compute_time"] = statistics.average(&detail::StepTimes::backward);
  values["avg_backward_comm_time"] = statistics.average(&detail::StepTimes::communication);
  values["avg_backward_compute_comm_overlap_time"] = statistics.average(&detail::StepTimes::overlap);
  values["forward_compute_time_start"] = last.forward_start;
  values["backward_compute_time_start"] = last.backward_start;
  values["backward_compute_time_end"] = last.backward_end;
  values["backward_comm_time_start"] = last.communication_start;
  values["backward_comm_time_end"] = last.communication_end;
}

void add_run_time(Values& values, const detail::Reducer& reducer) {
  values["iteration"] = reducer.statistics().iteration();
  values["num_buckets_reduced"] = int64_t(reducer.buckets().size());
  values["has_rebuilt_buckets"] = int64_t(reducer.has_rebuilt_buckets());
  values["rebuilt_bucket_sizes"] = reducer.has_rebuilt_buckets() ? reducer.bucket_sizes() : std::string();
  values["rebuilt_per_bucket_param_indices"] = reducer.has_rebuilt_buckets() ? bucket_members(reducer) : std::string();
  values["unused_parameter_size"] = int64_t(reducer.unused_bytes());
  values["prev_iteration_grad_ready_order_indices"] = c10::Join(", ", reducer.arrival_order());
  values["can_set_static_graph"] = reducer.can_be_static();
  values["has_error"] = int64_t(!reducer.last_error().empty());
  values["error"] = reducer.last_error();
}

}  // namespace

std::string LoggingData::to_string() const {
  std::string text;
  for (const auto& [key, value] : values_) text += c10::str(key, ": ", value, "\n");
  return text;
}

void dump_distributed_environment(std::ostream& out) {
  for (const char* name : {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                           "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT", "GLOO_NUM_THREADS",
                           "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_ALGO",
                           "NCCL_PROTO", "TORCH_DISTRIBUTED_DEBUG", "OMP_NUM_THREADS"}) {
    out << "env:" << name << "=" << environment(name) << "\n";
  }
  for (const env::Variable& variable : env::table()) {
    out << "env:" << variable.name << "=" << environment(variable.name) << "\n";
  }
}

void DataParallelBase::print_if_debugging() {
  if (c10d::debug_level() == c10d::DebugLevel::Off || reducer_->statistics().iteration() == printed_iteration_) return;
  printed_iteration_ = reducer_->statistics().iteration();
  log::write(log::Topic::comm, c10::str("DistributedDataParallel after iteration ", printed_iteration_, "\n",
                                        logging_data().to_string()));
}

LoggingData DataParallelBase::logging_data() const {
  const detail::Reducer& reducer = *reducer_;
  Values values;
  values["module_name"] = wrapped_->name();
  values["world_size"] = int64_t(group_->getSize());
  values["rank"] = int64_t(group_->getRank());
  values["backend_name"] = group_->getBackend(data_parallel_parameters()[0].device().type())->getBackendName();
  values["device_ids"] = std::string();
  values["output_device"] = int64_t(-1);
  values["broadcast_buffers"] = int64_t(options_.sync_buffers);
  const auto limits = detail::bucket_limits(options_).rebuilt;
  values["bucket_cap_bytes"] = int64_t(*std::max_element(limits.begin(), limits.end()));
  values["bucket_sizes"] = initial_bucket_sizes_;
  values["find_unused_parameters"] = int64_t(options_.find_unused_parameters);
  values["gradient_as_bucket_view"] = int64_t(options_.gradient_as_bucket_view);
  values["static_graph"] = int64_t(reducer.is_static_graph());
  values["has_sync_bn"] = int64_t(has_sync_batchnorm(*wrapped_));
  values["is_multi_device_module"] = int64_t(0);
  values["comm_hook"] = reducer.comm_hook() ? reducer.comm_hook()->name() : std::string();
  values["join_uneven_inputs"] = joined_;
  values["torch_distributed_debug"] = std::string(debug_level_name());
  const std::pair<const char*, const char*> variables[] = {{"master_addr", "MASTER_ADDR"},
                                                           {"master_port", "MASTER_PORT"},
                                                           {"cuda_visible_devices", "CUDA_VISIBLE_DEVICES"},
                                                           {"gloo_socket_ifname", "GLOO_SOCKET_IFNAME"},
                                                           {"gloo_device_transport", "GLOO_DEVICE_TRANSPORT"},
                                                           {"gloo_num_threads", "GLOO_NUM_THREADS"}};
  for (const auto& [key, variable] : variables) values[key] = environment(variable);
  add_parameters(values, reducer);
  add_run_time(values, reducer);
  add_times(values, reducer.statistics());
  return LoggingData(std::move(values));
}

}  // namespace serried
