// Values of ranks travel as LibTorch pickles them.
#include "serried/comm/collectives/objects.h"

#include "serried/base/error.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/checks.h"
#include "serried/tape/recorder.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/jit/serialization/pickle.h>

namespace serried::detail {
namespace {

/// What a rank hears is a value of this moment: a replay could only repeat it.
void check_not_recorded(const char* where) {
  if (!tape::is_replayed()) return;
  raise<c10::NotImplementedError>({where, "a captured function cannot hold values that ranks send each other",
                                   "call it outside of the captured function, or send a tensor"});
}

std::string bytes_of(const c10::IValue& value) {
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  return {bytes.begin(), bytes.end()};
}

c10::IValue value_of(const std::string& bytes) {
  return torch::jit::pickle_load({bytes.begin(), bytes.end()});
}

}  // namespace

c10::IValue pack_bytes(const void* data, size_t size) {
  at::Tensor bytes = at::empty({int64_t(size)}, at::kByte);
  if (size > 0) std::memcpy(bytes.mutable_data_ptr(), data, size);
  return bytes;
}

std::string_view unpack_bytes(const c10::IValue& packed) {
  if (!packed.isTensor() || packed.toTensor().scalar_type() != at::kByte || packed.toTensor().dim() != 1) {
    raise_other_type();
  }
  const at::Tensor& bytes = packed.toTensor();
  return {static_cast<const char*>(bytes.const_data_ptr()), size_t(bytes.numel())};
}

void raise_other_type() {
  raise<c10::ValueError>(
      {"object", "what arrives is of another type than the one asked for", "pass values of one type on all ranks"});
}

std::vector<c10::IValue> all_gather_packed(const PackMine& mine, const Group& group,
                                           std::optional<std::chrono::milliseconds> timeout) {
  check_group("all_gather_object", group);
  check_not_recorded("all_gather_object");
  std::vector<c10::IValue> values;
  for (const std::string& bytes : all_gather_bytes(bytes_of(mine()), group, timeout)) values.push_back(value_of(bytes));
  return values;
}

c10::IValue broadcast_packed(const PackMine& mine, const Group& group, const BroadcastOptions& options) {
  check_group("broadcast_object", group);
  check_rank("broadcast_object", "src", options.src, group);
  check_not_recorded("broadcast_object");
  return value_of(broadcast_bytes(group->getRank() == options.src ? bytes_of(mine()) : "", group, options));
}

}  // namespace serried::detail
