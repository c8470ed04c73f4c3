// A call as messages show it, without LibTorch: the same words as watch::describe, which a test compares.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <string>

#include "serried/base/call_kind.h"
#include "serried/base/text.h"
#include "serried/base/watch_page.h"

namespace serried::watch_page {

struct Dtype {
  const char* name;
  int64_t bytes;
};

/// By the number that LibTorch has for it; a nameless one of 0 bytes where it is not known here.
inline Dtype dtype_of(int number) {
  static constexpr std::array<Dtype, 30> kDtypes{{
      {"u8", 1},
      {"i8", 1},
      {"i16", 2},
      {"i32", 4},
      {"i64", 8},
      {"f16", 2},
      {"f32", 4},
      {"f64", 8},
      {"c32", 4},
      {"c64", 8},
      {"c128", 16},
      {"bool", 1},
      {"QInt8", 1},
      {"QUInt8", 1},
      {"QInt32", 4},
      {"bf16", 2},
      {"QUInt4x2", 1},
      {"QUInt2x4", 1},
      {"Bits1x8", 1},
      {"Bits2x4", 1},
      {"Bits4x2", 1},
      {"Bits8", 1},
      {"Bits16", 2},
      {"Float8_e5m2", 1},
      {"Float8_e4m3fn", 1},
      {"Float8_e5m2fnuz", 1},
      {"Float8_e4m3fnuz", 1},
      {"u16", 2},
      {"u32", 4},
      {"u64", 8},
  }};
  return number >= 0 && size_t(number) < kDtypes.size() ? kDtypes[size_t(number)] : Dtype{"?", 0};
}

inline std::string kind_text(uint8_t kind) {
  static constexpr const char* kNames[] = {"nothing",    "all_reduce", "reduce",  "reduce_scatter",
                                           "all_gather", "gather",     "scatter", "broadcast",
                                           "all_to_all", "barrier",    "send",    "recv"};
  return kind < std::size(kNames) ? kNames[kind] : "call of kind " + std::to_string(kind);
}

/// Of the elements that this rank counts; -1 where that is not known.
inline int64_t bytes_of(const Call& call) {
  const int64_t each = dtype_of(call.dtype).bytes;
  constexpr int64_t kMost = int64_t(1) << 58;
  return each == 0 || call.num_elements < 0 || call.num_elements > kMost / each ? -1 : call.num_elements * each;
}

/// "f32[512,4]"
inline std::string shape_text(const Call& call) {
  const int kept = std::min<int>(call.num_dims, Call::kMaxDims);
  std::string text = std::string(dtype_of(call.dtype).name) + "[";
  uint64_t product = 1;
  for (int i = 0; i < kept; ++i) {
    text += (i == 0 ? "" : ",") + std::to_string(call.sizes[i]);
    product *= uint64_t(call.sizes[i]);
  }
  text += kept < call.num_dims ? ",...]" : "]";
  if (kept == call.num_dims && product != uint64_t(call.num_elements)) {
    text += " of " + std::to_string(call.num_elements) + " elements in all";
  }
  return text;
}

/// "#183 all_reduce f32[512,4] sum", "#7 broadcast i64[3] from rank 0"; "nothing yet".
inline std::string call_text(const Call& call) {
  static constexpr const char* kOps[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  const auto kind = CallKind(call.kind);
  if (kind == CallKind::none) return "nothing yet";
  std::string text = call.sequence == 0 ? "" : "#" + std::to_string(call.sequence) + " ";
  text += kind_text(call.kind);
  if (call.dtype >= 0) text += " " + shape_text(call);
  const bool reduces = kind == CallKind::all_reduce || kind == CallKind::reduce || kind == CallKind::reduce_scatter;
  if (reduces && call.reduce_op < std::size(kOps)) text += std::string(" ") + kOps[call.reduce_op];
  if (kind == CallKind::recv && call.root < 0) return text + " from any rank";
  if (call.root < 0) return text;
  const bool outward = kind == CallKind::send || kind == CallKind::reduce || kind == CallKind::gather;
  return text + (outward ? " to rank " : " from rank ") + std::to_string(call.root);
}

/// What the user called, where that is another thing: "item()"; "" where it is not.
inline std::string part_of_text(const Call& call) {
  const char* end = std::find(std::begin(call.part_of), std::end(call.part_of), '\0');
  return detail::printable({call.part_of, size_t(end - call.part_of)});
}

/// "shm/ab12cd34/1:split:2.0" as "shm/1:split:2.0": the middle is the same for all groups of a job.
inline std::string group_text(const std::string& name) {
  const size_t first = name.find('/');
  const size_t second = first == std::string::npos ? first : name.find('/', first + 1);
  return second == std::string::npos ? name : name.substr(0, first) + name.substr(second);
}

/// What has to be the same on all ranks, of kinds whose sizes may differ between them without these.
inline std::string agreed_text(const Call& call) {
  const auto kind = CallKind(call.kind);
  const bool sizes_may_differ = kind == CallKind::all_gather || kind == CallKind::all_to_all ||
                                kind == CallKind::gather || kind == CallKind::scatter;
  if (!sizes_may_differ) return call_text(call);
  Call bare = call;
  bare.num_dims = 0;
  bare.num_elements = 1;
  return call_text(bare);
}

}  // namespace serried::watch_page
