// Locks, renames and removals, each in the order in which a kill does no harm.
#include "serried/checkpoint/commit.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <vector>

#include "serried/base/log.h"
#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"
#include "serried/checkpoint/index.h"
#include "serried/checkpoint/load_names.h"

namespace serried::checkpoint::detail {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPartial = ".partial-";    // was never finished, or is being removed
constexpr std::string_view kReplaced = ".replaced-";  // whole; goes as soon as another one has its name
constexpr size_t kNonceLetters = 16;
constexpr const char* kLockName = "/.lock";

std::string marked(const std::string& target, std::string_view mark) {
  std::random_device random;
  char nonce[kNonceLetters + 1];
  std::snprintf(nonce, sizeof nonce, "%08x%08x", random(), random());
  return target + std::string(mark) + nonce;
}

// What `marked` was given; none for other names.
std::optional<std::string> unmarked(const std::string& name, std::string_view mark) {
  const size_t at = name.rfind(mark);
  if (at == std::string::npos || at == 0) return std::nullopt;
  const std::string nonce = name.substr(at + mark.size());
  const bool is_ours =
      nonce.size() == kNonceLetters && nonce.find_first_not_of("0123456789abcdef") == std::string::npos;
  return is_ours ? std::optional(name.substr(0, at)) : std::nullopt;
}

// Another job that saves beside this one may be removing it, too, which std::filesystem::remove_all is not made for: it
// gets what is more than a flat folder.
void remove_folder(const std::string& path) {
  std::error_code error;
  std::vector<std::string> files;
  for (fs::directory_iterator item(path, error), end; !error && item != end; item.increment(error)) {
    files.push_back(item->path().string());
  }
  for (const std::string& file : files) ::unlink(file.c_str());
  if (::rmdir(path.c_str()) == 0 || errno == ENOENT) return;
  fs::remove_all(path, error);
  if (error) log::warn_once(c10::str("[checkpoint] cannot remove ", path, ": ", error.message()));
}

// Whether a process that lives is writing into it: a file holds its own lock. What another user lets nobody read may be
// in use as well.
bool is_in_use(const std::string& partial) {
  std::error_code error;
  const std::string lock = fs::is_regular_file(partial, error) ? partial : partial + kLockName;
  if (::access(lock.c_str(), F_OK) != 0) return errno != ENOENT && errno != ENOTDIR;
  try {
    return !File::open_to_read(lock).try_lock();
  } catch (const Failure&) {
    return ::access(lock.c_str(), F_OK) == 0;
  }
}

// The next save beside it would take it for something that was never finished.
void check_name(const std::string& target) {
  const std::string name = fs::path(target).filename().string();
  if (!is_partial_name(name) && !name_before(name)) return;
  fail(c10::str("the name \"", name, "\" is one that saves give to what they leave behind when they are killed"),
       "choose a name without .partial- or .replaced- and 16 hex digits at its end");
}

void rename_or_fail(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_with_errno("rename a folder to", to, errno);
}

// One that was set aside and that no other has taken the place of is the only one of its name.
void put_back_or_remove(const std::string& path) {
  const std::optional<std::string> before = name_before(path);
  if (!before || has_index(*before)) return remove_folder(path);
  if (index_of(path) && ::rename(path.c_str(), before->c_str()) != 0) {
    log::warn_once(c10::str("[checkpoint] cannot put ", path,
                            " back, which a save that was killed has set aside: ", std::strerror(errno)));
  }
}

void check_nobody_saves(const std::string& target, const fs::path& partial) {
  const std::string name = fs::path(target).filename().string() + std::string(kPartial);
  if (!partial.filename().string().starts_with(name)) return;
  fail(
      c10::str("another job is saving to ", target, " now: it writes ", partial.string()),
      "save to another path, or wait for the other job; where it is another rank of this one, save together: inside of "
      "a ProcessGroupGuard, or with .process_group");
}

}  // namespace

std::string without_end_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string clean_path(const std::string& path) {
  check_no_nul(path);
  std::string clean = without_end_slashes(path);
  if (clean.empty() || clean == "/" || clean == "." || clean == ".." || clean.ends_with("/.") ||
      clean.ends_with("/..")) {
    fail(c10::str("the path \"", path, "\" names no folder of its own"), "pass one like \"ckpt/step100\"");
  }
  return clean;
}

std::string parent_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

bool is_partial_name(const std::string& name) {
  return unmarked(name, kPartial).has_value();
}

std::optional<std::string> name_before(const std::string& name) {
  return unmarked(name, kReplaced);
}

std::string place_of(const std::string& path) {
  check_no_nul(path);
  const std::string target = without_end_slashes(path);
  if (target.empty() || has_index(target)) return path;
  const std::string name = fs::path(target).filename().string();
  std::error_code error;
  for (fs::directory_iterator item(parent_of(target), error), end; !error && item != end; item.increment(error)) {
    if (name_before(item->path().filename().string()) == name && has_index(item->path().string())) {
      return item->path().string();
    }
  }
  if (error == std::errc::too_many_files_open) fail_with_errno("look into", parent_of(target), error.value());
  return path;
}

namespace {

// With the names of all that are made on the disk: a checkpoint in a folder that a crash forgets is lost with it.
void make_folders(const std::string& path) {
  std::vector<std::string> above;
  std::error_code error;
  for (std::string each = path; !fs::exists(each, error) && parent_of(each) != each; each = parent_of(each)) {
    above.push_back(parent_of(each));
  }
  fs::create_directories(path, error);
  if (error) fail_with_errno("make the folder", path, error.value());
  for (const std::string& folder : above) File::open_folder(folder).sync();
}

}  // namespace

PartialFolder::PartialFolder(const std::string& path)
    : target_(clean_path(path)), parent_(parent_of(target_)), partial_(marked(target_, kPartial)) {
  check_name(target_);
  make_folders(parent_);
  check_target();
  lock_and_make();
}

PartialFolder::~PartialFolder() {
  if (is_there_) remove_folder(partial_);
}

void PartialFolder::check_target() const {
  std::error_code error;
  if (fs::is_symlink(target_, error)) {
    fail(c10::str(target_, " is a symbolic link to ", fs::read_symlink(target_, error).string()),
         "save to what it leads to: a save replaces what is at the path, here the link");
  }
  const fs::file_status status = fs::status(target_, error);
  if (!fs::exists(status)) return;
  if (fs::is_directory(status) && fs::is_empty(target_, error)) return;
  const std::optional<Index> index = index_of(target_);
  if (!index) {
    fail(c10::str(target_, " is there and is no checkpoint"), "pass a path of its own: a save replaces what is there");
  }
  const std::vector<std::string> others = other_things_in(target_, *index);
  if (others.empty()) return;
  fail(c10::str(target_, " has more in it than its checkpoint: ", list_of_names(others)),
       "move it elsewhere, or save to another path: a save replaces the whole folder");
}

// Under a lock on the parent, for the moment that it takes: nobody sees a new folder before its lock is held.
void PartialFolder::lock_and_make() {
  const File parent = File::open_folder(parent_);
  parent.lock();
  std::vector<std::string> leftovers;
  for (const auto& item : fs::directory_iterator(parent_)) {
    const std::string name = item.path().filename().string();
    if (name_before(name)) leftovers.push_back(item.path().string());
    if (!is_partial_name(name)) continue;
    is_in_use(item.path().string()) ? check_nobody_saves(target_, item.path())
                                    : leftovers.push_back(item.path().string());
  }
  for (const std::string& path : leftovers) put_back_or_remove(path);
  if (::mkdir(partial_.c_str(), 0777) != 0) fail_with_errno("make the folder", partial_, errno);
  is_there_ = true;
  try {
    lock_.emplace(File::create(partial_ + kLockName));
    lock_->try_lock();
  } catch (const Failure&) {
    remove_folder(partial_);  // without a constructor that ends nothing is destroyed
    throw;
  }
}

void PartialFolder::commit() {
  bool replaces = false;
  {
    const File parent = File::open_folder(parent_);
    parent.lock();
    if (::unlink((partial_ + kLockName).c_str()) != 0) fail_with_errno("finish", partial_, errno);
    File::open_folder(partial_).sync();
    check_target();
    replaces = swap_in();
    is_there_ = false;  // under the partial name is the old one: it stays where the name of the new one may not
    parent.sync();
  }
  lock_.reset();
  // Under the partial name is the old one now.
  if (replaces) remove_folder(partial_);
}

bool PartialFolder::swap_in() {
  if (::access(target_.c_str(), F_OK) != 0) {
    rename_or_fail(partial_, target_);
    return false;
  }
  if (::renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, target_.c_str(), RENAME_EXCHANGE) == 0) return true;
  if (errno != EINVAL && errno != ENOSYS) fail_with_errno("rename a folder to", target_, errno);
  // A file system that cannot exchange two folders: for a moment there is none of that name.
  log::warn_once(c10::str("[checkpoint] the file system of ", parent_,
                          " cannot exchange two folders: a kill between two renames leaves the old checkpoint as ",
                          fs::path(target_).filename().string(), kReplaced,
                          "..., where a load finds it and whence the next save puts it back"));
  const std::string aside = marked(target_, kReplaced);
  rename_or_fail(target_, aside);
  if (::rename(partial_.c_str(), target_.c_str()) != 0) {
    const int error = errno;
    rename_or_fail(aside, target_);
    fail_with_errno("rename a folder to", target_, error);
  }
  partial_ = marked(target_, kPartial);  // a name of what is not whole any more
  if (::rename(aside.c_str(), partial_.c_str()) != 0) partial_ = aside;
  return true;
}

void check_replaces_file(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::symlink_status(path, error);
  if (!fs::exists(status) || fs::is_regular_file(status)) return;
  if (fs::is_symlink(status)) {
    fail(c10::str(path, " is a symbolic link to ", fs::read_symlink(path, error).string()),
         "save to what it leads to: a save replaces what is at the path, here the link");
  }
  fail(c10::str(path, " is there and is ", fs::is_directory(status) ? "a folder" : "no regular file"),
       "pass a path of its own: a save replaces what is there");
}

File create_partial_file(const std::string& path) {
  const std::string target = clean_path(path);
  check_name(target);
  check_replaces_file(target);
  const File parent = File::open_folder(parent_of(target));
  parent.lock();
  const std::string name = fs::path(target).filename().string();
  for (const auto& item : fs::directory_iterator(parent.path())) {
    const bool is_of_target = unmarked(item.path().filename().string(), kPartial) == name;
    if (is_of_target && item.is_regular_file() && !is_in_use(item.path().string())) ::unlink(item.path().c_str());
  }
  File file = File::create(marked(target, kPartial));
  file.try_lock();
  return file;
}

void remove_checkpoint(const std::string& path) {
  const std::string aside = marked(path, kPartial);
  rename_or_fail(path, aside);
  File::open_folder(parent_of(path)).sync();
  remove_folder(aside);
}

}  // namespace serried::checkpoint::detail
