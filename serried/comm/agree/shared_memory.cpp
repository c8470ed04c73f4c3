// memfds with seals. A peer's is first looked at by a handle that opens nothing, then opened through that handle.
#include "serried/comm/agree/shared_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <tuple>
#include <utility>

#include <c10/util/StringUtil.h>

namespace serried::detail {
namespace {

// With these no peer can cut the file under a mapping, which would end the process by SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

// -1 with errno set where that fails.
int make_sealed_file(const char* name, int64_t bytes) {
  const int fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  if (::ftruncate(fd, bytes) == 0 && ::fcntl(fd, F_ADD_SEALS, kSeals) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

// What is wrong with what the handle stands for; empty if nothing is.
std::string problem_of(int handle, int64_t bytes, uid_t owner) {
  struct stat status {};
  struct statfs system {};
  if (::fstat(handle, &status) != 0 || ::fstatfs(handle, &system) != 0) return std::strerror(errno);
  if (!S_ISREG(status.st_mode)) return "it is no regular file";
  if (status.st_uid != owner) return c10::str("it belongs to user ", status.st_uid, ", not to user ", owner);
  if (status.st_nlink != 0 || system.f_type != TMPFS_MAGIC) return "it is a file on disk, not shared memory";
  if (status.st_size != bytes) return c10::str("it has ", status.st_size, " bytes, not ", bytes);
  return "";
}

// The file behind the handle, -1 with `problem` set where it is not what it should be.
int open_checked(int handle, int64_t bytes, uid_t owner, std::string& problem) {
  problem = problem_of(handle, bytes, owner);
  if (!problem.empty()) return -1;
  const int fd = ::open(("/proc/self/fd/" + std::to_string(handle)).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    problem = std::strerror(errno);
  } else if (::fcntl(fd, F_GET_SEALS) != kSeals) {
    problem = "its size or its use can still be changed";
    ::close(fd);
    return -1;
  }
  return fd;
}

std::shared_ptr<char> map_memory(int fd, int64_t bytes, int flags) {
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags | MAP_NORESERVE, fd, 0);
  if (memory == MAP_FAILED) return nullptr;
  return {static_cast<char*>(memory), [bytes](char* mapped) { ::munmap(mapped, bytes); }};
}

/// What this process has mapped.
class Mappings {
 public:
  std::shared_ptr<char> get(int fd, int64_t bytes) {
    struct stat file {};
    if (::fstat(fd, &file) != 0) return nullptr;
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(mapped_, [](const auto& entry) { return entry.second.expired(); });
    // What is mapped keeps its file, so that no other can have the same number meanwhile.
    std::weak_ptr<char>& known = mapped_[{file.st_dev, file.st_ino, bytes}];
    std::shared_ptr<char> memory = known.lock();
    if (!memory) known = memory = map_memory(fd, bytes, MAP_SHARED);
    return memory;
  }

 private:
  std::mutex mutex_;
  std::map<std::tuple<dev_t, ino_t, int64_t>, std::weak_ptr<char>> mapped_;
};

}  // namespace

std::string SharedFilePlace::text() const {
  return std::to_string(pid) + " " + std::to_string(fd);  // read again: without separators of the locale
}

std::optional<SharedFilePlace> SharedFilePlace::parse(const std::string& text) {
  SharedFilePlace place;
  std::istringstream in(text);
  std::string rest;
  if (!(in >> place.pid >> place.fd) || in >> rest || place.pid <= 0 || place.fd < 0) return std::nullopt;
  return place;
}

SharedMemory SharedMemory::make(const char* name, int64_t bytes) {
  SharedMemory made;
  made.fd_ = make_sealed_file(name, bytes);
  if (made.fd_ < 0) {
    made.problem_ = std::strerror(errno);
  } else {
    made.map(bytes);
  }
  return made;
}

SharedMemory SharedMemory::open(const SharedFilePlace& place, int64_t bytes, uid_t owner) {
  SharedMemory opened;
  const std::string path = "/proc/" + std::to_string(place.pid) + "/fd/" + std::to_string(place.fd);
  const int handle = ::open(path.c_str(), O_PATH | O_CLOEXEC);
  if (handle < 0) {
    opened.problem_ = c10::str("cannot open ", path, ": ", std::strerror(errno));
    return opened;
  }
  std::string problem;
  opened.fd_ = open_checked(handle, bytes, owner, problem);
  ::close(handle);
  if (opened.fd_ < 0) {
    opened.problem_ = c10::str("refused ", path, ": ", problem);
    opened.is_foreign_ = true;
  } else {
    opened.map(bytes);
  }
  return opened;
}

SharedMemory SharedMemory::make_private(int64_t bytes) {
  SharedMemory made;
  made.memory_ = map_memory(-1, bytes, MAP_PRIVATE | MAP_ANONYMOUS);
  if (!made.memory_) made.problem_ = std::strerror(errno);
  return made;
}

void SharedMemory::map(int64_t bytes) {
  static Mappings mappings;
  memory_ = mappings.get(fd_, bytes);
  if (!memory_) problem_ = std::strerror(errno);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      memory_(std::move(other.memory_)),
      problem_(std::move(other.problem_)),
      is_foreign_(other.is_foreign_) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(memory_, other.memory_);
  std::swap(problem_, other.problem_);
  std::swap(is_foreign_, other.is_foreign_);
  return *this;
}

void SharedMemory::close_file() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

}  // namespace serried::detail
