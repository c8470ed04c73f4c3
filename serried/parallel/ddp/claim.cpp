// A registry of live wrappers by parameter; only wrappers that share one look at each other again, in backward.
#include "serried/parallel/ddp/claim.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "serried/base/error.h"
#include "serried/tensor/making/backward_end.h"
#include "serried/parallel/ddp/ddp.h"

namespace serried::detail {
namespace {

constexpr const char* kWrap = "DistributedDataParallel";

}  // namespace

struct Claim::Holder {
  RankLabel label = rank_label();
  Group group = {};
  bool changes_dtype = false;
  bool in_backward = false;
  std::atomic<bool> shares = false;
  std::vector<std::pair<std::weak_ptr<Holder>, std::string>> others = {};  // with the name of a common parameter
};

struct Claim::Registry {
  std::mutex mutex;  // guards all holders, too
  std::unordered_map<const void*, std::vector<std::shared_ptr<Holder>>> holders;
};

Claim::Registry& Claim::registry() {
  static Registry registry;
  return registry;
}

void Claim::check(const Holder& other, const std::string& name) const {
  if (other.label.rank >= 0 && self_->label.rank >= 0 && other.label.rank != self_->label.rank) {
    raise<c10::ValueError>({kWrap,
                            c10::str(name, " belongs to the module that rank ", other.label.rank, " has wrapped"),
                            "make a module on each rank: ranks that are threads of one process cannot share one"});
  }
  if (!other.changes_dtype && !self_->changes_dtype) return;
  raise<c10::ValueError>({kWrap,
                          c10::str(name,
                                   " is in another wrapper, and mixed_precision.param_dtype changes its dtype "
                                   "during forward and backward"),
                          "drop the first wrapper before making the second, or call its remove_hooks()"});
}

Claim::Claim(const std::vector<ManagedParameter>& parameters, const Group& group, bool changes_dtype)
    : self_(std::make_shared<Holder>()) {
  self_->group = group;
  self_->changes_dtype = changes_dtype;
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::unordered_map<std::shared_ptr<Holder>, std::string> sharing;
  for (const ManagedParameter& parameter : parameters) {
    const auto found = all.holders.find(parameter.tensor.unsafeGetTensorImpl());
    if (found == all.holders.end()) continue;
    for (const auto& holder : found->second) {
      check(*holder, parameter.name);
      sharing.emplace(holder, parameter.name);
    }
  }
  for (const auto& [holder, name] : sharing) {
    self_->others.emplace_back(holder, name);
    holder->others.emplace_back(self_, name);
    holder->shares = self_->shares = true;
  }
  for (const ManagedParameter& parameter : parameters) {
    tensors_.push_back(parameter.tensor.unsafeGetTensorImpl());
    all.holders[tensors_.back()].push_back(self_);
  }
}

Claim::~Claim() {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  for (const void* tensor : tensors_) {
    auto& holders = all.holders[tensor];
    std::erase(holders, self_);
    if (holders.empty()) all.holders.erase(tensor);
  }
}

void Claim::begin_backward() {
  if (!self_->shares) return;
  std::lock_guard<std::mutex> lock(registry().mutex);
  if (self_->in_backward) return;
  for (const auto& [weak, name] : self_->others) {
    const auto other = weak.lock();
    if (!other || !other->in_backward) continue;
    raise<c10::ValueError>({"backward",
                            c10::str("goes through two DistributedDataParallel that share ", name,
                                     ", whose gradient would be averaged twice"),
                            "call one wrapper in each backward: wrap the outermost module, once"});
  }
  self_->in_backward = true;
  when_backward_ends([self = self_](bool /*completed*/) {
    std::lock_guard<std::mutex> lock(registry().mutex);
    self->in_backward = false;
  });
}

bool is_claimed(const at::Tensor& parameter) {
  Claim::Registry& all = Claim::registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  return all.holders.count(parameter.unsafeGetTensorImpl()) != 0;
}

std::vector<Group> claiming_groups(const at::Tensor& parameter) {
  Claim::Registry& all = Claim::registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<Group> groups;
  const auto found = all.holders.find(parameter.unsafeGetTensorImpl());
  if (found == all.holders.end()) return groups;
  for (const auto& holder : found->second) groups.push_back(holder->group);
  return groups;
}

void check_no_wrapper_inside(const torch::nn::Module& module, const std::vector<ManagedParameter>& parameters) {
  std::unordered_map<const void*, const std::string*> names;
  for (const ManagedParameter& parameter : parameters) {
    names.emplace(parameter.tensor.unsafeGetTensorImpl(), &parameter.name);
  }
  for (const auto& part : module.modules(/*include_self=*/true)) {
    const auto* wrapper = dynamic_cast<const DataParallelBase*>(part.get());
    if (wrapper == nullptr) continue;
    for (const at::Tensor& tensor : wrapper->data_parallel_parameters()) {
      const auto found = names.find(tensor.unsafeGetTensorImpl());
      if (found == names.end()) continue;
      raise<c10::ValueError>(
          {kWrap,
           c10::str("the module contains a DistributedDataParallel, so ", *found->second, " would be averaged twice"),
           "wrap the outermost module, once; or name the parameters of the inner one in .ignore"});
    }
  }
}

}  // namespace serried::detail
