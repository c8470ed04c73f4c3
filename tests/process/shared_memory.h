// What lies in /dev/shm: a test that compares it before and after sees what processes have left there.
#pragma once

#include <filesystem>
#include <set>
#include <string>

namespace serried::testing {

/// But for the segments of Open MPI, whose tests run beside others.
inline std::set<std::string> shared_memory_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (!name.starts_with("vader_segment.")) names.insert(name);
  }
  return names;
}

}  // namespace serried::testing
