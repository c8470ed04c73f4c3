// A file that is written beside its place, and never left behind half.
#pragma once

#include <unistd.h>

#include <array>
#include <csignal>
#include <string>

namespace serried::trace {

/// Names a file beside `whole`, to be renamed once it is complete. What is left of it when this goes is removed, also
/// where a signal ends the program first.
class HalfFile {
 public:
  explicit HalfFile(const std::string& whole) : path_(whole + "." + std::to_string(::getpid()) + ".part") {
    name_ = path_.c_str();
    for (size_t i = 0; i < kEnding.size(); ++i) {
      ::sigaction(kEnding[i], nullptr, &before_[i]);
      if (before_[i].sa_handler == SIG_DFL) std::signal(kEnding[i], remove_and_end);
    }
  }
  ~HalfFile() {
    for (size_t i = 0; i < kEnding.size(); ++i) ::sigaction(kEnding[i], &before_[i], nullptr);
    name_ = nullptr;
    ::unlink(path_.c_str());
  }
  HalfFile(const HalfFile&) = delete;
  HalfFile& operator=(const HalfFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  static constexpr std::array<int, 3> kEnding = {SIGINT, SIGTERM, SIGHUP};

  static void remove_and_end(int signal) {
    if (const char* name = name_) ::unlink(name);
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }

  static inline const char* volatile name_ = nullptr;
  const std::string path_;
  std::array<struct sigaction, kEnding.size()> before_ = {};
};

}  // namespace serried::trace
