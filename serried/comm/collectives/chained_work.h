// A Work with something left to do once it is done.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <mutex>
#include <string>

#include "serried/base/error.h"

namespace serried::detail {

struct ChainedWorkOptions {
  std::string where = "";                          // errors that are not LibTorch's own are told as those of this call
  std::string backend = "";                        // on this backend
  std::chrono::milliseconds timeout = kNoTimeout;  // of a wait that names none
};

/// Whoever waits first, or the thread that completes the future, does what is left.
class ChainedWork final : public c10d::Work {
 public:
  explicit ChainedWork(c10::intrusive_ptr<c10d::Work> inner, std::function<void()> after = nullptr,
                       ChainedWorkOptions options = {})
      : inner_(std::move(inner)), after_(std::move(after)), options_(std::move(options)) {}

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  uint64_t getSequencenumber() const override { return inner_->getSequencenumber(); }
  void synchronize() override { wait(); }
  void abort() override { inner_->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  void do_what_is_left();

  const c10::intrusive_ptr<c10d::Work> inner_;
  std::mutex mutex_;
  std::function<void()> after_;
  const ChainedWorkOptions options_;
};

/// What `call` gives; an error that is not LibTorch's own becomes a DistBackendError of the call `where` on `backend`.
template <class Call>
auto in_our_words(const std::string& where, const std::string& backend, Call call) -> decltype(call()) {
  std::string text;
  try {
    return call();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    text = error.what();
  }
  raise<c10::DistBackendError>(
      {where, backend + ": " + text,
       "see what the other ranks report; if one is only slow, make the group with a longer {.timeout}"});
}

}  // namespace serried::detail
