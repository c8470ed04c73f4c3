// The check itself, and how a group's backend is told to make it.
#include "serried/comm/collectives/nan_check.h"

#include <ATen/ops/isnan.h>
#include <ATen/ops/nonzero.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "serried/base/env.h"
#include "serried/base/error.h"
#include "serried/base/log.h"
#include "serried/comm/collectives/own_backend.h"

namespace serried {
namespace detail {

watch::NanCheck default_nan_check() {
  const std::string text = env::text("SERRIED_NAN_CHECK");
  if (text == "off" || text == "0") return watch::NanCheck::off;
  if (text == "warn") return watch::NanCheck::warn;
  if (text == "throw") return watch::NanCheck::raise;
  raise<c10::ValueError>(
      {"new_group", c10::str("SERRIED_NAN_CHECK is \"", text, "\""), "set it to off, warn or throw"});
}

std::string find_nan(const at::Tensor& sent, int rank) {
  if (!sent.defined() || !(sent.is_floating_point() || sent.is_complex())) return "";
  const at::Tensor values = sent.is_sparse() ? sent._values() : sent;
  const at::Tensor where = at::nonzero(at::isnan(values.detach()));
  if (where.size(0) == 0) return "";
  std::string index;
  for (int64_t dim = 0; dim < where.size(1); ++dim) {
    index += c10::str(dim == 0 ? "" : ",", where[0][dim].item<int64_t>());
  }
  return c10::str("rank ", rank, " sends ", where.size(0), " NaN in ", watch::describe_tensor(sent), ", the first at [",
                  index, "]");
}

void check_nan(watch::NanCheck mode, const at::Tensor& sent, const char* op, int rank) {
  if (mode == watch::NanCheck::off) return;
  const std::string found = find_nan(sent, rank);
  if (found.empty()) return;
  if (mode == watch::NanCheck::raise) raise<c10::ValueError>({op, found, kNanFix});
  log::warn_once(format_error({op, found, kNanFix}));
}

}  // namespace detail

void watch::set_nan_check(const c10::intrusive_ptr<c10d::ProcessGroup>& group, NanCheck mode) {
  const auto backend = group->getBackend(c10::DeviceType::CPU);
  if (detail::OwnBackend* own = detail::as_own(*backend)) return own->set_nan_check(mode);
  raise<c10::NotImplementedError>({"set_nan_check",
                                   c10::str("the backend ", backend->getBackendName(), " cannot check for NaN"),
                                   "use one of serried's own backends: gloo, shm, threads"});
}

}  // namespace serried
