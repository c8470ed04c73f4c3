// Which ops of a program have no sharding rule.
#include "serried/tensor/debug/coverage.h"

#include "serried/tensor/debug/comm_debug.h"

namespace serried {

std::vector<std::string> ops_without_rule(const std::function<void()>& fn) {
  const CommDebugMode comm;
  fn();
  std::vector<std::string> names;
  for (const auto& [op, count] : comm.defaults()) names.push_back(op);
  return names;
}

}  // namespace serried
