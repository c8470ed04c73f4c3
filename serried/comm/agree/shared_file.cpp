// memfds with seals. A peer's is first looked at by a handle that opens nothing, then opened through that handle.
#include "serried/comm/agree/shared_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <cerrno>
#include <cstring>
#include <sstream>

#include <c10/util/StringUtil.h>

namespace serried::detail {
namespace {

// With these no peer can cut the file under a mapping, which would end the process by SIGBUS.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

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

}  // namespace

std::string SharedFilePlace::text() const {
  return c10::str(pid, " ", fd);
}

std::optional<SharedFilePlace> SharedFilePlace::parse(const std::string& text) {
  SharedFilePlace place;
  std::istringstream in(text);
  std::string rest;
  if (!(in >> place.pid >> place.fd) || in >> rest || place.pid <= 0 || place.fd < 0) return std::nullopt;
  return place;
}

int make_shared_file(const char* name, int64_t bytes) {
  const int fd = ::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return -1;
  if (::ftruncate(fd, bytes) == 0 && ::fcntl(fd, F_ADD_SEALS, kSeals) == 0) return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

SharedFile open_shared_file(const SharedFilePlace& place, int64_t bytes, uid_t owner) {
  const std::string path = c10::str("/proc/", place.pid, "/fd/", place.fd);
  const int handle = ::open(path.c_str(), O_PATH | O_CLOEXEC);
  if (handle < 0) return {.problem = c10::str("cannot open ", path, ": ", std::strerror(errno))};
  SharedFile file{.problem = problem_of(handle, bytes, owner)};
  if (file.problem.empty()) {
    file.fd = ::open(c10::str("/proc/self/fd/", handle).c_str(), O_RDWR | O_CLOEXEC);
    if (file.fd < 0) file.problem = std::strerror(errno);
  }
  ::close(handle);
  if (file.fd >= 0 && ::fcntl(file.fd, F_GET_SEALS) != kSeals) {
    ::close(file.fd);
    file.fd = -1;
    file.problem = "its size or its use can still be changed";
  }
  if (file.fd >= 0) return file;
  return {.problem = c10::str("refused ", path, ": ", file.problem), .foreign = true};
}

}  // namespace serried::detail
