// Rules of convolution: batch, output channels and input channels may be cut, space is whole.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

struct Conv {
  std::string input, weight, output, channels;  // channels: of the bias
};

// With groups a channel of the output sees only some of the input's: batch only. Transposed weights are (in, out).
Conv shapes(const Call& call, int64_t ndim, char in_channel) {
  const std::string space = detail::letters('P', ndim - 2);
  if (call.integer("groups", 1) != 1) return {"nC" + space, "OD" + space, "nO" + space, "O"};
  const std::string in(1, in_channel);
  const std::string weight = call.flag("transposed") ? in + "o" : "o" + in;
  return {"n" + in + space, weight + space, "no" + space, "o"};
}

std::string convolution(const Call& call) {
  const Conv c = shapes(call, call.tensor(0).dim(), 'c');
  return c.input + ", " + c.weight + " + " + c.channels + "? -> " + c.output;
}

// The bias' gradient is the same whatever input channels a rank has: with it they stay whole, or it would count twice.
std::string convolution_backward(const Call& call) {
  const c10::IValue* mask = call.value("output_mask");
  const bool has_bias =
      mask != nullptr && mask->isList() && mask->toListRef().size() == 3 && mask->toListRef()[2].toBool();
  const Conv c = shapes(call, call.tensor(1).dim(), has_bias ? 'C' : 'c');
  return c.output + ", !" + c.input + ", !" + c.weight + " -> " + c.input + ", " + c.weight + ", " + c.channels;
}

}  // namespace

RuleTable conv_rules() {
  return {
      "conv",
      {
          {"conv_tbc", "Tbi, Kio + o -> Tbo"},
          {"convolution", convolution},
          {"convolution_backward", convolution_backward},
      },
  };
}

}  // namespace serried::spmd
