// The protocol between ranks that have input and ranks that have none.
#include "serried/parallel/join.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <map>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/collectives/collectives.h"

namespace serried {
namespace detail {
namespace {

constexpr int64_t kMostSkew = 1000;

// An active rank sends which joinable speaks and its message, above zero. A joined rank sends how many announcements
// it has followed, negated: when all have joined, the one that followed none was the last.
int64_t encode(size_t joinable, int64_t message) {
  return ((int64_t(joinable) << 31) | message) + 1;
}
size_t joinable_of(int64_t code) {
  return size_t((code - 1) >> 31);
}
int64_t message_of(int64_t code) {
  return (code - 1) & ((int64_t(1) << 31) - 1);
}

std::vector<int> active_ranks(const std::vector<int64_t>& codes) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < codes.size(); ++rank) {
    if (codes[rank] > 0) ranks.push_back(int(rank));
  }
  return ranks;
}

int last_joiner(const std::vector<int64_t>& codes) {
  // From the back: the highest rank of several.
  const auto last = std::max_element(codes.rbegin(), codes.rend());
  return int(codes.rend() - last) - 1;
}

void check_agreement(const std::vector<int64_t>& codes, const std::vector<int>& active) {
  const auto describe = [&](int rank) {
    return c10::str("rank ", rank, " announces message ", message_of(codes[rank]), " of joinable ",
                    joinable_of(codes[rank]));
  };
  for (int rank : active) {
    if (codes[rank] == codes[active[0]]) continue;
    raise<c10::ValueError>(
        {"join", "the ranks do different things: " + describe(active[0]) + ", " + describe(rank),
         "make the same calls in the same order in each iteration, no_sync() included; only their number may differ"});
  }
}

}  // namespace

/// One call of join on one rank.
class JoinScope {
 public:
  JoinScope(std::vector<Joinable*> joinables, const JoinOptions& options)
      : joinables_(std::move(joinables)), options_(options), group_(joinables_[0]->join_group()) {}
  JoinScope(const JoinScope&) = delete;
  ~JoinScope() {
    for (size_t i = 0; i < num_attached_; ++i) {
      joinables_[i]->scope_ = nullptr;
      joinables_[i]->join_ends();
    }
  }

  void attach() {
    for (Joinable* joinable : joinables_) {
      if (joinable->scope_ != nullptr) {
        raise<c10::ValueError>({"join", c10::str("joinable ", num_attached_, " is in a join already"),
                                "name each object once, and do not nest calls of join"});
      }
      joinable->join_begins(options_);
      joinable->scope_ = this;
      ++num_attached_;
    }
  }

  std::optional<JoinNotice> announce(const Joinable* joinable, int64_t message) {
    if (shadows_) return std::nullopt;
    const size_t index = size_t(std::find(joinables_.begin(), joinables_.end(), joinable) - joinables_.begin());
    const std::vector<int64_t> codes = exchange(encode(index, message));
    JoinNotice notice{message, active_ranks(codes)};
    check_agreement(codes, notice.active_ranks);
    if (options_.throw_on_early_termination && int(notice.active_ranks.size()) < group_->getSize()) {
      raise_early(codes);
    }
    return notice;
  }

  void follow_the_others() {
    shadows_ = true;
    for (;;) {
      const std::vector<int64_t> codes = exchange(-num_followed_);
      const std::vector<int> active = active_ranks(codes);
      if (active.empty()) return finish(last_joiner(codes));
      check_agreement(codes, active);
      if (options_.throw_on_early_termination) raise_early(codes);
      const int64_t code = codes[active[0]];
      warn_about_skew(code);
      joinables_[joinable_of(code)]->main_hook({message_of(code), active});
      ++num_followed_;
    }
  }

 private:
  std::vector<int64_t> exchange(int64_t code) const {
    at::NoGradGuard no_grad;
    const auto options = at::TensorOptions(at::kLong).device(joinables_[0]->join_device());
    const at::Tensor all = at::empty({group_->getSize()}, options);
    all_gather_into(all, at::full({1}, code, options), group_);
    const at::Tensor here = all.cpu();
    return {here.data_ptr<int64_t>(), here.data_ptr<int64_t>() + here.numel()};
  }

  void finish(int last) {
    for (Joinable* joinable : joinables_) joinable->post_hook(last);
  }

  void warn_about_skew(int64_t code) {
    // An iteration may take several announcements, each of them once.
    if (++times_announced_[code] != kMostSkew + 1) return;
    log::warn_once(c10::str("[join] rank ", group_->getRank(), " has been without input for ", kMostSkew,
                            " iterations of the others; fix: spread the input more evenly over the ranks"));
  }

  [[noreturn]] void raise_early(const std::vector<int64_t>& codes) const {
    std::vector<int> joined;
    for (size_t rank = 0; rank < codes.size(); ++rank) {
      if (codes[rank] <= 0) joined.push_back(int(rank));
    }
    raise<c10::Error>({"join",
                       c10::str("no more input on rank ", c10::Join(", ", joined), ", while ",
                                codes.size() - joined.size(), " of ", codes.size(), " ranks have some"),
                       "stop training here on every rank, or leave out throw_on_early_termination"});
  }

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  Group group_;
  size_t num_attached_ = 0;
  bool shadows_ = false;
  int64_t num_followed_ = 0;
  std::map<int64_t, int64_t> times_announced_;
};

}  // namespace detail

namespace {

void check_joinables(const std::vector<Joinable*>& joinables) {
  if (joinables.empty()) {
    raise<c10::ValueError>({"join", "the list of joinables is empty", "pass what communicates: join({&ddp}, ...)"});
  }
  for (size_t i = 0; i < joinables.size(); ++i) {
    if (joinables[i] == nullptr) {
      raise<c10::ValueError>({"join", c10::str("joinable ", i, " is null"), "pass the address of an object"});
    }
    if (joinables[i]->join_group() == joinables[0]->join_group()) continue;
    raise<c10::ValueError>({"join", c10::str("joinables 0 and ", i, " have different groups"),
                            "make them on one group: joined ranks follow one sequence of collectives"});
  }
}

}  // namespace

std::optional<JoinNotice> Joinable::notify_join(int64_t message) {
  if (scope_ == nullptr) return std::nullopt;
  return scope_->announce(this, message);
}

void join(std::vector<Joinable*> joinables, const std::function<void()>& body, JoinOptions options) {
  check_joinables(joinables);
  if (!options.enable) return body();
  detail::JoinScope scope(std::move(joinables), options);
  scope.attach();
  body();
  scope.follow_the_others();
}

}  // namespace serried
