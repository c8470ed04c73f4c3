// The text of a refusal.
#include "serried/graph/error.h"

#include "serried/base/error.h"

namespace serried::graph {
namespace {

std::string text_of(const CaptureError::Report& report) {
  std::string what = to_string(report.kind) + ": " + report.explanation;
  if (!report.op.empty()) what += "\n  op: " + report.op;
  if (!report.line.empty()) what += "\n  line: " + report.line;
  std::string fix;
  for (const std::string& hint : report.hints) fix += (fix.empty() ? "" : "; or ") + hint;
  return format_error({"capture", what, fix});
}

}  // namespace

std::string to_string(CaptureErrorKind kind) {
  switch (kind) {
    case CaptureErrorKind::host_read: return "host read";
    case CaptureErrorKind::changing_scalar: return "changing scalar";
    case CaptureErrorKind::off_tape_tensor: return "tensor made off the tape";
    case CaptureErrorKind::data_dependent_shape: return "data-dependent shape";
    case CaptureErrorKind::different_program: return "different program";
    case CaptureErrorKind::different_ranks: return "different collectives on different ranks";
    case CaptureErrorKind::pending_gradient: return "result that needs backward";
    case CaptureErrorKind::unsupported: return "unsupported";
  }
  return "unsupported";
}

CaptureError::CaptureError(Report report) : c10::NotImplementedError(text_of(report)), report_(std::move(report)) {}

}  // namespace serried::graph
