// A rank that waits for the others before they share anything says so by an open file, for those who look from outside.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "serried/base/watch_page.h"

namespace serried::detail {

/// While it lives, this process holds an empty file whose name says that it is in `call`, "new_group", and whose age
/// says since when. Nothing where the system gives no more files: it is only for readers.
class SaysThatItMeets {
 public:
  explicit SaysThatItMeets(const char* call)
      : fd_(::memfd_create((std::string(watch_page::kMeetingPrefix) + call).c_str(), MFD_CLOEXEC)) {}
  ~SaysThatItMeets() {
    if (fd_ >= 0) ::close(fd_);
  }
  SaysThatItMeets(const SaysThatItMeets&) = delete;
  SaysThatItMeets& operator=(const SaysThatItMeets&) = delete;

 private:
  const int fd_;
};

}  // namespace serried::detail
