// Rules of norms and of softmax: what is normalised over is whole, everything beside it may be cut.
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::letters;

// The normalised dims are the last ones, as many as `normalized_shape` has.
struct Normalised {
  std::string whole;  // "...PQ"
  std::string shape;  // "PQ"
  std::string stats;  // "...11"
};

Normalised normalised(const Call& call) {
  const int64_t count = int64_t(call.integers("normalized_shape").value_or(std::vector<int64_t>{1}).size());
  const std::string shape = letters('P', count);
  return {"..." + shape, shape, "..." + std::string(size_t(count), '1')};
}

std::string layer_norm(const Call& call) {
  const auto [x, w, s] = normalised(call);
  return "!" + x + ", " + w + "? + " + w + "? -> " + x + ", !" + s + ", !" + s;
}

std::string layer_norm_backward(const Call& call) {
  const auto [x, w, s] = normalised(call);
  return x + ", !" + x + ", !" + s + ", !" + s + ", !" + w + "?, !" + w + "? -> " + x + ", " + w + ", " + w + "; dense";
}

std::string rms_norm(const Call& call) {
  const auto [x, w, s] = normalised(call);
  return "!" + x + ", " + w + "? -> " + x + ", !" + s;
}

std::string rms_norm_backward(const Call& call) {
  const auto [x, w, s] = normalised(call);
  return x + ", !" + x + ", !" + s + ", !" + w + "? -> " + x + ", " + w + "; dense";
}

// Statistics of an image batch run over all dims but the channels.
std::string whole_image(const Call& call) {
  return "Nc" + letters('P', call.tensor(0).dim() - 2);
}

std::string cut_image(const Call& call) {
  return "nc" + letters('p', call.tensor(0).dim() - 2);
}

bool is_training(const Call& call) {
  return call.has("training") ? call.flag("training") : call.flag("train", true);
}

// Outside training the statistics are given, and those of the batch come back with shape [0].
std::string evaluated(const Call& call, int num_empty) {
  const std::string x = cut_image(call);
  return "!" + x + ", !c?, !c?, !c?, !c? -> " + x + ", " + (num_empty == 2 ? "Y, Z" : "X, Y, Z");
}

std::string batch_norm_eval(const Call& call) {
  return evaluated(call, 2);
}

std::string batch_norm_eval_reserve(const Call& call) {
  return evaluated(call, 3);
}

// A cut of the batch needs statistics over all ranks: tensor/handlers/batch_norm.cpp.
std::string batch_norm(const Call& call) {
  if (!is_training(call)) return batch_norm_eval(call);
  const std::string x = whole_image(call);
  return "!" + x + ", !c?, !c?, !c?, !c? -> " + x + ", c, c";
}

std::string batch_norm_no_stats(const Call& call) {
  const std::string x = whole_image(call);
  return "!" + x + ", !c?, !c? -> " + x + ", c, c";
}

std::string batch_norm_functional(const Call& call) {
  if (!is_training(call)) return evaluated(call, 2) + ", c, c";
  return batch_norm(call) + ", c, c";
}

std::string batch_norm_update(const Call& call) {
  const std::string x = whole_image(call);
  return "!" + x + ", !c?, !c?, !c, !c -> " + x + ", c, c, Z";
}

std::string batch_norm_update_functional(const Call& call) {
  return batch_norm_update(call) + ", c, c";
}

// grad, input, weight, running_mean, running_var, save_mean, save_invstd
std::string batch_norm_gradient(const Call& call, bool training, const char* reserve) {
  const std::string x = training ? whole_image(call) : cut_image(call);
  const std::string saved = training ? "!c?" : "!Z?";
  return x + ", !" + x + ", !c?, !c?, !c?, " + saved + ", " + saved + reserve + " -> " + x + ", c, c; dense";
}

std::string batch_norm_backward(const Call& call) {
  return batch_norm_gradient(call, is_training(call), "");
}

std::string batch_norm_backward_reserve(const Call& call) {
  return batch_norm_gradient(call, call.flag("update"), ", !Y?");
}

// group_norm tells N, C and HxW as numbers: the fix-up of that name makes N local.
std::string group_norm(const Call& call) {
  const std::string x = "nC" + letters('P', call.tensor(0).dim() - 2);
  return "!" + x + ", C? + C? -> " + x + ", !nG, !nG; group_norm; dense";
}

std::string group_norm_backward(const Call& call) {
  const std::string x = "nC" + letters('P', call.tensor(1).dim() - 2);
  return x + ", !" + x + ", !nG, !nG, !C? -> " + x + ", C, C; group_norm; dense";
}

// Slices along `dim` are independent of each other; within one all dims are whole.
std::string along_dim(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  std::string text = letters('P', ndim);
  if (ndim > 0) text[size_t(from_front(call.integer("dim"), ndim))] = 'd';
  return text;
}

std::string norms_along_dim(const Call& call) {
  std::string text = along_dim(call);
  for (char& c : text) c = c == 'd' ? 'd' : '1';
  return text;
}

std::string weight_norm(const Call& call) {
  const std::string v = along_dim(call);
  const std::string g = norms_along_dim(call);
  return "!" + v + ", " + g + " -> " + v + ", !" + g;
}

std::string weight_norm_backward(const Call& call) {
  const std::string v = along_dim(call);
  const std::string g = norms_along_dim(call);
  return v + ", !" + v + ", !" + g + ", !" + g + " -> " + v + ", " + g + "; dense";
}

// The mask has the shape of the scores, or one row or one matrix for several of them.
std::string masked_softmax(const Call& call) {
  const TensorArg& x = call.tensor(0);
  const bool same_shape = call.tensors().back().sizes == x.sizes;
  std::string dims = letters(same_shape ? 'a' : 'P', x.dim());
  if (x.dim() > 0) dims[size_t(from_front(call.integer("dim", -1), x.dim()))] = 'Z';
  const std::string mask = same_shape ? dims : letters('A', call.tensors().back().dim());
  if (call.tensors().size() == 2) return "!" + dims + ", !" + mask + " -> " + dims;
  return dims + ", !" + dims + ", !" + mask + " -> " + dims;
}

}  // namespace

RuleTable norm_rules() {
  return {
      "norm",
      detail::joined({
          each("!K@dim ... -> K@dim ...", "_log_softmax _safe_softmax _softmax log_softmax softmax"),
          each("K@dim ..., !K@dim ... -> K@dim ...", "_log_softmax_backward_data _softmax_backward_data"),
          each(masked_softmax, "_masked_softmax _masked_softmax_backward"),
          each(batch_norm, "_native_batch_norm_legit native_batch_norm"),
          {
              {"_batch_norm_no_update", batch_norm_eval_reserve},
              {"_batch_norm_with_update", batch_norm_update},
              {"_batch_norm_with_update_functional", batch_norm_update_functional},
              {"_fused_rms_norm", rms_norm},
              {"_fused_rms_norm_backward", rms_norm_backward},
              {"_native_batch_norm_legit.no_stats", batch_norm_no_stats},
              {"_native_batch_norm_legit_functional", batch_norm_functional},
              {"_native_batch_norm_legit_no_training", batch_norm_eval},
              {"_weight_norm_interface", weight_norm},
              {"_weight_norm_interface_backward", weight_norm_backward},
              {"batch_norm_backward", batch_norm_backward_reserve},
              {"native_batch_norm_backward", batch_norm_backward},
              {"native_group_norm", group_norm},
              {"native_group_norm_backward", group_norm_backward},
              {"native_layer_norm", layer_norm},
              {"native_layer_norm_backward", layer_norm_backward},
          },
      }),
  };
}

}  // namespace serried::spmd
