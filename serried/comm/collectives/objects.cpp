// Values of ranks travel as LibTorch pickles them.
#include "serried/comm/collectives/objects.h"

#include "serried/base/error.h"
#include "serried/comm/collectives/checks.h"
#include "serried/tape/tape.h"

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

namespace serried::detail {
namespace {

/// What a rank hears is a value of this moment: a replay could only repeat it.
void check_not_recorded(const char* where) {
  if (!tape::is_recording()) return;
  raise<c10::NotImplementedError>({where, "a captured function cannot hold values that ranks send each other",
                                   "call it outside of the captured function, or send a tensor"});
}

at::TensorOptions options_of(const Group& group, at::ScalarType dtype) {
  return at::device(group->getDeviceTypes().front()).dtype(dtype);
}

at::Tensor bytes_of(const c10::IValue& value, const Group& group) {
  std::vector<char> bytes = torch::jit::pickle_save(value);
  return at::from_blob(bytes.data(), {int64_t(bytes.size())}, at::kByte).to(options_of(group, at::kByte), false, true);
}

c10::IValue value_of(const at::Tensor& bytes) {
  const at::Tensor host = bytes.cpu().contiguous();
  const char* data = static_cast<const char*>(host.const_data_ptr());
  return torch::jit::pickle_load(std::vector<char>(data, data + host.numel()));
}

}  // namespace

std::vector<c10::IValue> all_gather_packed(const c10::IValue& mine, const Group& group,
                                           std::optional<std::chrono::milliseconds> timeout) {
  check_group("all_gather_object", group);
  check_not_recorded("all_gather_object");
  const at::Tensor bytes = bytes_of(mine, group);
  const at::Tensor size = at::full({1}, bytes.numel(), options_of(group, at::kLong));
  const at::Tensor sizes = serried::all_gather(size, group, {.timeout = timeout}).cpu();
  const at::Tensor all = serried::all_gather(bytes, group, {.timeout = timeout});
  std::vector<c10::IValue> values;
  int64_t begin = 0;
  for (int rank = 0; rank < group->getSize(); ++rank) {
    const int64_t length = sizes[rank].item<int64_t>();
    values.push_back(value_of(all.narrow(0, begin, length)));
    begin += length;
  }
  return values;
}

c10::IValue broadcast_packed(const c10::IValue& mine, const Group& group, const BroadcastOptions& options) {
  check_group("broadcast_object", group);
  check_rank("broadcast_object", "src", options.src, group);
  check_not_recorded("broadcast_object");
  at::Tensor bytes;
  if (group->getRank() == options.src) bytes = bytes_of(mine, group);
  const at::Tensor size = at::full({1}, bytes.defined() ? bytes.numel() : 0, options_of(group, at::kLong));
  serried::broadcast_(size, group, options);
  if (!bytes.defined()) bytes = at::empty({size.item<int64_t>()}, options_of(group, at::kByte));
  serried::broadcast_(bytes, group, options);
  return value_of(bytes);
}

}  // namespace serried::detail
