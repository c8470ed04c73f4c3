// The NaN check as a hook, and calls that are waited for together.
#include "serried/comm/collectives/own_backend.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "serried/comm/collectives/nan_check.h"

namespace serried::detail {
namespace {

/// Several works as one: done when all are; raises what the first of them that failed would.
class JoinedWork final : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<WorkPtr> works) : Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    for (const WorkPtr& work : works_) work->wait(timeout);
    return true;
  }

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](const WorkPtr& work) { return work->isSuccess(); });
  }

  std::exception_ptr exception() const override {
    for (const WorkPtr& work : works_) {
      if (auto error = work->exception()) return error;
    }
    return nullptr;
  }

  void synchronize() override { wait(kNoTimeout); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
        c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
    for (const WorkPtr& work : works_) futures.push_back(work->getFuture());
    return c10::collectAll(futures);
  }

 private:
  const std::vector<WorkPtr> works_;
};

}  // namespace

OwnBackend::OwnBackend(int rank, int size) : Backend(rank, size), nan_check_(default_nan_check()) {}

OwnBackend::~OwnBackend() {
  if (home_.is_here()) log_.close();
}

void OwnBackend::setGroupUid(const std::string& name) {
  Backend::setGroupUid(name);
  if (home_.is_here() && !name.empty()) log_.open(name, rank_, size_);
}

void OwnBackend::run(const Collective&) {
  TORCH_INTERNAL_ASSERT(false, "this backend takes no collectives");
}

WorkPtr OwnBackend::start(const Collective&) {
  TORCH_INTERNAL_ASSERT(false, "this backend takes no collectives");
}

void OwnBackend::look_for_nan(const char* where, at::TensorList sent) {
  home_.require(where);
  for (const at::Tensor& tensor : sent) {
    try {
      detail::check_nan(nan_check(), tensor, where, rank_);
    } catch (const c10::ValueError&) {
      fail(find_nan(tensor, rank_));
      throw;
    } catch (const c10::Error&) {  // there was no memory to look with: this rank does not come either
      fail(c10::str("rank ", rank_, " could not look for NaN in ", watch::describe_tensor(tensor)));
      throw;
    }
  }
}

c10::intrusive_ptr<c10d::Backend::Options> OwnBackend::report_options(std::chrono::milliseconds timeout) {
  std::lock_guard<std::mutex> lock(options_mutex_);
  if (!options_) options_ = c10::make_intrusive<Options>(getBackendName(), timeout);
  options_->timeout = timeout;
  options_->group_name = getGroupUid();
  options_->group_desc = getGroupDesc();
  return options_;
}

void OwnBackend::startCoalescing() {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalescing_ = true;
  coalesced_.clear();
}

WorkPtr OwnBackend::endCoalescing() {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  coalescing_ = false;
  return c10::make_intrusive<JoinedWork>(std::exchange(coalesced_, {}));
}

WorkPtr OwnBackend::remember(WorkPtr work) {
  std::lock_guard<std::mutex> lock(coalescing_mutex_);
  if (coalescing_) coalesced_.push_back(work);
  return work;
}

OwnBackend* as_own(c10d::Backend& backend) {
  // A cast takes as long as a tenth of a small collective, and a process has few types of backends.
  struct Answer {
    const std::type_info* type;
    bool is_own;
  };
  constinit thread_local Answer last{nullptr, false};
  const std::type_info* type = &typeid(backend);
  if (last.type != type) last = {type, dynamic_cast<OwnBackend*>(&backend) != nullptr};
  return last.is_own ? static_cast<OwnBackend*>(&backend) : nullptr;
}

void count_step(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  // Not the default backend: a group need not have one.
  for (const c10::Device& device : group->getDeviceTypes()) {
    OwnBackend* own = as_own(*group->getBackend(device.type()));
    watch_page::RankPage* page = own == nullptr ? nullptr : own->page();
    if (page == nullptr) continue;
    page->num_steps.fetch_add(1, std::memory_order_relaxed);
    return;
  }
}

Capabilities capabilities_of(c10d::Backend& backend) {
  const OwnBackend* own = as_own(backend);
  return own != nullptr ? own->capabilities() : Capabilities();
}

}  // namespace serried::detail
