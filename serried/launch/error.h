// Errors of the launcher: plain std exceptions, because it starts without LibTorch.
#pragma once

#include <stdexcept>
#include <string>

namespace serried::launch {

/// What went wrong before or while launching, in the house format, and the code `serried` exits with.
class LaunchError : public std::runtime_error {
 public:
  LaunchError(int exit_code, const std::string& what, const std::string& fix)
      : std::runtime_error("[run] " + what + "\n  fix: " + fix), exit_code_(exit_code) {}

  int exit_code() const { return exit_code_; }

 private:
  int exit_code_;
};

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;
constexpr int kExitNotExecutable = 126;
constexpr int kExitNotFound = 127;
constexpr int kExitSignalBase = 128;

}  // namespace serried::launch
