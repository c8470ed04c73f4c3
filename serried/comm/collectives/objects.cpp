// Values of ranks travel as LibTorch pickles them.
#include "serried/comm/collectives/objects.h"

#include "serried/base/error.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/checks.h"
#include "serried/comm/collectives/watch.h"
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

std::string bytes_of(const Parcel& mine) {
  const std::vector<char> bytes = torch::jit::pickle_save(c10::ivalue::Tuple::create(mine.type, mine.pack()));
  return {bytes.begin(), bytes.end()};
}

// A number would be taken for one of another type, and cut to fit.
c10::IValue value_of(const char* where, const std::string& bytes, int64_t from, const std::string& type) {
  const c10::IValue parcel = torch::jit::pickle_load({bytes.begin(), bytes.end()});
  const auto& fields = parcel.toTupleRef().elements();
  const std::string& sent = fields[0].toStringRef();
  if (sent == type) return fields[1];
  raise<c10::ValueError>(
      {where, c10::str("rank ", from, " passes ", sent, ", this rank ", type), "pass values of one type on all ranks"});
}

}  // namespace

c10::IValue pack_bytes(const void* data, size_t size) {
  at::Tensor bytes = at::empty({int64_t(size)}, at::kByte);
  if (size > 0) std::memcpy(bytes.mutable_data_ptr(), data, size);
  return bytes;
}

std::string_view unpack_bytes(const c10::IValue& packed) {
  const at::Tensor& bytes = packed.toTensor();
  return {static_cast<const char*>(bytes.const_data_ptr()), size_t(bytes.numel())};
}

std::vector<c10::IValue> all_gather_packed(const Parcel& mine, const Group& group,
                                           std::optional<std::chrono::milliseconds> timeout) {
  constexpr const char* kWhere = "all_gather_object";
  check_group(kWhere, group);
  check_not_recorded(kWhere);
  const watch::PartOf scope(kWhere);
  std::vector<c10::IValue> values;
  for (const std::string& bytes : all_gather_bytes(bytes_of(mine), group, timeout)) {
    values.push_back(value_of(kWhere, bytes, int64_t(values.size()), mine.type));
  }
  return values;
}

c10::IValue broadcast_packed(const Parcel& mine, const Group& group, const BroadcastOptions& options) {
  constexpr const char* kWhere = "broadcast_object";
  check_group(kWhere, group);
  check_rank(kWhere, "src", options.src, group);
  check_not_recorded(kWhere);
  const watch::PartOf scope(kWhere);
  const std::string bytes = broadcast_bytes(group->getRank() == options.src ? bytes_of(mine) : "", group, options);
  return value_of(kWhere, bytes, options.src, mine.type);
}

}  // namespace serried::detail
