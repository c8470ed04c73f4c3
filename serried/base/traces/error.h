// What keeps traces from being merged, as a plain std exception: the launcher merges without LibTorch.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace serried::trace {

class TraceError : public std::runtime_error {
 public:
  TraceError(const std::string& what, std::string fix) : std::runtime_error(what), fix_(std::move(fix)) {}
  const std::string& fix() const { return fix_; }

 private:
  std::string fix_;
};

}  // namespace serried::trace
