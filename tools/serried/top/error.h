// Errors of `serried top`, in the house format.
#pragma once

#include <stdexcept>
#include <string>

namespace serried::top {

class TopError : public std::runtime_error {
 public:
  TopError(const std::string& what, const std::string& fix) : std::runtime_error("[top] " + what + "\n  fix: " + fix) {}
};

}  // namespace serried::top
