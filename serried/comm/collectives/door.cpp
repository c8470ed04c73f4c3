// From a collective to a backend: hooks, the backend of the tensors' device, and the way it takes.
#include "serried/comm/collectives/door.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <optional>

#include "serried/base/error.h"
#include "serried/base/trace.h"
#include "serried/comm/collectives/observe.h"
#include "serried/comm/collectives/pending.h"

namespace serried::observe {
namespace {

// Of this thread; each knows the next older.
constinit thread_local Observer* newest = nullptr;

}  // namespace

Observer::Observer(std::function<void(const Call&)> callback) : callback_(std::move(callback)), outer_(newest) {
  newest = this;
}

Observer::~Observer() {
  // Not always the newest: two that are members of values may end in any order.
  Observer** place = &newest;
  while (*place != nullptr && *place != this) place = &(*place)->outer_;
  if (*place == this) *place = outer_;
}

void started(const char* name, int64_t bytes, const Group& group) {
  if (newest == nullptr) [[likely]]
    return;
  if (group->getSize() == 1) return;
  for (Observer* each = newest; each != nullptr; each = each->outer_) each->callback_({name, bytes, group});
}

}  // namespace serried::observe

namespace serried::detail {
namespace {

int64_t bytes_of(at::TensorList tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& x : tensors) bytes += x.numel() * int64_t(x.itemsize());
  return bytes;
}

// What this rank puts in, or gets where it puts in nothing.
int64_t bytes_of(const Collective& c) {
  return bytes_of(c.inputs.empty() ? c.outputs : c.inputs);
}

void tell(const Group& group, const Collective& c) {
  observe::started(watch::kind_name(c.kind), bytes_of(c), group);
}

std::string device_list(const Group& group) {
  std::vector<std::string> names;
  for (const at::Device& device : group->getDeviceTypes()) names.push_back(device.str());
  std::sort(names.begin(), names.end());
  return names.empty() ? "none" : c10::Join(", ", names);
}

// Such a group has no name either: c10d keeps it in the backends.
void check_has_backend(const char* where, const Group& group) {
  if (group->hasBackends()) return;
  raise<c10::ValueError>({where, "the group has no backend", "make the group with new_group"});
}

c10::intrusive_ptr<c10d::Backend> backend_for(const char* where, const Group& group, const at::Tensor& x) {
  const at::DeviceType device = x.device().type();
  if (group->hasBackendForDeviceType(device)) return group->getBackend(device);
  check_has_backend(where, group);
  raise<c10::ValueError>({where,
                          c10::str(watch::describe_tensor(x), " is on ", x.device(), ", and group \"",
                                   group->getGroupName(), "\" serves: ", device_list(group)),
                          "move the tensor to a device the group serves, or make the group with {.device = ...}"});
}

const at::Tensor* first_tensor(const Collective& c) {
  if (!c.inputs.empty()) return &c.inputs[0];
  return c.outputs.empty() ? nullptr : &c.outputs[0];
}

c10::intrusive_ptr<c10d::Backend> backend_for(const Group& group, const Collective& c) {
  if (const at::Tensor* x = first_tensor(c)) return backend_for(c.where, group, *x);
  check_has_backend(c.where, group);
  // The group's own where it serves the CPU, else whatever it serves.
  return group->hasBackendForDeviceType(at::kCPU) ? group->getBackend(at::kCPU) : group->getDefaultBackend();
}

// Null where the backend has to be asked by c10d's calls, which look for NaN themselves.
OwnBackend* taker_of(c10d::Backend& backend, const Collective& c) {
  OwnBackend* own = as_own(backend);
  if (own == nullptr) return nullptr;
  const Capabilities can = own->capabilities();
  const at::Tensor* x = first_tensor(c);
  if (!can.takes_collectives || (x != nullptr && x->device().type() != can.device)) return nullptr;
  own->check_sent(watch::kind_name(c.kind), c.inputs);
  return own;
}

/// The call in the trace, where the backend does not tell of it itself: one that is not ours.
class ForeignCall {
 public:
  ForeignCall(c10d::Backend& backend, const Collective& c, const char* phase)
      : span_(watch::kind_name(c.kind), phase, c.kind == watch::Kind::barrier ? -1 : bytes_of(c)) {
    span_.note("backend", backend.getBackendName());
    if (const at::Tensor* x = first_tensor(c)) span_.note("dtype", watch::dtype_name(x->scalar_type()));
  }

 private:
  trace::Span span_;
};

bool tells_of_itself(c10d::Backend& backend) {
  return !trace::enabled() || as_own(backend) != nullptr;
}

void run_on(c10d::Backend& backend, const Collective& c) {
  const watch::SizesOfAll scope(c.sizes_of_all);
  if (OwnBackend* own = taker_of(backend, c)) return own->run(c);
  std::optional<ForeignCall> call;
  if (!tells_of_itself(backend)) call.emplace(backend, c, trace::kWait);
  start_by_c10d(backend, c)->wait();
}

WorkPtr start_on(c10d::Backend& backend, const Collective& c) {
  const watch::SizesOfAll scope(c.sizes_of_all);
  if (OwnBackend* own = taker_of(backend, c)) return own->start(c);
  std::optional<ForeignCall> call;
  if (!tells_of_itself(backend)) call.emplace(backend, c, trace::kCommunication);
  return start_by_c10d(backend, c);
}

bool multiplies(const Collective& c) {
  return c.op != nullptr && c.op->op_ == c10d::ReduceOp::PREMUL_SUM;
}

// One rank gets what it has put in.
void run_alone(const Collective& c) {
  if (c.inputs.empty() || c.outputs.empty() || c.outputs[0].is_same(c.inputs[0])) return;
  c.outputs[0].view({-1}).copy_(c.inputs[0].view({-1}));
}

}  // namespace

void run(const Group& group, const Collective& collective) {
  start_what_is_due(group);
  tell(group, collective);
  const auto backend = backend_for(group, collective);
  if (group->getSize() == 1 && !multiplies(collective)) return run_alone(collective);
  run_on(*backend, collective);
}

WorkPtr start(const Group& group, const Collective& collective) {
  start_what_is_due(group);
  tell(group, collective);
  return start_on(*backend_for(group, collective), collective);
}

void run_quietly(const Group& group, const Collective& collective) {
  start_what_is_due(group);
  run_on(*backend_for(group, collective), collective);
}

WorkPtr start_quietly(const Group& group, const Collective& collective) {
  start_what_is_due(group);
  return start_on(*backend_for(group, collective), collective);
}

at::Device device_of(const Group& group) {
  const std::vector<at::Device> devices = group->getDeviceTypes();
  return devices.empty() ? at::Device(at::kCPU) : devices.front();
}

bool goes_straight(const Group& group, const at::Tensor& x) {
  const at::DeviceType device = x.device().type();
  if (!group->hasBackendForDeviceType(device)) return false;
  const Capabilities can = capabilities_of(*group->getBackend(device));
  return can.takes_collectives && can.device == device;
}

bool places_rows(const Group& group, const at::Tensor& x) {
  if (group->getSize() == 1 || !goes_straight(group, x)) return false;
  return capabilities_of(*group->getBackend(x.device().type())).places_rows;
}

}  // namespace serried::detail
