// Rules of losses: none keeps the shape, sum and mean leave a Partial scalar.
#include <algorithm>

#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

enum Reduction : int64_t { kNone = 0, kMean = 1, kSum = 2 };

int64_t reduction(const Call& call) {
  return call.integer("reduction", kMean);
}

// A local mean, or a gradient divided by the local count, is off by this rank's share of the elements of `self`.
std::string with_mean(const Call& call, std::string text) {
  return reduction(call) == kMean ? text + "; mean_share" : text;
}

std::string reduced(const Call& call, const std::string& inputs, const std::string& unreduced) {
  if (reduction(call) == kNone) return inputs + " -> " + unreduced;
  return with_mean(call, inputs + " ->");
}

// `self` tells how many elements a mean is over, so what it is broadcast along stays whole.
std::string elements(const Call& call) {
  const c10::DimVector& self = call.tensor("self")->sizes;
  const c10::DimVector& target = call.tensor("target")->sizes;
  if (reduction(call) != kMean || self == target) return "...";
  const size_t ndim = std::max(self.size(), target.size());
  std::string text;
  for (size_t d = ndim; d > 0; --d) {
    const int64_t own = d <= self.size() ? self[self.size() - d] : 1;
    const int64_t other = d <= target.size() ? target[target.size() - d] : 1;
    text += char((own < other ? 'A' : 'a') + text.size());
  }
  return text;
}

std::string elementwise(const Call& call) {
  const std::string x = elements(call);
  return reduced(call, "!" + x + ", !" + x, x);
}

std::string elementwise_backward(const Call& call) {
  const std::string x = elements(call);
  return with_mean(call, x + ", !" + x + ", !" + x + " -> " + x);
}

std::string binary_cross_entropy(const Call& call) {
  return reduced(call, "!..., !..., !...?", "...");
}

std::string binary_cross_entropy_backward(const Call& call) {
  return with_mean(call, "..., !..., !..., !...? -> ...");
}

std::string binary_cross_entropy_with_logits(const Call& call) {
  const std::string x = elements(call);
  const auto beside = [&](const char* name) {
    const TensorArg* weight = call.tensor(name);
    return weight == nullptr || x == "..." ? std::string("...")
                                           : x.substr(x.size() - std::min(x.size(), size_t(weight->dim())));
  };
  return reduced(call, "!" + x + ", !" + x + ", !" + beside("weight") + "?, !" + beside("pos_weight") + "?", x);
}

// Scores are (samples, classes), or the classes of one sample, or one number.
struct Scores {
  std::string scores;   // "nC"
  std::string samples;  // "n"
};

Scores scores(const Call& call) {
  const int64_t ndim = call.tensor("self")->dim();
  if (ndim == 2) return {"nC", "n"};
  return {ndim == 1 ? "C" : "", ""};
}

// One sample's target may have shape [] or [1], and the loss has it too.
std::string multi_margin(const Call& call) {
  const Scores s = scores(call);
  const std::string target = s.samples + (s.samples.empty() && call.tensor("target")->dim() == 1 ? "T" : "");
  return reduced(call, "!" + s.scores + ", !" + target + ", !C?", target);
}

std::string gradient_of(const Call& call, const Scores& s) {
  const bool is_scalar = call.tensor("grad_output")->dim() == 0;
  return is_scalar ? "" : s.samples.empty() ? "T" : s.samples;
}

std::string multi_margin_backward(const Call& call) {
  const Scores s = scores(call);
  const std::string target = s.samples + (s.samples.empty() && call.tensor("target")->dim() == 1 ? "T" : "");
  return with_mean(call, gradient_of(call, s) + ", !" + s.scores + ", !" + target + ", !C? -> " + s.scores);
}

std::string multilabel_margin(const Call& call) {
  const Scores s = scores(call);
  const std::string loss = reduction(call) == kNone ? s.samples : "";
  return with_mean(call, "!" + s.scores + ", !" + s.scores + " -> " + loss + ", " + s.scores);
}

std::string multilabel_margin_backward(const Call& call) {
  const Scores s = scores(call);
  return with_mean(call,
                   gradient_of(call, s) + ", !" + s.scores + ", !" + s.scores + ", !" + s.scores + " -> " + s.scores);
}

// Scores of nll: classes may be cut, since targets of other ranks' classes count as ignored.
Scores nll_scores(const Call& call) {
  Scores s = scores(call);
  std::replace(s.scores.begin(), s.scores.end(), 'C', 'c');
  return s;
}

// Outputs are the loss and the total weight; for a batch without reduction the latter is zero, so all stays linear. A
// mean over a cut batch or cut classes divides sums: tensor/handlers/decompose_losses.cpp.
std::string nll(const Call& call) {
  const Scores s = nll_scores(call);
  if (reduction(call) == kMean) {
    return s.samples.empty() ? c10::str("!", scores(call).scores, ", !, !C? -> , ") : "!NC, !N, !C? -> , ";
  }
  if (reduction(call) == kNone && !s.samples.empty()) return "nc, !n, c? -> n, ; target c";
  return "!" + s.scores + ", !" + s.samples + ", !c? -> , ; target c";
}

std::string nll_2d(const Call& call) {
  if (reduction(call) == kNone) return "nchw, !nhw, c? -> nhw, ; target c";
  if (reduction(call) == kSum) return "!nchw, !nhw, !c? -> , ; target c";
  return "!NCHW, !NHW, !C? -> , ";
}

std::string nll_backward(const Call& call) {
  const Scores s = nll_scores(call);
  return gradient_of(call, s) + ", !" + s.scores + ", !" + s.samples + ", !c?, ! -> " + s.scores + "; target c; dense";
}

std::string nll_2d_backward(const Call& call) {
  const std::string gradient = call.tensor("grad_output")->dim() == 0 ? "" : "nhw";
  return gradient + ", !nchw, !nhw, !c?, ! -> nchw; target c; dense";
}

}  // namespace

RuleTable loss_rules() {
  return {
      "loss",
      detail::joined({
          each(elementwise, "huber_loss mse_loss smooth_l1_loss soft_margin_loss"),
          each(elementwise_backward,
               "huber_loss_backward mse_loss_backward smooth_l1_loss_backward soft_margin_loss_backward"),
          {
              {"binary_cross_entropy", binary_cross_entropy},
              {"binary_cross_entropy_backward", binary_cross_entropy_backward},
              {"binary_cross_entropy_with_logits", binary_cross_entropy_with_logits},
              {"multi_margin_loss", multi_margin},
              {"multi_margin_loss_backward", multi_margin_backward},
              {"multilabel_margin_loss_backward", multilabel_margin_backward},
              {"multilabel_margin_loss_forward", multilabel_margin},
              {"nll_loss2d_backward", nll_2d_backward},
              {"nll_loss2d_forward", nll_2d},
              {"nll_loss_backward", nll_backward},
              {"nll_loss_forward", nll},
          },
      }),
  };
}

}  // namespace serried::spmd
