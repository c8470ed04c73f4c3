// Rules of Fourier transforms: transformed dims whole, linear.
#include "serried/spmd/rules/letters.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::Dims;
using detail::Letters;

// Between real and complex the last of the dims changes size.
std::string half(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  const std::vector<int64_t> dims = call.dims("dim", ndim);
  if (dims.empty()) return {};
  Letters letters;
  const Dims from = letters.dims(ndim, dims);
  Dims to = from;
  to.at(size_t(dims.back())) = letters.whole();
  const std::string left = letters.slot(from);
  return letters.finish(left + " -> " + letters.slot(to));
}

}  // namespace

RuleTable fft_rules() {
  return detail::table("fft", {
                                  each(half, "_fft_c2r _fft_r2c"),
                                  {
                                      {"_fft_c2c", "K@dim ... -> K@dim ..."},
                                  },
                              });
}

}  // namespace serried::spmd
