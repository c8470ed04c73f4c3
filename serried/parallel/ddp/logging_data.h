// What a DistributedDataParallel says about itself.
#pragma once

#include <ATen/core/ivalue.h>

#include <iosfwd>
#include <map>
#include <string>

namespace serried {

/// Keys as PyTorch's _get_ddp_logging_data has them.
class LoggingData {
 public:
  explicit LoggingData(std::map<std::string, c10::IValue> values) : values_(std::move(values)) {}
  const std::map<std::string, c10::IValue>& to_map() const { return values_; }
  /// One "key: value" per line.
  std::string to_string() const;

 private:
  std::map<std::string, c10::IValue> values_;
};

/// The variables that decide how ranks meet and talk, as "env:NAME=value" lines; N/A where one is not set.
void dump_distributed_environment(std::ostream& out);

}  // namespace serried
