// Compares and broadcasts through the group's own collectives.
#include "serried/parallel/ddp/verify.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include <algorithm>
#include <functional>

#include "serried/base/error.h"
#include "serried/comm/collectives.h"

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

at::Tensor as_bytes(const std::string& text) {
  at::Tensor bytes = at::empty({int64_t(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.data_ptr<uint8_t>());
  return bytes;
}

// All ranks' texts; sizes differ.
std::vector<std::string> gather_texts(const std::string& text, const at::Tensor& sizes, const Group& group) {
  const at::Tensor all = all_gather(as_bytes(text), group);
  std::vector<std::string> texts;
  int64_t begin = 0;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const int64_t size = sizes.data_ptr<int64_t>()[rank * 2];
    const auto* data = reinterpret_cast<const char*>(all.data_ptr<uint8_t>()) + begin;
    texts.emplace_back(data, size_t(size));
    begin += size;
  }
  return texts;
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
  at::Tensor mine = at::empty({2}, at::kLong);
  mine.data_ptr<int64_t>()[0] = int64_t(text.size());
  mine.data_ptr<int64_t>()[1] = int64_t(std::hash<std::string>()(text));
  const at::Tensor all = all_gather(mine, group);
  const auto* values = all.data_ptr<int64_t>();
  bool same = true;
  for (int i = 2; i < 2 * group->getSize(); ++i) same &= values[i] == values[i % 2];
  if (same) return;
  const std::vector<std::string> texts = gather_texts(text, all, group);
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
