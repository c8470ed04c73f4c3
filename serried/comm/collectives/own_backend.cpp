// The NaN check as a hook, and calls that are waited for together.
#include "serried/comm/collectives/own_backend.h"

#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>

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
    } catch (const c10::ValueError& error) {
      fail(find_nan(tensor, rank_), error);
      throw;
    }
  }
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
  return dynamic_cast<OwnBackend*>(&backend);
}

Capabilities capabilities_of(c10d::Backend& backend) {
  const OwnBackend* own = as_own(backend);
  return own != nullptr ? own->capabilities() : Capabilities();
}

}  // namespace serried::detail
