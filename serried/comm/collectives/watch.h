// What each rank is doing: one record per collective, and the sentences made of them when ranks disagree or one is
// missing.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "serried/base/call_kind.h"

namespace c10d {
class ProcessGroup;
}

namespace serried::watch {

using Kind = CallKind;

/// Whose call it is, as far as captured functions matter.
enum class Captured : uint8_t {
  no,
  records,  // of a captured function that is recorded
  replays,  // of the graph of one
};

/// One collective as one rank called it. Plain bytes: it lives in memory that ranks share.
struct Record {
  static constexpr int kMaxDims = 5;

  uint64_t sequence = 0;  // the how-many-th collective of its group, from 1
  Kind kind = Kind::none;
  int8_t dtype = -1;      // at::ScalarType; -1: no tensor
  uint8_t reduce_op = 0;  // RedOpType, for reductions
  uint8_t num_dims = 0;   // above kMaxDims: only the first are kept
  int32_t root = -1;      // or the peer of send and recv
  int64_t num_elements = 0;
  std::array<int64_t, kMaxDims> sizes{};
  std::array<char, 24> part_of{};  // what the user called, cut to fit: "item()"; empty: this call
  uint32_t sizes_of_all = 0;       // hash_sizes of what all ranks hold, as this one knows it; 0: it knows nothing of it
  Captured captured = Captured::no;
  uint8_t same_size = 0;  // the number of elements must agree, though the kind lets sizes differ
  uint16_t unused = 0;    // so that all bytes mean something
};

/// While it lives, the collectives that this thread calls are parts of `name`, and messages say so. The outermost
/// counts.
///     const watch::PartOf scope("item()");
class PartOf {
 public:
  explicit PartOf(std::string_view name);
  ~PartOf();
  PartOf(const PartOf&) = delete;
  PartOf& operator=(const PartOf&) = delete;

 private:
  bool is_outermost_;
};

/// While it lives, this thread replays the graph of a captured function, and messages say so.
class Replaying {
 public:
  Replaying();
  ~Replaying();
  Replaying(const Replaying&) = delete;
  Replaying& operator=(const Replaying&) = delete;

 private:
  bool was_;
};

/// While it lives, records that this thread makes have these `sizes_of_all`.
class SizesOfAll {
 public:
  explicit SizesOfAll(uint32_t sizes_of_all);
  ~SizesOfAll();
  SizesOfAll(const SizesOfAll&) = delete;
  SizesOfAll& operator=(const SizesOfAll&) = delete;

 private:
  uint32_t before_;
};

/// A hash of sizes on which all ranks of a call count, never 0. Where ranks count on different ones, as graphs of
/// captured functions may, they find out before anything is sent.
uint32_t hash_sizes(std::initializer_list<c10::IntArrayRef> lists);

/// The record of `kind` on `tensor`; an undefined tensor gives one without dtype and shape.
Record make_record(Kind kind, const at::Tensor& tensor, int root = -1,
                   c10d::ReduceOp::RedOpType op = c10d::ReduceOp::UNUSED);

/// A hash of all that must agree across ranks, never 0. Kinds whose sizes may differ (all_gather of pieces,
/// all_to_all, gather, scatter) leave the shape out.
uint64_t fingerprint(const Record& record);

/// Whether records with different fingerprints are of one call all the same: a rank that made it by c10d knows nothing
/// of the sizes of all.
bool differ_in_knowledge(const Record& record, const Record& other_record);

/// "#183 all_reduce f32[512,4] sum", "#7 broadcast i64[3] from rank 0", "#9 barrier"; "nothing yet" for Kind::none.
std::string describe(const Record& record);

/// Where a rank is, behind "in": what the user called, if that is more, and describe(record); or the rendezvous where
/// it has made no call.
std::string describe_place(const Record& record);

/// "all_reduce"
const char* kind_name(Kind kind);

/// "f32", "bf16", "i64", "c64", "bool": how dtypes read in every message.
std::string dtype_name(at::ScalarType dtype);

/// "f32[512,4]"
std::string describe_tensor(const at::Tensor& tensor);

/// Which rank disagrees with which: the sentence of a mismatch, naming both ranks and both calls, lower rank first.
/// `before` is the call before, on which they agreed, where it is known: a rank that makes it again is behind.
///     ranks called different collectives: rank 0 item(): #5 all_reduce f32[] sum, rank 2 #5 all_reduce f32[5] sum;
///     rank 2 repeats #4: it may be one call behind since #5
std::string mismatch_text(int rank, const Record& record, int other, const Record& other_record,
                          const Record& before = {});

/// What to do about it, by what differs: what graphs count on, the kind, the root, the dtype, the op or the shape.
std::string mismatch_fix(const Record& record, const Record& other_record);

/// Who is missing: `last` holds each rank's newest record.
///     timed out after 5000 ms in #183 all_reduce f32[512] sum: rank 3 is at #182 all_reduce f32[512] sum, the others
///     at #183
std::string missing_text(const Record& waiting, int64_t waited_ms, const std::vector<Record>& last);

/// What to do about it.
inline constexpr const char* kMissingFix =
    "find out what the missing ranks are doing, or pass a longer timeout if they are only slow";

/// What a group does about NaN in what a rank sends: nothing, one warning per text, or a ValueError before it is sent.
enum class NanCheck : uint8_t { off, warn, raise };

/// Changes what `group` does from its next call on; SERRIED_NAN_CHECK=off|warn|throw is where groups start.
/// Only this rank's sends are checked; NotImplementedError on a backend that is not ours.
///     watch::set_nan_check(world, watch::NanCheck::raise);
void set_nan_check(const c10::intrusive_ptr<c10d::ProcessGroup>& group, NanCheck mode);

}  // namespace serried::watch
