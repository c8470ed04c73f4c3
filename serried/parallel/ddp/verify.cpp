// Compares and broadcasts through the group's own collectives.
#include "serried/parallel/ddp/verify.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>

#include "serried/base/error.h"
#include "serried/parallel/detail/rank_texts.h"

namespace serried::detail {
namespace {

constexpr size_t kBroadcastBytes = size_t(250) << 20;

// One line per parameter, the same text where they agree.
std::vector<std::string> describe(const std::vector<ManagedParameter>& parameters) {
  std::vector<std::string> lines;
  for (const ManagedParameter& p : parameters) {
    lines.push_back(c10::str(p.name, " ", p.tensor.sizes(), " strides ", p.tensor.strides(), " ",
                             c10::toString(p.tensor.scalar_type()), p.sparse_gradient ? " with sparse gradients" : ""));
  }
  return lines;
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

[[noreturn]] void raise_different(const std::vector<std::string>& first, const std::vector<std::string>& other,
                                  int other_rank) {
  size_t i = 0;
  while (i < std::min(first.size(), other.size()) && first[i] == other[i]) ++i;
  const auto line = [&](const std::vector<std::string>& lines) {
    return i < lines.size() ? lines[i] : c10::str("nothing (it has ", lines.size(), " parameters)");
  };
  raise<c10::ValueError>({"DistributedDataParallel",
                          c10::str("the ranks wrap different models: parameter ", i, " is\n    on rank 0: ",
                                   line(first), "\n    on rank ", other_rank, ": ", line(other)),
                          "build the same module on every rank"});
}

}  // namespace

void verify_same_parameters(const std::vector<ManagedParameter>& parameters, const Group& group) {
  std::string text;
  for (const std::string& line : describe(parameters)) text += line + "\n";
  const std::vector<std::string> texts = all_gather_bytes(text, group);
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    if (texts[rank] != texts[0]) raise_different(split_lines(texts[0]), split_lines(texts[rank]), int(rank));
  }
}

std::vector<std::pair<std::string, at::Tensor>> module_state(const torch::nn::Module& module,
                                                             const std::set<std::string>& ignored) {
  std::vector<std::pair<std::string, at::Tensor>> state;
  const auto add = [&](const torch::OrderedDict<std::string, at::Tensor>& items) {
    for (const auto& item : items) {
      if (item.value().defined() && ignored.count(item.key()) == 0) state.emplace_back(item.key(), item.value());
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
