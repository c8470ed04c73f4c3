// A folder that appears when it is complete: it is written under another name, and renamed.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "serried/checkpoint/files.h"

namespace serried::checkpoint::detail {

/// `path.partial-<16 hex digits>` until commit(). One rank makes it. Removed at the end where it was not committed; one
/// whose process was killed is removed by the next save into the same parent. The process that makes it holds a lock
/// inside, so that others tell it from such a one: Failure where another job is saving to the same path.
///
/// Where two folders cannot be exchanged, the older one is `path.replaced-<16 hex digits>` between two renames. A kill
/// then leaves it whole: `place_of` finds it, and the next save into the same parent puts it back.
class PartialFolder {
 public:
  /// Makes parents that do not exist. Failure where `path` is there and is no checkpoint, or has more in it than one.
  explicit PartialFolder(const std::string& path);
  ~PartialFolder();
  PartialFolder(const PartialFolder&) = delete;

  const std::string& path() const { return partial_; }

  /// Everything in it is on the disk. Takes the place of what is at the path, which is removed.
  void commit();

 private:
  void check_target() const;
  void lock_and_make();
  bool swap_in();

  const std::string target_;
  const std::string parent_;
  std::string partial_;
  std::optional<File> lock_;
  bool is_there_ = false;  // something of ours under the partial name
};

/// Failure where `path` is there and is no regular file.
void check_replaces_file(const std::string& path);

/// A new file beside `path`, to be renamed to it when it is whole. Failure as above. Until it is closed nobody takes it
/// for a leftover; those of writers that were killed are removed here.
File create_partial_file(const std::string& path);

std::string without_end_slashes(std::string path);

/// The same; Failure for an empty one and for a root.
std::string clean_path(const std::string& path);

/// The folder that holds it: "." where the path names none.
std::string parent_of(const std::string& path);

/// Removes a checkpoint: it is gone in one moment, its files later.
void remove_checkpoint(const std::string& path);

/// Whether `name` is that of a folder that was never finished.
bool is_partial_name(const std::string& name);

/// The name that a checkpoint had before a save set it aside; none for all other names.
std::optional<std::string> name_before(const std::string& name);

/// Where the checkpoint of this path is: there, or where a save that was killed has set it aside.
std::string place_of(const std::string& path);

}  // namespace serried::checkpoint::detail
