// Anonymous files that the ranks of one host share: made sealed, opened only after a look at what they are.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
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

/// A new file of `bytes` whose size nobody can change any more; -1 with errno set where that fails.
int make_shared_file(const char* name, int64_t bytes);

struct SharedFile {
  int fd = -1;
  std::string problem = {};  // why there is none
  bool foreign = false;      // it is there, but no rank of this user made it by `make_shared_file`
};

/// The file that a peer keeps at `place`. Whatever is there instead is refused before it is opened: a place is what a
/// peer says, and mapping another user's memory, waiting at a pipe or writing to a device would be its choice.
SharedFile open_shared_file(const SharedFilePlace& place, int64_t bytes, uid_t owner = ::geteuid());

}  // namespace serried::detail
