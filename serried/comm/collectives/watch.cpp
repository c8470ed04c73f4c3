// Records of collectives, their fingerprints, and the sentences made of them.
#include "serried/comm/collectives/watch.h"

#include <algorithm>
#include <map>
#include <utility>

#include <c10/util/StringUtil.h>

#include "serried/base/hash.h"
#include "serried/comm/agree/rank_texts.h"
#include "serried/comm/collectives/unknown_place.h"
#include "serried/tape/recorder.h"

namespace serried::watch {

const char* kind_name(Kind kind) {
  switch (kind) {
    case Kind::none: return "none";
    case Kind::all_reduce: return "all_reduce";
    case Kind::reduce: return "reduce";
    case Kind::reduce_scatter: return "reduce_scatter";
    case Kind::all_gather: return "all_gather";
    case Kind::gather: return "gather";
    case Kind::scatter: return "scatter";
    case Kind::broadcast: return "broadcast";
    case Kind::all_to_all: return "all_to_all";
    case Kind::barrier: return "barrier";
    case Kind::send: return "send";
    case Kind::recv: return "recv";
  }
  return "?";
}

namespace {

const char* op_name(uint8_t op) {
  static constexpr const char* kNames[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return op < std::size(kNames) ? kNames[op] : nullptr;
}

bool sizes_may_differ(Kind kind) {
  return kind == Kind::all_gather || kind == Kind::all_to_all || kind == Kind::gather || kind == Kind::scatter;
}

std::string describe_shape(const Record& record) {
  const int kept = std::min<int>(record.num_dims, Record::kMaxDims);
  std::string text = dtype_name(at::ScalarType(record.dtype)) + "[";
  uint64_t product = 1;  // may wrap: a record that came through a store holds any sizes
  for (int i = 0; i < kept; ++i) {
    text += c10::str(i == 0 ? "" : ",", record.sizes[i]);
    product *= uint64_t(record.sizes[i]);
  }
  text += kept < record.num_dims ? ",...]" : "]";
  // A call over several tensors keeps the shape of the first and the count of all.
  if (kept == record.num_dims && product != uint64_t(record.num_elements)) {
    text += c10::str(" of ", record.num_elements, " elements in all");
  }
  return text;
}

// Ranks that stand at the same call, most behind first.
using Places = std::map<std::pair<uint64_t, std::string>, std::vector<int>>;

std::string describe_places(const Places& places) {
  constexpr size_t kMostPlaces = 8;  // a message stays readable at any world size
  std::string text;
  size_t told = 0;
  for (const auto& [place, ranks] : places) {
    if (told == kMostPlaces) return text + c10::str(", and ", places.size() - told, " more places");
    text += told++ == 0 ? "" : ", ";
    const bool one = ranks.size() == 1;
    text += detail::rank_list(ranks);
    if (place.first == 0) {
      text += one ? " has not made any call" : " have not made any call";
    } else {
      text += (one ? " is at " : " are at ") + place.second;
    }
  }
  return text;
}

std::string waiting_head(const Record& waiting, int64_t waited_ms) {
  return c10::str("timed out after ", waited_ms, " ms in ", describe_place(waiting), ": ");
}

thread_local decltype(Record::part_of) part_of_now{};
constinit thread_local bool is_replaying = false;
constinit thread_local uint32_t sizes_of_all_now = 0;

Captured captured_now() {
  if (is_replaying) return Captured::replays;
  return tape::is_replayed() ? Captured::records : Captured::no;
}

const char* doing_text(Captured captured) {
  switch (captured) {
    case Captured::records: return "records a captured function";
    case Captured::replays: return "replays a captured function";
    default: return "is in no captured function";
  }
}

// "; rank 0 records a captured function, rank 1 replays a captured function"
std::string captured_text(int rank, const Record& record, int other, const Record& other_record) {
  if (record.captured == Captured::no && other_record.captured == Captured::no) return "";
  return c10::str("; rank ", rank, " ", doing_text(record.captured), ", rank ", other, " ",
                  doing_text(other_record.captured));
}

// Both may read the same: what differs is what they know of the others.
std::string sizes_text(const Record& record, const Record& other_record) {
  const bool both_know = record.sizes_of_all != 0 && other_record.sizes_of_all != 0;
  const bool alike = record.kind == other_record.kind && record.dtype == other_record.dtype;
  if (!both_know || !alike || record.sizes_of_all == other_record.sizes_of_all) return "";
  return "; they count on different sizes of all ranks";
}

uint64_t fingerprint_without_sizes(Record record) {
  record.sizes_of_all = 0;
  return fingerprint(record);
}

// A record may have come through a store: only what can be printed is.
std::string whole_name(const Record& record) {
  std::string text;
  for (const char letter : record.part_of) {
    if (letter >= ' ' && letter <= '~') text += letter;
  }
  return text;
}

std::string whole_call(const Record& record) {
  const std::string text = whole_name(record);
  return text.empty() ? describe(record) : text + ": " + describe(record);
}

bool repeats(const Record& record, const Record& before) {
  return before.kind != Kind::none && before.sequence + 1 == record.sequence &&
         fingerprint(before) == fingerprint(record) && before.part_of == record.part_of;
}

std::string behind_text(int rank, const Record& record, const Record& before) {
  if (!repeats(record, before)) return "";
  return c10::str("; rank ", rank, " repeats #", before.sequence, ": it may be one call behind since #",
                  record.sequence);
}

// Ranks of other hosts, which tell one that is missing itself.
std::string unknown_text(const std::vector<int>& ranks) {
  if (ranks.empty()) return "";
  return c10::str("; where ", detail::rank_list(ranks), ranks.size() == 1 ? " is" : " are", " is not known here");
}

std::string describe_rest(const Record& waiting, const std::vector<int>& rest, bool any_ahead, size_t num_ranks) {
  if (rest.empty()) return "";
  if (rest.size() == num_ranks) return "every rank has made this call, but not every rank has finished it";
  const std::string who = rest.size() == 1 ? detail::rank_list(rest) : "the others";
  return c10::str(", ", who, " at #", waiting.sequence, any_ahead ? " or later" : "");
}

}  // namespace

PartOf::PartOf(std::string_view name) : is_outermost_(part_of_now.front() == '\0') {
  if (is_outermost_) std::copy_n(name.begin(), std::min(name.size(), part_of_now.size()), part_of_now.begin());
}

PartOf::~PartOf() {
  if (is_outermost_) part_of_now = {};
}

Replaying::Replaying() : was_(std::exchange(is_replaying, true)) {}

Replaying::~Replaying() {
  is_replaying = was_;
}

SizesOfAll::SizesOfAll(uint32_t sizes_of_all) : before_(std::exchange(sizes_of_all_now, sizes_of_all)) {}

SizesOfAll::~SizesOfAll() {
  sizes_of_all_now = before_;
}

uint32_t hash_sizes(std::initializer_list<c10::IntArrayRef> lists) {
  uint64_t hash = 0x452821e638d01377ull;
  for (const c10::IntArrayRef list : lists) {
    hash = mix_hash(hash, list.size());
    for (const int64_t size : list) hash = mix_hash(hash, uint64_t(size));
  }
  const auto folded = uint32_t(hash ^ (hash >> 32));
  return folded == 0 ? 1 : folded;
}

Record make_record(Kind kind, const at::Tensor& tensor, int root, c10d::ReduceOp::RedOpType op) {
  Record record;
  record.kind = kind;
  record.root = root;
  record.reduce_op = uint8_t(op);
  record.part_of = part_of_now;
  record.captured = captured_now();
  record.sizes_of_all = sizes_of_all_now;
  if (!tensor.defined()) return record;
  const at::IntArrayRef sizes = tensor.sizes();
  record.dtype = int8_t(tensor.scalar_type());
  record.num_dims = uint8_t(std::min<size_t>(sizes.size(), 255));
  record.num_elements = tensor.numel();
  std::copy_n(sizes.begin(), std::min<size_t>(sizes.size(), Record::kMaxDims), record.sizes.begin());
  return record;
}

uint64_t fingerprint(const Record& record) {
  const bool shapeless = sizes_may_differ(record.kind);
  const uint64_t head = uint64_t(record.kind) | (uint64_t(uint8_t(record.dtype)) << 8) |
                        (uint64_t(record.reduce_op) << 16) | (uint64_t(shapeless ? 0 : record.num_dims) << 24) |
                        (uint64_t(uint32_t(record.root)) << 32);
  uint64_t hash = mix_hash(0x243f6a8885a308d3ull, head);
  if (record.sizes_of_all != 0) hash = mix_hash(hash, record.sizes_of_all);
  if (shapeless && record.same_size != 0) hash = mix_hash(hash, uint64_t(record.num_elements));
  if (!shapeless) {
    hash = mix_hash(hash, uint64_t(record.num_elements));
    for (int i = 0; i < std::min<int>(record.num_dims, Record::kMaxDims); ++i) {
      hash = mix_hash(hash, uint64_t(record.sizes[i]));
    }
  }
  return hash == 0 ? 1 : hash;
}

bool differ_in_knowledge(const Record& record, const Record& other_record) {
  if ((record.sizes_of_all == 0) == (other_record.sizes_of_all == 0)) return false;
  return fingerprint_without_sizes(record) == fingerprint_without_sizes(other_record);
}

std::string describe(const Record& record) {
  if (record.kind == Kind::none) return "nothing yet";
  std::string text = record.sequence == 0 ? "" : c10::str("#", record.sequence, " ");
  text += kind_name(record.kind);
  if (record.dtype >= 0) text.append(" ").append(describe_shape(record));
  const bool reduces =
      record.kind == Kind::all_reduce || record.kind == Kind::reduce || record.kind == Kind::reduce_scatter;
  if (const char* op = op_name(record.reduce_op); reduces && op != nullptr) text += c10::str(" ", op);
  if (record.kind == Kind::recv && record.root < 0) return text + " from any rank";
  if (record.root < 0) return text;
  const bool outward = record.kind == Kind::send || record.kind == Kind::reduce || record.kind == Kind::gather;
  return text + (outward ? " to rank " : " from rank ") + std::to_string(record.root);
}

std::string describe_place(const Record& record) {
  if (record.kind == Kind::none) return "the rendezvous of the group, before its first collective";
  return whole_call(record);
}

std::string dtype_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte: return "u8";
    case at::kChar: return "i8";
    case at::kShort: return "i16";
    case at::kInt: return "i32";
    case at::kLong: return "i64";
    case at::kUInt16: return "u16";
    case at::kUInt32: return "u32";
    case at::kUInt64: return "u64";
    case at::kHalf: return "f16";
    case at::kBFloat16: return "bf16";
    case at::kFloat: return "f32";
    case at::kDouble: return "f64";
    case at::kComplexHalf: return "c32";
    case at::kComplexFloat: return "c64";
    case at::kComplexDouble: return "c128";
    case at::kBool: return "bool";
    default: return c10::toString(dtype);
  }
}

std::string describe_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  std::string text = dtype_name(tensor.scalar_type()) + "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) text += c10::str(i == 0 ? "" : ",", tensor.size(i));
  return text + "]";
}

std::string mismatch_text(int rank, const Record& record, int other, const Record& other_record, const Record& before) {
  // The lower rank comes first, so that every rank raises the same text.
  if (other < rank) return mismatch_text(other, other_record, rank, record, before);
  return c10::str("ranks called different collectives: rank ", rank, " ", whole_call(record), ", rank ", other, " ",
                  whole_call(other_record), sizes_text(record, other_record),
                  captured_text(rank, record, other, other_record), behind_text(rank, record, before),
                  behind_text(other, other_record, before));
}

std::string mismatch_fix(const Record& record, const Record& other_record) {
  const bool is_captured = record.captured != Captured::no || other_record.captured != Captured::no;
  if (is_captured && record.sizes_of_all != other_record.sizes_of_all) {
    return "change the shapes that a captured function is called with on all ranks at once: its graph counts on what "
           "the other ranks hold, and a rank sees only its own; or leave such calls (gather, scatter, all_gather, "
           "all_to_all) outside of it";
  }
  if (record.kind != other_record.kind) return "make every rank call the same collectives in the same order";
  if (record.part_of != other_record.part_of) {
    return "make every rank call the same functions in the same order: " +
           (whole_name(record).empty() ? whole_name(other_record) : whole_name(record)) +
           " is called by all ranks or none";
  }
  if (record.root != other_record.root) return "pass the same root on every rank";
  if (record.dtype != other_record.dtype) return "pass tensors of the same dtype on every rank";
  if (record.reduce_op != other_record.reduce_op) return "pass the same reduce op on every rank";
  return "pass tensors of the same shape on every rank, or look for a call that only some ranks make";
}

std::string missing_text(const Record& waiting, int64_t waited_ms, const std::vector<Record>& last) {
  const std::string head = waiting_head(waiting, waited_ms);
  if (last.empty()) return head + "where the other ranks are is not known";
  const bool point_to_point = waiting.kind == Kind::send || waiting.kind == Kind::recv;
  Places places;
  std::vector<int> rest, unknown;
  bool any_ahead = false;
  for (int rank = 0; rank < int(last.size()); ++rank) {
    const Record& newest = last[rank];
    if (newest.sequence == kUnknownPlace) {
      unknown.push_back(rank);
      continue;
    }
    const bool asked = point_to_point && (waiting.root < 0 || waiting.root == rank);
    if (asked || (!point_to_point && newest.sequence < waiting.sequence)) {
      places[{newest.sequence, describe(newest)}].push_back(rank);
      continue;
    }
    rest.push_back(rank);
    any_ahead = any_ahead || newest.sequence > waiting.sequence;
  }
  if (point_to_point) return head + describe_places(places);
  return head + describe_places(places) + describe_rest(waiting, rest, any_ahead, last.size()) + unknown_text(unknown);
}

}  // namespace serried::watch
