// POSIX calls with errors that name the file.
#include "serried/checkpoint/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "serried/base/log.h"
#include "serried/base/text.h"
#include "serried/checkpoint/failure.h"

namespace serried::checkpoint::detail {
namespace {

// Larger calls are cut by the kernel anyway.
constexpr int64_t kMaxCall = int64_t(1) << 30;

constexpr int64_t kNanoseconds = 1'000'000'000;

const char* fix_for(int error, bool was_there) {
  switch (error) {
    case ENOSPC:
    case EDQUOT: return "free some space, or save to another disk; what was saved before is untouched";
    case EACCES:
    case EPERM:
    case EROFS: return "choose a folder that this user may write";
    case ENOENT:
      return was_there ? "check the path; somebody may have removed or renamed the folder meanwhile" : "check the path";
    case EMFILE: return "raise the number of files that a process may have open: ulimit -n";
    case ENFILE: return "close some: all processes of this machine together have too many open files";
    case EIO: return "the disk reports an error: use another one";
    default: return "check the path and the disk";
  }
}

int open_or_fail(const char* verb, const std::string& path, int flags, bool was_there) {
  check_no_nul(path);
  const int fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  if (fd < 0) fail_with_errno(verb, path, errno, was_there);
  return fd;
}

}  // namespace

void fail_with_errno(const char* verb, const std::string& path, int error, bool was_there) {
  throw Failure(Failure::Kind::system, "cannot " + std::string(verb) + " " + path + ": " + std::strerror(error),
                fix_for(error, was_there), error);
}

void check_no_nul(const std::string& path) {
  if (path.find('\0') == std::string::npos) return;
  fail("the path \"" + serried::detail::printable(path) + "\" has a NUL byte in it", "pass one without");
}

File File::open_to_read(const std::string& path, bool was_there) {
  File file(open_or_fail("open", path, O_RDONLY | O_NONBLOCK, was_there), path);  // a pipe must not make us wait
  struct stat status = {};
  if (::fstat(file.fd(), &status) == 0 && S_ISREG(status.st_mode)) return file;
  fail(path + " is no regular file", "pass one that is");
}

File File::open_to_write(const std::string& path) {
  return {open_or_fail("open", path, O_RDWR, true), path};
}

File File::create(const std::string& path) {
  return {open_or_fail("create", path, O_RDWR | O_CREAT | O_EXCL, true), path};
}

File File::open_folder(const std::string& path) {
  return {open_or_fail("open", path, O_RDONLY | O_DIRECTORY, false), path};
}

File::File(File&& other) noexcept : fd_(other.fd_), path_(std::move(other.path_)) {
  other.fd_ = -1;
}

File::~File() {
  if (fd_ >= 0) ::close(fd_);
}

int64_t File::size() const {
  struct stat status = {};
  if (::fstat(fd_, &status) != 0) fail_with_errno("ask for the size of", path_, errno);
  return int64_t(status.st_size);
}

File::Identity File::identity() const {
  struct stat status = {};
  if (::fstat(fd_, &status) != 0) fail_with_errno("ask for the size of", path_, errno);
  return {uint64_t(status.st_dev), uint64_t(status.st_ino),
          int64_t(status.st_mtim.tv_sec) * kNanoseconds + int64_t(status.st_mtim.tv_nsec), int64_t(status.st_size)};
}

void File::resize(int64_t size) const {
  if (::ftruncate(fd_, size) != 0) fail_with_errno("make room in", path_, errno);
}

void File::read(int64_t offset, void* data, int64_t size) const {
  auto* next = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t count = ::pread(fd_, next, size_t(std::min(size, kMaxCall)), offset);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) fail_with_errno("read", path_, errno);
    if (count == 0) {
      throw Failure(Failure::Kind::system,
                    path_ + " ends at byte " + std::to_string(offset) + ", " + std::to_string(size) + " bytes early",
                    "the file is cut short: use a whole copy");
    }
    next += count;
    offset += count;
    size -= count;
  }
}

void File::write(int64_t offset, const void* data, int64_t size) const {
  const auto* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t count = ::pwrite(fd_, next, size_t(std::min(size, kMaxCall)), offset);
    if (count < 0 && errno == EINTR) continue;
    // A disk that takes nothing and says nothing must not keep us here for ever.
    if (count <= 0) fail_with_errno("write", path_, count == 0 ? ENOSPC : errno);
    next += count;
    offset += count;
    size -= count;
  }
}

void File::start_writing(int64_t begin, int64_t end) const {
  ::sync_file_range(fd_, begin, end - begin, SYNC_FILE_RANGE_WRITE);
}

void File::sync() const {
  if (::fsync(fd_) != 0) fail_with_errno("write", path_, errno);
}

bool File::try_lock() const {
  return ::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

void File::lock() const {
  using Clock = std::chrono::steady_clock;
  const auto patience = Clock::now() + std::chrono::seconds(5);
  bool has_said = false;
  while (!try_lock()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    if (has_said || Clock::now() < patience) continue;
    log::warn_once("[checkpoint] waits for the lock of " + path_ + ", which another process holds");
    has_said = true;
  }
}

void write_file(const std::string& path, std::string_view content, std::optional<int64_t> time) {
  const File file = File::create(path);
  file.write(0, content.data(), int64_t(content.size()));
  if (time) {
    const timespec times[2] = {{0, UTIME_OMIT}, {*time / kNanoseconds, *time % kNanoseconds}};
    ::futimens(file.fd(), times);  // a hint; the file says it as well
  }
  file.sync();
}

std::string read_file(const std::string& path, int64_t max_bytes) {
  const File file = File::open_to_read(path);
  const int64_t size = file.size();
  if (size > max_bytes) {
    fail(path + " has " + std::to_string(size) + " bytes, and may have " + std::to_string(max_bytes),
         "the file is damaged: use a copy");
  }
  std::string content(size_t(size), '\0');
  file.read(0, content.data(), size);
  return content;
}

}  // namespace serried::checkpoint::detail
