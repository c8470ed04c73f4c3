// A list, how far the running pass has come in it, and how often it was right.
#include "serried/parallel/fsdp/order.h"

#include <algorithm>

namespace serried::detail {
namespace {

// Of a pass that never ends: forwards whose graphs nobody walks back.
constexpr size_t kLongestPass = 1 << 14;
constexpr int kMostNeeded = 64;

}  // namespace

void Order::change() {
  if (is_trusted()) num_needed_ = std::min(2 * num_needed_, kMostNeeded);
  num_equal_ = 0;
  noted_.resize(at_);
}

void Order::note(int64_t block, bool begins_anew) {
  const bool is_expected = at_ < noted_.size() && noted_[at_] == block;
  if (!is_expected && begins_anew && at_ > 0 && noted_.front() == block) end_pass();
  if (at_ < noted_.size() && noted_[at_] == block) {
    ++at_;
    return;
  }
  if (at_ >= kLongestPass) at_ = 0;
  if (!noted_.empty()) change();
  noted_.push_back(block);
  ++at_;
}

void Order::end_pass(bool completed) {
  if (at_ == 0) return;
  if (completed && at_ < noted_.size()) change();
  if (completed) ++num_equal_;
  at_ = 0;
}

c10::ArrayRef<int64_t> Order::expected() const {
  if (!is_trusted()) return {};
  return c10::ArrayRef<int64_t>(noted_).slice(at_);
}

}  // namespace serried::detail
