// A folder for the length of a test, and small helpers on checkpoints in it.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "serried/checkpoint/checkpoint.h"
#include "serried/checkpoint/limits.h"
#include "tests/support/errors.h"

namespace serried::testing {

class Folder {
 public:
  Folder()
      : path_(std::filesystem::temp_directory_path() /
              ("serried_checkpoint_" + std::to_string(::getpid()) + "_" + std::to_string(next_number()))) {
    std::filesystem::create_directories(path_);
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::permissions(path_, std::filesystem::perms::owner_all, ignored);
    std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;

  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  const std::filesystem::path& path() const { return path_; }

  /// Names of what is in it.
  std::set<std::string> names() const {
    std::set<std::string> names;
    for (const auto& item : std::filesystem::directory_iterator(path_)) names.insert(item.path().filename().string());
    return names;
  }

 private:
  static int next_number() {
    static std::atomic<int> next = 0;
    return next++;
  }
  std::filesystem::path path_;
};

inline std::string content_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

inline void write_content(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
}

/// Small numbers of the format, for the length of a test.
class SmallLimits {
 public:
  explicit SmallLimits(checkpoint::detail::FormatLimits limits) : before_(checkpoint::detail::format_limits()) {
    checkpoint::detail::format_limits() = limits;
  }
  ~SmallLimits() { checkpoint::detail::format_limits() = before_; }
  SmallLimits(const SmallLimits&) = delete;

 private:
  checkpoint::detail::FormatLimits before_;
};

/// What a load that has to fail says.
inline std::string load_error(const std::string& path, const checkpoint::Contents& contents,
                              const checkpoint::LoadOptions& options = {}) {
  return error_text<c10::ValueError>([&] { checkpoint::load(path, contents, options); });
}

}  // namespace serried::testing
