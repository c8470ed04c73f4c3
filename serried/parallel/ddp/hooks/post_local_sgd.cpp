// Gradients averaged by all ranks first, and from some iteration on by few or none.
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/agree/host.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/parallel/ddp/hooks/hooks.h"
#include "serried/parallel/ddp/hooks/chain_queue.h"
#include "serried/parallel/ddp/hooks/steps.h"
#include "serried/tape/tape.h"

namespace serried::hooks {
namespace {

// The ranks of `group` on this rank's host; `group` itself if that is all of them. Every rank of it calls.
Group ranks_of_this_host(const Group& group) {
  const auto store = group->getStore();
  const int64_t call = store->add(c10::str("serried/post_local_sgd/calls_of/", group->getRank()), 1);
  const std::vector<std::string> hosts =
      serried::detail::exchange({store, group->getRank(), group->getSize(), default_timeout()}, "post_local_sgd",
                                c10::str("serried/post_local_sgd/", call, "/host"), serried::detail::host_identity());
  std::map<std::string, std::vector<int>> ranks_of;
  for (int rank = 0; rank < group->getSize(); ++rank) ranks_of[hosts[rank]].push_back(rank);
  if (ranks_of.size() == 1) return group;
  std::vector<std::vector<int>> parts;
  for (auto& [_, ranks] : ranks_of) parts.push_back(std::move(ranks));
  return split_group(group, parts);
}

std::string phase_of_local_sgd(uint64_t phase) {
  if (phase == detail::Iterations::kBefore) return "by all ranks";
  return phase == detail::Iterations::kFromThere ? "local" : "by all ranks, then local";
}

class PostLocalSGD : public std::enable_shared_from_this<PostLocalSGD> {
 public:
  explicit PostLocalSGD(PostLocalSGDOptions options) : options_(std::move(options)), subgroup_(options_.subgroup) {}

  HookFuture operator()(const Group& group, c10d::GradBucket& bucket) {
    if (tape::is_recording()) rely_on_phase(bucket.isLast());
    const int64_t iteration = iterations_.before(group, bucket);
    const at::Tensor& buffer = bucket.getBuffer();
    if (iteration < options_.start_iter) return detail::average(group, buffer);
    if (!options_.post_local_gradient_allreduce) return detail::ready(buffer);
    return detail::average(subgroup_of(group), buffer);
  }

 private:
  void rely_on_phase(bool is_last_bucket) {
    const auto state = weak_from_this();
    const auto phase = [state]() -> uint64_t {
      const auto alive = state.lock();
      return alive ? alive->iterations_.phase(alive->options_.start_iter) : UINT64_MAX;
    };
    tape::rely_on({.name = "averaging of post_local_sgd", .value = phase, .subject = this, .text = phase_of_local_sgd});
    if (!is_last_bucket) return;
    tape::after_replay([state] {
      if (const auto alive = state.lock()) alive->iterations_.next();
    });
  }

  const Group& subgroup_of(const Group& group) {
    if (options_.subgroup || parent_.is(group)) return subgroup_;
    parent_ = detail::KnownGroup(group);
    subgroup_ = ranks_of_this_host(group);
    log::line(log::Topic::comm, "post_local_sgd: gradients are now averaged by ", subgroup_->getSize(), " of ",
              group->getSize(), " ranks");
    return subgroup_;
  }

  const PostLocalSGDOptions options_;
  detail::Iterations iterations_;
  detail::KnownGroup parent_;
  Group subgroup_;
};

}  // namespace

CommHook post_local_sgd(PostLocalSGDOptions options) {
  if (options.start_iter < 0) {
    raise<c10::ValueError>({"post_local_sgd", c10::str("start_iter is ", options.start_iter),
                            "pass the number of iterations before local SGD: 0 or more"});
  }
  const auto state = std::make_shared<PostLocalSGD>(std::move(options));
  return CommHook("post_local_sgd",
                  [state](const Group& group, c10d::GradBucket& bucket) { return (*state)(group, bucket); });
}

}  // namespace serried::hooks
