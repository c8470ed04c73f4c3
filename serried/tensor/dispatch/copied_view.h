// A view that had to be a copy remembers what it was taken from: nobody may use it once that has changed.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>

#include <atomic>
#include <memory>
#include <string_view>

#include "serried/tensor/meta.h"

namespace serried::detail {

/// Counts what ops on DTensors write to the memory of one part while it is watched: what versions do not see, writes
/// through .data() and to inference tensors.
class WatchedMemory {
 public:
  explicit WatchedMemory(const at::Tensor& part);
  ~WatchedMemory();
  WatchedMemory(const WatchedMemory&) = delete;
  WatchedMemory& operator=(const WatchedMemory&) = delete;

  bool is_gone() const { return storage_.expired(); }
  bool was_written() const { return written_.load(std::memory_order_relaxed); }

 private:
  friend class WatchTable;
  bool overlaps(const at::Tensor& part) const;

  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;  // while it is held no other storage has this address
  int64_t begin_;
  int64_t end_;  // in bytes
  std::atomic<bool> written_{false};
};

/// A version counter as it was.
struct SeenVersion {
  explicit SeenVersion(const c10::TensorImpl& impl);
  bool has_changed() const;

  c10::VariableVersion counter;  // disabled for an inference tensor
  uint32_t then;
};

/// Made when a view gathers. Views that alias the copy share it.
struct CopiedFrom {
  CopiedFrom(const c10::TensorImpl& impl, const DTensorMeta& meta);
  bool has_changed() const;

  const SpecPtr base;
  const CopiedFromPtr before;      // the base's own, where that is a copied view itself
  const SeenVersion version;       // of the base
  const SeenVersion part_version;  // of its part, which plain code may write
  const WatchedMemory memory;
  /// Written itself, after the base had gone: from then on an ordinary tensor.
  mutable std::atomic<bool> stands_alone{false};
};
/// What a view that gathered `base`, a DTensor, has to remember.
CopiedFromPtr copied_from(const c10::TensorImpl& base);

/// Raises where `meta` is of a copied view whose base was written since. `argument` may be empty.
void raise_if_stale(std::string_view where, std::string_view argument, const DTensorMeta& meta);
inline void check_fresh(std::string_view where, std::string_view argument, const DTensorMeta& meta) {
  if (C10_UNLIKELY(meta.copied_from != nullptr)) raise_if_stale(where, argument, meta);
}

/// Raises where a write would reach a copy only.
void raise_if_copied(std::string_view where, std::string_view argument, const DTensorMeta& meta);

/// Says that the part of `meta` is about to be written.
void note_write_slowly(const DTensorMeta& meta);
extern std::atomic<int64_t> num_watched;
inline void note_write(const DTensorMeta& meta) {
  if (C10_UNLIKELY(num_watched.load(std::memory_order_relaxed) != 0)) note_write_slowly(meta);
}

/// Both, before an op writes to a DTensor.
inline void begin_write(std::string_view where, std::string_view argument, const DTensorMeta& meta) {
  if (C10_UNLIKELY(meta.copied_from != nullptr)) raise_if_copied(where, argument, meta);
  note_write(meta);
}

}  // namespace serried::detail
