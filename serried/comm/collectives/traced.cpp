// What the trace says about a collective.
#include "serried/comm/collectives/traced.h"

#include <cstring>

#include "serried/base/error.h"

namespace serried::detail {
namespace {

// Without the mark of a rank that is a thread: the same on all ranks.
std::string group_name(const c10d::Backend& backend) {
  const std::string& name = backend.getGroupUid();
  return name.empty() ? "without a name" : name.substr(0, name.find('@'));
}

// "all_reduce", "all_reduce: DDP bucket 0"
std::string name_of(const watch::Record& record) {
  const std::string kind = watch::kind_name(record.kind);
  const std::string part_of(record.part_of.data(), ::strnlen(record.part_of.data(), record.part_of.size()));
  return part_of.empty() ? kind : kind + ": " + part_of;
}

}  // namespace

TracedCall::TracedCall(const c10d::Backend& backend, const watch::Record& record)
    : name_(name_of(record)), group_(group_name(backend)), sequence_(record.sequence) {
  slice_.name = name_;
  slice_.category = trace::kCommunication;
  slice_.begin_ns = trace::now_ns();
  slice_.rank = rank_label().rank;
  slice_.track = "group " + group_;
  slice_.notes = trace::Details::now();
  slice_.notes.emplace_back("group_size", int64_t(backend.getSize()));
  const bool has_peer = record.kind == watch::Kind::send || record.kind == watch::Kind::recv;
  if (record.root >= 0) slice_.notes.emplace_back(has_peer ? "peer" : "root", int64_t(record.root));
  if (record.dtype < 0) return;
  const auto dtype = at::ScalarType(record.dtype);
  slice_.notes.emplace_back("bytes", record.num_elements * int64_t(c10::elementSize(dtype)));
  slice_.notes.emplace_back("dtype", watch::dtype_name(dtype));
}

std::vector<trace::Note> TracedCall::identity() const {
  std::vector<trace::Note> notes{{"group", group_}};
  const uint64_t sequence = sequence_.load(std::memory_order_relaxed);
  if (sequence != 0) notes.emplace_back("sequence", int64_t(sequence));
  return notes;
}

void TracedCall::end(bool failed) {
  slice_.end_ns = trace::now_ns();
  for (trace::Note& note : identity()) slice_.notes.push_back(std::move(note));
  if (failed) slice_.notes.emplace_back("failed", int64_t(1));
  trace::add(std::move(slice_));
}

void SeenWait::trace_end() const {
  trace::add({.name = "wait for " + call_.traced_->name_,
              .category = trace::kWait,
              .begin_ns = begin_ns_,
              .end_ns = trace::now_ns(),
              .notes = call_.traced_->identity()});
}

}  // namespace serried::detail
