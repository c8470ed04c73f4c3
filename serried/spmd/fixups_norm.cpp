// The fix-ups of group norm, which is told its sizes as numbers, and of losses that are means.
#include <ATen/ATen.h>

#include "serried/spmd/fixups_norm.h"

namespace serried::spmd::detail {

using torch::jit::Stack;

void set_group_norm_batch(const LocalCall& local, const FixupPattern&, Stack& arguments) {
  const int input = local.call.index("input");
  for (size_t i = 0; i < local.call.tensors().size(); ++i) {
    if (local.call.tensor(i).argument != input) continue;
    arguments.at(size_t(local.call.index("N"))) = local.input_sizes(i).at(0);
  }
}

// Only the first result is a mean, or a gradient of one; a second one (targets that were found) is not.
void weigh_share(const LocalCall& local, const FixupPattern&, const Stack&, Stack& results) {
  const int self = local.call.index("self");
  for (size_t i = 0; i < local.call.tensors().size(); ++i) {
    if (local.call.tensor(i).argument != self) continue;
    const int64_t whole = local.call.tensor(i).numel();
    const int64_t part = c10::multiply_integers(local.input_sizes(i));
    if (part != whole) results.at(0).toTensor().mul_(double(part) / double(whole));
  }
}

}  // namespace serried::spmd::detail
