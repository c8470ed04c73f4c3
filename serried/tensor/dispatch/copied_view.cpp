// Finds out whether the tensor that a copied view was taken from has been written since.
#include "serried/tensor/dispatch/copied_view.h"

#include <c10/core/Storage.h>

#include <mutex>
#include <unordered_map>

#include "serried/base/error.h"

namespace serried::detail {

std::atomic<int64_t> num_watched{0};

// All watched memory of the process, by storage.
class WatchTable {
 public:
  static WatchTable& instance() {
    static auto* table = new WatchTable();  // never destroyed: views may live in static variables
    return *table;
  }

  void add(WatchedMemory& memory) {
    const std::lock_guard lock(mutex_);
    entries_.emplace(memory.storage_._unsafe_get_target(), &memory);
    ++num_watched;
  }

  void remove(WatchedMemory& memory) {
    const std::lock_guard lock(mutex_);
    auto [entry, end] = entries_.equal_range(memory.storage_._unsafe_get_target());
    while (entry != end && entry->second != &memory) ++entry;
    entries_.erase(entry);
    --num_watched;
  }

  void note_write(const at::Tensor& part) {
    const std::lock_guard lock(mutex_);
    auto [entry, end] = entries_.equal_range(part.storage().unsafeGetStorageImpl());
    for (; entry != end; ++entry) {
      if (entry->second->overlaps(part)) entry->second->written_ = true;
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_multimap<const c10::StorageImpl*, WatchedMemory*> entries_;
};

namespace {

int64_t first_byte(const at::Tensor& part) {
  return part.storage_offset() * int64_t(part.element_size());
}

int64_t last_byte(const at::Tensor& part) {
  int64_t elements = part.numel() == 0 ? 0 : 1;
  for (int64_t d = 0; d < part.dim() && elements > 0; ++d) elements += (part.size(d) - 1) * part.stride(d);
  return first_byte(part) + elements * int64_t(part.element_size());
}

// The text of "argument" for a message, with a blank behind it.
std::string quoted(std::string_view argument) {
  return argument.empty() ? "" : c10::str("\"", argument, "\" ");
}

}  // namespace

WatchedMemory::WatchedMemory(const at::Tensor& part)
    : storage_(part.storage().getWeakStorageImpl()), begin_(first_byte(part)), end_(last_byte(part)) {
  WatchTable::instance().add(*this);
}

WatchedMemory::~WatchedMemory() {
  WatchTable::instance().remove(*this);
}

// A rank with nothing of the tensor has to see the write that the others see.
bool WatchedMemory::overlaps(const at::Tensor& part) const {
  const int64_t begin = first_byte(part);
  const int64_t end = last_byte(part);
  return begin_ == end_ || begin == end || (begin < end_ && begin_ < end);
}

SeenVersion::SeenVersion(const c10::TensorImpl& impl)
    : counter(impl.version_counter()), then(counter.enabled() ? counter.current_version() : 0) {}

bool SeenVersion::has_changed() const {
  return counter.enabled() && counter.current_version() != then;
}

CopiedFrom::CopiedFrom(const c10::TensorImpl& impl, const DTensorMeta& meta)
    : base(meta.spec),
      before(meta.copied_from),
      version(impl),
      part_version(*meta.local.unsafeGetTensorImpl()),
      memory(meta.local) {}

bool CopiedFrom::has_changed() const {
  if (stands_alone) return false;
  return version.has_changed() || part_version.has_changed() || memory.was_written() ||
         (before != nullptr && before->has_changed());
}

CopiedFromPtr copied_from(const c10::TensorImpl& base) {
  return std::make_shared<const CopiedFrom>(base, *dtensor_meta(&base));
}

void raise_if_stale(std::string_view where, std::string_view argument, const DTensorMeta& meta) {
  if (!meta.copied_from->has_changed()) return;
  raise<c10::ValueError>(
      {where,
       c10::str(quoted(argument), meta.spec->to_string(), " is a view across a cut dim of ",
                meta.copied_from->base->to_string(), ": its data was gathered, and that tensor was written since"),
       "take the view again after the write, or redistribute the tensor so that the viewed dim is "
       "whole"});
}

void raise_if_copied(std::string_view where, std::string_view argument, const DTensorMeta& meta) {
  // Nobody can see the base any more: a gradient that autograd formed with a view and goes on adding to.
  if (meta.copied_from->memory.is_gone() || meta.copied_from->stands_alone) {
    meta.copied_from->stands_alone = true;
    return;
  }
  raise<c10::ValueError>({where,
                          c10::str(quoted(argument), meta.spec->to_string(),
                                   " is a view across a cut dim: its data was gathered, so writing to it would not "
                                   "reach the tensor it is a view of"),
                          "write to the tensor itself, or redistribute it so that the viewed dim is whole"});
}

void note_write_slowly(const DTensorMeta& meta) {
  if (meta.local.has_storage()) WatchTable::instance().note_write(meta.local);
}

}  // namespace serried::detail
