// Titles and inputs, made only where a profiler runs.
#include "serried/comm/collectives/profiled.h"

namespace serried::detail {
namespace {

std::string title_of(std::string_view backend, const char* event) {
  return std::string(backend).append(":").append(event);
}

}  // namespace

void Profiled::describe(std::string_view backend, const char* event, at::TensorList inputs) {
  title_ = title_of(backend, event);
  inputs_ = inputs.vec();
}

void ProfiledScope::begin(std::string_view backend, watch::Kind kind, at::TensorList inputs) {
  event_.emplace(at::RecordScope::USER_SCOPE);
  if (!event_->isActive()) return;
  inputs_.assign(inputs.begin(), inputs.end());
  event_->before(title_of(backend, watch::kind_name(kind)), &inputs_);
}

}  // namespace serried::detail
