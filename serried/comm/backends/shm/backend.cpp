// The life of the backend, and its heap.
#include "serried/comm/backends/shm/backend.h"

#include <algorithm>

#include <ATen/ops/from_blob.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "serried/base/error.h"
#include "serried/comm/backends/shm/tensors.h"
#include "serried/comm/rendezvous/world_store.h"

namespace serried::shm {
namespace {

// How long a group that is dropped with open collectives waits for them.
constexpr std::chrono::seconds kFarewellPatience{5};

/// Whether a group of this name can be used: a later one, where names come again (torch.distributed counts from 0 each
/// time).
bool is_alive(const std::string& name) {
  try {
    return c10d::resolve_process_group(name) != nullptr;
  } catch (const c10::Error&) {
    return false;
  }
}

}  // namespace

ShmBackend::ShmBackend(const ConnectArgs& args)
    : OwnBackend(args.rank, args.world_size),
      args_(args),
      timeout_ms_(args.timeout.count()),
      driver_(make_shared_at_home<Driver>(args.connect(args))),
      heap_(std::make_shared<Heap>(driver_->engine().segment().heap_bytes())),
      mailbox_(make_shared_at_home<Mailbox>(std::shared_ptr<Runner>(driver_, &driver_->engine()))) {
  init();
}

ShmBackend::~ShmBackend() {
  if (!home_.is_here()) return;  // the parent goes on with the group
  try {
    close();
    if (!getGroupUid().empty() && !is_alive(getGroupUid())) c10d::unregister_process_group(getGroupUid());
  } catch (const std::exception&) {
    // Never registered, or already gone with the process's registry.
  }
}

void ShmBackend::close() {
  if (closed_.exchange(true)) return;
  const auto patience = std::min<std::chrono::milliseconds>(kFarewellPatience, timeout_or_default(c10d::kUnsetTimeout));
  driver_->close(patience);
  PhaseSync& sync = driver_->engine().sync();
  driver_->engine().leave();
  // Rank 0's store need not wait at exit for ranks that may be dead, noticed by a collective or not.
  if (sync.aborted() || sync.dead_peer() >= 0) detail::abandon(args_.store);
  mailbox_->close();
}

void ShmBackend::setGroupUid(const std::string& name) {
  OwnBackend::setGroupUid(name);
  // Ranks that are threads have their number behind an @.
  if (!name.empty() && driver_->engine().sync().is_first())
    driver_->engine().segment().header().page.set_group(name.substr(0, name.find('@')));
}

c10::intrusive_ptr<c10d::Backend::Options> ShmBackend::getBackendOptions() {
  return report_options(timeout_or_default(c10d::kUnsetTimeout));
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::split(const Store& store, const std::vector<int>& ranks,
                                                    const c10::intrusive_ptr<Options>& options) {
  const auto found = std::find(ranks.begin(), ranks.end(), rank_);
  if (found == ranks.end()) return nullptr;
  home_.require("split");
  ConnectArgs args = args_;
  args.store = store;
  args.rank = int(found - ranks.begin());
  args.world_size = int(ranks.size());
  if (options) args.timeout = options->timeout;
  return c10::make_intrusive<ShmBackend>(args);
}

c10::intrusive_ptr<c10d::Backend> ShmBackend::merge(const Store& store, const c10::intrusive_ptr<Options>& options,
                                                    const int& rank, const int& size) {
  home_.require("split");
  ConnectArgs args = args_;
  args.store = store;
  args.rank = rank;
  args.world_size = size;
  if (options) args.timeout = options->timeout;
  return c10::make_intrusive<ShmBackend>(args);
}

void ShmBackend::abort() {
  home_.require("abort");
  driver_->engine().abort(c10::str("rank ", rank_, " called abort()"));
  detail::abandon(args_.store);
}

void ShmBackend::shutdown() {
  home_.require("shutdown");
  close();
}

c10d::ErrorType ShmBackend::getError() {
  return driver_->engine().sync().aborted() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

std::chrono::milliseconds ShmBackend::timeout_or_default(std::chrono::milliseconds timeout) const {
  return timeout.count() >= 0 ? timeout : std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
}

at::Tensor ShmBackend::allocateTensor(long size, at::TensorOptions options) {
  home_.require("allocateTensor");
  const int64_t bytes = size * int64_t(options.dtype().itemsize());
  const int64_t offset = size < 0 ? -1 : heap_->allocate(bytes);
  if (offset < 0) {
    raise<c10::OutOfMemoryError>(
        {"allocateTensor",
         c10::str("no room for ", bytes, " bytes in the symmetric heap: ", heap_->bytes_in_use(), " of ",
                  driver_->engine().segment().heap_bytes(), " bytes are in use"),
         "raise SERRIED_SHM_HEAP_MB, or release tensors of this group"});
  }
  char* data = driver_->engine().segment().heap(rank_) + offset;
  return at::from_blob(
      data, {size}, [heap = heap_, driver = driver_, offset](void*) { heap->release(offset); }, options);
}

// Without the fix and the place of this rank: those who read it have their own.
void ShmBackend::fail(const std::string& what) {
  driver_->engine().abort(what);
}

}  // namespace serried::shm
