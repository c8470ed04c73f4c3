// What a DistributedDataParallel says about itself.
#pragma once

#include <ATen/core/ivalue.h>

#include <map>
#include <string>

namespace serried {

/// Keys as PyTorch's _get_ddp_logging_data has them.
class LoggingData {
 public:
  explicit LoggingData(std::map<std::string, c10::IValue> values) : values_(std::move(values)) {}
  const std::map<std::string, c10::IValue>& to_map() const { return values_; }

 private:
  std::map<std::string, c10::IValue> values_;
};

}  // namespace serried
