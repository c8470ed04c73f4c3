// Memory that the ranks of one host share: one of them makes an anonymous, sealed file, the others open it after a look
// at what it is, and all map it.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace serried::detail {

/// Where a process keeps such a file: what it tells its peers, as text "<pid> <fd>".
struct SharedFilePlace {
  pid_t pid = 0;
  int fd = -1;

  std::string text() const;
  static std::optional<SharedFilePlace> parse(const std::string& text);
  bool operator==(const SharedFilePlace&) const = default;
};

/// The memory, mapped, and the file that peers open while it is kept.
class SharedMemory {
 public:
  SharedMemory() = default;

  /// New zeros, whose size nobody can change any more.
  static SharedMemory make(const char* name, int64_t bytes);

  /// What a peer keeps at `place`. Whatever is there instead is refused before it is opened: a place is what a peer
  /// says, and mapping another user's memory, waiting at a pipe or writing to a device would be its choice.
  static SharedMemory open(const SharedFilePlace& place, int64_t bytes, uid_t owner = ::geteuid());

  /// Zeros of this process alone, taken on use, in place of memory that cannot be shared.
  static SharedMemory make_private(int64_t bytes);

  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory() { close_file(); }

  /// Null where there is none, see problem(). All who map one file of a process hold the same memory, until the last of
  /// them lets go: ranks that are threads take one range of addresses between them, and a race detector, which goes by
  /// addresses, sees that they synchronise there.
  char* data() const { return memory_.get(); }

  /// False where the file could not be made or opened, and once it is closed.
  bool has_file() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  SharedFilePlace place() const { return {::getpid(), fd_}; }

  /// The mapping stays; nobody can open the file any more.
  void close_file();

  /// Why there is no file, or no memory; empty where there are both.
  const std::string& problem() const { return problem_; }

  /// Something is at the place, but no rank of this user made it.
  bool is_foreign() const { return is_foreign_; }

 private:
  void map(int64_t bytes);

  int fd_ = -1;
  std::shared_ptr<char> memory_;
  std::string problem_;
  bool is_foreign_ = false;
};

}  // namespace serried::detail
