// Rules of ops on windows of space (pooling, resizing, padding, folding): batch and channels may be cut, space is
// whole.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

// The samples are (batch, channels, 2), also for a single image; they may be of a larger batch.
std::string fractional_pool(const Call& call, int64_t space_ndim) {
  const std::string space = detail::letters('P', space_ndim);
  if (call.tensor(0).dim() == space_ndim + 1) return "!c" + space + ", !NcS -> c" + space + ", c" + space;
  const bool same_batch = call.tensor(0).sizes[0] == call.tensor(1).sizes[0];
  const std::string n = same_batch ? "n" : "N";
  return "!" + n + "c" + space + ", !" + n + "cS -> " + n + "c" + space + ", " + n + "c" + space;
}

std::string fractional_pool_2d(const Call& call) {
  return fractional_pool(call, 2);
}

std::string fractional_pool_3d(const Call& call) {
  return fractional_pool(call, 3);
}

// One column holds the windows of all channels, so channels are whole.
std::string im2col(const Call& call) {
  return call.tensor(0).dim() == 3 ? "CHW -> KL" : "nCHW -> nKL";
}

std::string col2im(const Call& call) {
  return call.tensor(0).dim() == 2 ? "KL -> CHW" : "nKL -> nCHW";
}

std::vector<RuleEntry> pools() {
  return detail::joined({
      each("...HW -> ...HW", "_adaptive_avg_pool2d adaptive_avg_pool2d avg_pool2d"),
      each("...DHW -> ...DHW", "_adaptive_avg_pool3d adaptive_avg_pool3d avg_pool3d"),
      each("...HW, !...XY -> ...XY", "_adaptive_avg_pool2d_backward avg_pool2d_backward"),
      each("...DHW, !...XYZ -> ...XYZ", "_adaptive_avg_pool3d_backward avg_pool3d_backward"),
      each("!...HW -> ...HW, ...HW", "adaptive_max_pool2d max_pool2d_with_indices"),
      each("!...DHW -> ...DHW, ...DHW", "adaptive_max_pool3d max_pool3d_with_indices"),
      each("...HW, !...XY, !...HW -> ...XY; dense",
           "adaptive_max_pool2d_backward fractional_max_pool2d_backward max_pool2d_with_indices_backward"),
      each("...DHW, !...XYZ, !...DHW -> ...XYZ; dense",
           "adaptive_max_pool3d_backward fractional_max_pool3d_backward max_pool3d_with_indices_backward"),
      // Linear, but where an index comes twice each rank's threads may let another value win: no sum of parts then.
      each("!...HW, !...HW -> ...XY", "max_unpool2d"),
      each("!...DHW, !...DHW -> ...XYZ", "max_unpool3d"),
      {
          {"fractional_max_pool2d", fractional_pool_2d},
          {"fractional_max_pool3d", fractional_pool_3d},
      },
  });
}

// A backward is told the size of the whole gradient.
std::vector<RuleEntry> resizes() {
  return detail::joined({
      each("ncW => ncX", "_upsample_nearest_exact1d upsample_nearest1d"),
      each("ncHW => ncXY", "_upsample_nearest_exact2d upsample_nearest2d"),
      each("ncDHW => ncXYZ", "_upsample_nearest_exact3d upsample_nearest3d"),
      each("ncW -> ncX", "upsample_linear1d"),
      each("ncHW -> ncXY",
           "_upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa upsample_bicubic2d "
           "upsample_bilinear2d"),
      each("ncDHW -> ncXYZ", "upsample_trilinear3d"),
      each("ncX -> ncW; size",
           "_upsample_nearest_exact1d_backward upsample_linear1d_backward upsample_nearest1d_backward"),
      each("ncXY -> ncHW; size",
           "_upsample_bicubic2d_aa_backward _upsample_bilinear2d_aa_backward _upsample_lanczos2d_aa_backward "
           "_upsample_nearest_exact2d_backward upsample_bicubic2d_backward upsample_bilinear2d_backward "
           "upsample_nearest2d_backward"),
      each("ncXYZ -> ncDHW; size",
           "_upsample_nearest_exact3d_backward upsample_nearest3d_backward upsample_trilinear3d_backward"),
  });
}

std::vector<RuleEntry> pads() {
  return detail::joined({
      each("...W => ...X", "reflection_pad1d replication_pad1d"),
      each("...HW => ...XY", "reflection_pad2d replication_pad2d"),
      each("...DHW => ...XYZ", "reflection_pad3d replication_pad3d"),
      each("...X, !...W -> ...W", "reflection_pad1d_backward replication_pad1d_backward"),
      each("...XY, !...HW -> ...HW", "reflection_pad2d_backward replication_pad2d_backward"),
      each("...XYZ, !...DHW -> ...DHW", "reflection_pad3d_backward replication_pad3d_backward"),
  });
}

std::vector<RuleEntry> samplers() {
  return detail::joined({
      each("ncHW, !nyxG -> ncyx", "_grid_sampler_2d_cpu_fallback grid_sampler_2d"),
      each("ncDHW, !nzyxG -> nczyx", "grid_sampler_3d"),
      each("ncyx, !ncHW, !nyxG -> ncHW, nyxG", "_grid_sampler_2d_cpu_fallback_backward grid_sampler_2d_backward"),
      each("nczyx, !ncDHW, !nzyxG -> ncDHW, nzyxG", "grid_sampler_3d_backward"),
      each("NAB -> NHWG", "affine_grid_generator"),
  });
}

std::vector<RuleEntry> rearrangements() {
  return detail::joined({
      each("!K@dim ... -> H@dim ...", "glu"),
      each("H@dim ..., !K@dim ... -> K@dim ...", "glu_backward"),
      each("!H@dim ..., !K@dim ..., K@dim ... -> H@dim ...", "glu_jvp"),
      {{"im2col", im2col}, {"col2im", col2im}},
  });
}

}  // namespace

RuleTable pooling_rules() {
  return {"pooling", detail::joined({pools(), resizes(), pads(), samplers(), rearrangements()})};
}

}  // namespace serried::spmd
