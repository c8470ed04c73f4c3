// Compares and broadcasts through the group's own collectives.
#include "serried/parallel/ddp/verify.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "serried/base/error.h"
#include "serried/comm/agree/rank_texts.h"

namespace serried::detail {
namespace {

constexpr size_t kBroadcastBytes = size_t(250) << 20;

// One line per parameter, the same text where they agree.
std::string describe(const std::vector<ManagedParameter>& parameters) {
  std::string lines;
  for (const ManagedParameter& p : parameters) {
    lines += c10::str(p.name, " ", p.tensor.sizes(), " strides ", p.tensor.strides(), " ",
                      c10::toString(p.tensor.scalar_type()), p.sparse_gradient ? " with sparse gradients" : "", "\n");
  }
  return lines;
}

std::string shown(const std::optional<std::string>& line, size_t count) {
  return line ? *line : c10::str("nothing (it has ", count, " parameters)");
}

}  // namespace

void verify_same_parameters(const std::vector<ManagedParameter>& parameters, const Group& group) {
  const auto found = first_difference(describe(parameters), group);
  if (!found) return;
  raise<c10::ValueError>({"DistributedDataParallel",
                          c10::str("the ranks wrap different models: parameter ", found->line,
                                   " is\n    on rank 0: ", shown(found->first, found->first_count), "\n    on rank ",
                                   found->rank, ": ", shown(found->other, found->other_count)),
                          "build the same module on every rank"});
}

std::vector<at::Tensor> module_state(const torch::nn::Module& module, const std::set<std::string>& ignored) {
  std::vector<at::Tensor> state;
  const auto add = [&](const torch::OrderedDict<std::string, at::Tensor>& items) {
    for (const auto& item : items) {
      if (item.value().defined() && ignored.count(item.key()) == 0) state.push_back(item.value());
    }
  };
  add(module.named_parameters());
  add(module.named_buffers());
  return state;
}

void broadcast_tensors(const std::vector<at::Tensor>& tensors, const Group& group, int source) {
  if (tensors.empty() || group->getSize() == 1) return;
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> data;
  for (const at::Tensor& tensor : tensors) data.push_back(tensor.detach());
  // A buffer that a pending backward has saved must not look changed: GANs run two forwards before one backward.
  at::AutoDispatchBelowADInplaceOrView no_version_bump;
  c10d::broadcast_coalesced(group, data, kBroadcastBytes, source);
}

}  // namespace serried::detail
