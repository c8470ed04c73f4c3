// What keeps a job from being simulated, as a plain std exception: nothing here needs LibTorch.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace serried::simulation {

class SimulationError : public std::runtime_error {
 public:
  SimulationError(const std::string& what, std::string fix) : std::runtime_error(what), fix_(std::move(fix)) {}
  const std::string& fix() const { return fix_; }

 private:
  std::string fix_;
};

}  // namespace serried::simulation
