// Why a function cannot be captured, in parts that a program can read.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <vector>

namespace serried::graph {

enum class CaptureErrorKind : uint8_t {
  host_read,             // a tensor's value was read on the host and feeds the graph
  changing_scalar,       // a number that differs from call to call would be baked in
  off_tape_tensor,       // a tensor made or written without ops
  data_dependent_shape,  // a shape that depends on data
  different_program,     // two recordings ran different ops
  different_ranks,       // ranks recorded different collectives
  pending_gradient,      // a result still needs backward
  unsupported,
};

std::string to_string(CaptureErrorKind kind);

/// Refused: the function was run as it stands, but cannot be replayed.
class CaptureError : public c10::NotImplementedError {
 public:
  struct Report {
    CaptureErrorKind kind;
    std::string op;           // "aten::_local_scalar_dense", empty where none is to blame
    std::string line;         // of the graph
    std::string explanation;  // what differs or is missing, with the values
    std::vector<std::string> hints;
  };
  explicit CaptureError(Report report);
  const Report& report() const { return report_; }

 private:
  Report report_;
};

}  // namespace serried::graph
