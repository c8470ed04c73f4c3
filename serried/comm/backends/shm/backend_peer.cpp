// Point to point.
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/comm/backends/shm/backend.h"
#include "serried/comm/backends/shm/tensors.h"
#include "serried/comm/collectives/own_tags.h"

namespace serried::shm {
namespace {

class TransferWork : public c10d::Work {
 public:
  TransferWork(int rank, c10d::OpType type, const detail::Profiled& profiled, std::shared_ptr<Transfer> transfer,
               std::weak_ptr<Mailbox> mailbox, at::Tensor tensor, at::Tensor dense, detail::SeenCall seen)
      : Work(rank, type, profiled.title(), profiled.inputs()),
        transfer_(std::move(transfer)),
        mailbox_(std::move(mailbox)),
        tensor_(std::move(tensor)),
        dense_(std::move(dense)),
        seen_(std::move(seen)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

  bool wait(std::chrono::milliseconds timeout) override {
    const detail::SeenWait waiting(seen_);
    const std::shared_ptr<Mailbox> mailbox = mailbox_.lock();
    if (mailbox) mailbox->wait(*transfer_, timeout == kNoTimeout ? transfer_->timeout : timeout);
    return Work::wait();
  }

  int sourceRank() const override { return transfer_->source; }
  std::vector<at::Tensor> result() override { return {tensor_}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  void finish_with(std::exception_ptr error) {
    if (!error && !dense_.is_same(tensor_) && transfer_->direction == Transfer::Direction::receive) {
      at::AutoDispatchBelowAutograd guard;
      tensor_.copy_(dense_);
    }
    seen_.end(error != nullptr);
    finish(error);
    if (error)
      future_->setError(error);
    else
      future_->markCompleted(c10::IValue(std::vector<at::Tensor>{tensor_}));
  }

 private:
  const std::shared_ptr<Transfer> transfer_;
  const std::weak_ptr<Mailbox> mailbox_;
  const at::Tensor tensor_;
  const at::Tensor dense_;  // tensor_ itself where that is contiguous
  const detail::SeenCall seen_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::string describe(Transfer::Direction direction, const at::Tensor& tensor, int peer, int tag) {
  const std::string other = peer < 0 ? std::string("any rank") : c10::str("rank ", peer);
  return c10::str(direction == Transfer::Direction::send ? "send " : "recv ", watch::describe_tensor(tensor),
                  direction == Transfer::Direction::send ? " to " : " from ", other, ", ", detail::tag_text(tag));
}

}  // namespace

WorkPtr ShmBackend::post(Transfer::Direction direction, const at::Tensor& tensor, int peer, int tag,
                         std::chrono::milliseconds timeout) {
  const bool sends = direction == Transfer::Direction::send;
  const char* where = sends ? "send" : "recv";
  const at::Tensor dense = readable(where, tensor);
  driver_->engine().sync().check_usable(where);
  auto transfer = std::make_shared<Transfer>();
  transfer->direction = direction;
  transfer->data = dense.numel() == 0 ? nullptr : static_cast<char*>(dense.mutable_data_ptr());
  transfer->bytes = int64_t(dense.nbytes());
  transfer->peer = peer;
  transfer->tag = tag;
  transfer->dtype = int(dense.scalar_type());
  transfer->timeout = timeout_or_default(timeout);
  transfer->what = describe(direction, tensor, peer, tag);
  const auto type = sends ? c10d::OpType::SEND : peer < 0 ? c10d::OpType::RECVANYSOURCE : c10d::OpType::RECV;
  const watch::Record record = watch::make_record(sends ? watch::Kind::send : watch::Kind::recv, tensor, peer);
  const detail::SeenCall seen = detail::see_call(*this, record);
  // As PyTorch's own backends call it.
  const char* event = type == c10d::OpType::RECVANYSOURCE ? "recvAnySource" : where;
  auto work = c10::make_intrusive<TransferWork>(rank_, type, detail::Profiled(args_.backend, event, tensor), transfer,
                                                mailbox_, tensor, dense, seen);
  // The work lives at least until the bytes have moved.
  transfer->finished = [work](std::exception_ptr error) { work->finish_with(error); };
  mailbox_->post(transfer);
  return remember(work);
}

WorkPtr ShmBackend::send(Tensors& tensors, int peer, int tag) {
  check_root("send", peer);
  if (nan_check() != watch::NanCheck::off) check_sent("send", readable("send", only("send", tensors)));
  return post(Transfer::Direction::send, only("send", tensors), peer, tag);
}

WorkPtr ShmBackend::recv(Tensors& tensors, int peer, int tag) {
  check_root("recv", peer);
  return post(Transfer::Direction::receive, only("recv", tensors), peer, tag);
}

WorkPtr ShmBackend::recvAnysource(Tensors& tensors, int tag) {
  return post(Transfer::Direction::receive, only("recv", tensors), -1, tag);
}

void ShmBackend::waitForPendingWorks() {
  home_.require("waitForPendingWorks");
  // Works are done in order: an empty turn comes after all of them.
  driver_->wait_for_issued();
}

}  // namespace serried::shm
