// The Python module serried._C: backends for torch.distributed, and the little else that Python may call.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "serried/base/error.h"
#include "serried/base/interrupt.h"
#include "serried/comm/backends/shm/backend.h"
#include "serried/comm/collectives/own_backend.h"
#include "serried/comm/groups/named_group.h"
#include "serried/comm/rendezvous/rendezvous.h"

namespace serried {

/// How Python holds our backends, as it holds torch's: they wait for threads when they go, so they go without the GIL.
template <class T>
class NoGilPtr {
 public:
  NoGilPtr() = default;
  explicit NoGilPtr(T* raw) : pointer_(c10::intrusive_ptr<T>::unsafe_steal_from_new(raw)) {}
  NoGilPtr(c10::intrusive_ptr<T> pointer) : pointer_(std::move(pointer)) {}  // NOLINT: as pybind11 wants it
  NoGilPtr(const NoGilPtr&) = default;
  NoGilPtr(NoGilPtr&&) noexcept = default;
  NoGilPtr& operator=(const NoGilPtr&) = default;
  NoGilPtr& operator=(NoGilPtr&&) noexcept = default;
  ~NoGilPtr() {
    if (!pointer_.defined()) return;
    std::optional<pybind11::gil_scoped_release> without_gil;
    if (PyGILState_Check() != 0) without_gil.emplace();
    pointer_.reset();
  }

  T* get() const { return pointer_.get(); }
  T& operator*() const { return *pointer_; }
  T* operator->() const { return pointer_.get(); }

 private:
  c10::intrusive_ptr<T> pointer_;
};

}  // namespace serried

PYBIND11_DECLARE_HOLDER_TYPE(T, serried::NoGilPtr<T>, true)

namespace serried {
namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using Options = std::map<std::string, std::variant<bool, int64_t, std::string>>;

/// The backends that are alive, so that they can be closed while there is an interpreter for the callbacks of what is
/// open.
struct Alive {
  std::mutex mutex;
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends;
};

Alive& alive() {
  static auto* all = new Alive();
  return *all;
}

void remember(const BackendPtr& backend) {
  std::lock_guard<std::mutex> lock(alive().mutex);
  std::erase_if(alive().backends, [](const auto& each) { return each.expired(); });
  alive().backends.emplace_back(backend);
}

void close_all() {
  std::vector<c10::weak_intrusive_ptr<c10d::Backend>> backends;
  {
    std::lock_guard<std::mutex> lock(alive().mutex);
    backends.swap(alive().backends);
  }
  for (const auto& each : backends) {
    try {
      if (const BackendPtr backend = each.lock()) backend->shutdown();
    } catch (const std::exception&) {  // forked, or without peers: nothing that an exit has to wait for
    }
  }
}

size_t num_alive() {
  std::lock_guard<std::mutex> lock(alive().mutex);
  std::erase_if(alive().backends, [](const auto& each) { return each.expired(); });
  return alive().backends.size();
}

BackendOptions to_values(const Options& options) {
  BackendOptions values;
  for (const auto& [name, value] : options) {
    std::visit([&values, &key = name](const auto& each) { values.emplace(key, c10::IValue(each)); }, value);
  }
  return values;
}

/// The backend of a group whose ProcessGroup, and with it whose name, is torch.distributed's.
BackendPtr make_backend(const std::string& name, const StorePtr& store, int rank, int world_size,
                        std::chrono::milliseconds timeout, const Options& options) {
  if (name != "threads" && rank_label().rank < 0) set_process_rank_label({rank, world_size});
  const std::string why_not = why_backend_unavailable(name);
  if (!why_not.empty()) {
    raise<c10::NotImplementedError>(
        {"init_process_group", c10::str("\"", name, "\" does not work here: ", why_not), "use \"gloo\""});
  }
  const FactoryArgs args{.store = store,
                         .rank = rank,
                         .world_size = world_size,
                         .timeout = timeout,
                         .device = at::kCPU,
                         .options = to_values(options),
                         .name = "",
                         .desc = ""};
  const Group group = detail::find_backend("init_process_group", name)(args);
  BackendPtr backend = group->getBackend(at::kCPU);
  remember(backend);
  return backend;
}

using Clock = std::chrono::steady_clock;

/// Threads besides the main one that wait in a call, and when they last said so. Each does every 50 ms.
struct Waiting {
  std::mutex mutex;
  std::map<long, Clock::time_point> last;
};
constexpr auto kWaitsNoLonger = std::chrono::milliseconds(500);

Waiting& waiting() {
  static auto* all = new Waiting();
  return *all;
}

void note_that_it_waits(long thread) {
  const auto now = Clock::now();
  std::lock_guard<std::mutex> lock(waiting().mutex);
  std::erase_if(waiting().last, [now](const auto& each) { return now - each.second > kWaitsNoLonger; });
  waiting().last[thread] = now;
}

std::vector<long> waiting_threads() {
  const auto now = Clock::now();
  std::vector<long> threads;
  std::lock_guard<std::mutex> lock(waiting().mutex);
  for (const auto& [thread, last] : waiting().last) {
    if (now - last <= kWaitsNoLonger) threads.push_back(thread);
  }
  return threads;
}

/// Python only notes a Ctrl-C; its main thread has to ask.
void raise_what_signals_raise() {
  const long thread = ::syscall(SYS_gettid);
  if (thread != ::getpid()) return note_that_it_waits(thread);
  if (Py_IsInitialized() == 0) return;
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

std::tuple<StorePtr, int, int> meet(const std::string& url, std::chrono::milliseconds timeout) {
  const Meeting meeting = rendezvous(url, {.rank = -1, .world_size = -1, .timeout = timeout});
  return {meeting.store, meeting.rank, meeting.world_size};
}

void set_nan_check(const BackendPtr& backend, const std::string& mode) {
  detail::OwnBackend* own = detail::as_own(*backend);
  if (own == nullptr) {
    raise<c10::NotImplementedError>(
        {"set_nan_check", c10::str("the backend \"", backend->getBackendName(), "\" is not one of serried's"),
         "make the group with init_process_group(\"serried\")"});
  }
  const std::map<std::string, watch::NanCheck> modes{
      {"off", watch::NanCheck::off}, {"warn", watch::NanCheck::warn}, {"raise", watch::NanCheck::raise}};
  const auto found = modes.find(mode);
  if (found == modes.end()) {
    raise<c10::ValueError>({"set_nan_check", "unknown mode \"" + mode + "\"", "pass off, warn or raise"});
  }
  own->set_nan_check(found->second);
}

}  // namespace
}  // namespace serried

PYBIND11_MODULE(_C, module) {
  using torch::wrap_pybind_function_no_gil;
  // PyTorch's own backends have `options`, too.
  const auto torchs_backend = pybind11::module_::import("torch._C._distributed_c10d").attr("Backend");
  using serried::shm::ShmBackend;
  pybind11::class_<ShmBackend, serried::NoGilPtr<ShmBackend>>(module, "ShmBackend", torchs_backend)
      .def_property_readonly("options", [](ShmBackend& backend) { return backend.getBackendOptions(); })
      .def("_set_default_timeout",
           wrap_pybind_function_no_gil(
               [](ShmBackend& backend, std::chrono::milliseconds timeout) { backend.setTimeout(timeout); }));
  module.def("make_backend", wrap_pybind_function_no_gil(serried::make_backend));
  module.def("rendezvous", wrap_pybind_function_no_gil(serried::meet));
  module.def("set_nan_check", wrap_pybind_function_no_gil(serried::set_nan_check));
  module.def("close_all", wrap_pybind_function_no_gil(serried::close_all));
  module.def("waiting_threads", wrap_pybind_function_no_gil(serried::waiting_threads));
  module.def("num_alive", wrap_pybind_function_no_gil(serried::num_alive));
  serried::interrupt::set_check(serried::raise_what_signals_raise);
}
