// Rules of indexing: reading and writing elements that index tensors name.
#include <optional>

#include "serried/spmd/rules/letters.h"
#include "serried/spmd/rules/tables.h"

namespace serried::spmd {
namespace {

using detail::Dims;
using detail::Letters;

bool is_mask(const TensorArg& tensor) {
  return tensor.dtype == c10::ScalarType::Bool || tensor.dtype == c10::ScalarType::Byte;
}

// What a lookup in parts leaves is a sum over ranks, which bools have not.
bool can_pick(const TensorArg& table) {
  return table.dtype != c10::ScalarType::Bool;
}

// What `self[indices]` does to the dims of self: which are indexed, and where the dims of the result come from.
struct Indexing {
  std::vector<int64_t> indexed;
  std::vector<const TensorArg*> tensors;
  bool has_mask = false;
  bool adjacent = true;
  int64_t ndim = 0;       // of the broadcast indices
  bool even_rank = true;  // all index tensors have as many dims

  explicit Indexing(const Call& call) {
    const int argument = call.index("indices");
    int64_t dim = 0;
    const c10::IValue* given = call.value("indices");
    if (given == nullptr) return;
    const auto items = given->toListRef();
    size_t next = 0;
    for (const TensorArg& tensor : call.tensors()) {
      if (tensor.argument == argument) tensors.push_back(&tensor);
    }
    for (const c10::IValue& item : items) {
      const bool absent = item.isNone() || (item.isTensor() && !item.toTensor().defined());
      dim += absent ? 1 : add(*tensors.at(next++), dim);
    }
    for (size_t k = 1; k < indexed.size(); ++k) adjacent = adjacent && indexed[k] == indexed[k - 1] + 1;
    for (const TensorArg* tensor : tensors) even_rank = even_rank && tensor->dim() == tensors[0]->dim();
  }

 private:
  int64_t add(const TensorArg& tensor, int64_t dim) {
    const bool mask = is_mask(tensor);
    const int64_t covered = mask ? tensor.dim() : 1;
    has_mask = has_mask || mask;
    for (int64_t d = 0; d < covered; ++d) indexed.push_back(dim + d);
    ndim = std::max(ndim, mask ? int64_t(1) : tensor.dim());
    return covered;
  }
};

// The dims of `self[indices]`: where the indexed dims were if they are neighbours, else in front.
Dims indexed_dims(const Dims& self, const Indexing& indexing, const Dims& index) {
  Dims result = detail::without(self, indexing.indexed);
  const int64_t place = indexing.adjacent && !indexing.indexed.empty() ? indexing.indexed[0] : 0;
  result.insert(result.begin() + place, index.begin(), index.end());
  return result;
}

std::string index(const Call& call) {
  const Indexing indexing(call);
  const int64_t ndim = call.tensor(0).dim();
  Letters letters;
  if (indexing.tensors.empty()) return {};
  if (indexing.has_mask) {
    if (indexing.tensors.size() > 1) return {};
    const Dims self = letters.dims(ndim, indexing.indexed);
    const std::string mask = letters.slot(letters.wholes(indexing.tensors[0]->dim()));
    const Dims result = indexed_dims(self, indexing, {letters.whole()});
    const std::string left = letters.slot(self);
    return letters.finish(left + ", [!" + mask + "] => " + letters.slot(result));
  }
  // One index tensor: a part can look up what it holds.
  const bool pick = indexing.indexed.size() == 1 && can_pick(call.tensor(0));
  const Dims self = letters.dims(ndim, pick ? c10::IntArrayRef() : c10::IntArrayRef(indexing.indexed));
  const std::string left = letters.slot(self);
  const std::string right = letters.slot(indexed_dims(self, indexing, {"..."}));
  const std::string picked = pick ? "; pick " + self[size_t(indexing.indexed[0])] : std::string();
  return letters.finish(left + ", [!...] => " + right + picked);
}

// `dims` as a tensor of `sizes` has them when it is broadcast to them from the right.
Dims broadcast(const Dims& dims, const c10::DimVector& sizes) {
  Dims result;
  const size_t missing = dims.size() > sizes.size() ? dims.size() - sizes.size() : 0;
  for (size_t d = missing; d < dims.size(); ++d) result.push_back(sizes[d - missing] == 1 ? "1" : dims[d]);
  return result;
}

// With one value for all, a mask is as long as what it covers and both can be cut alike.
std::string fill_masked(const Call& call, const Indexing& indexing, const TensorArg& values) {
  Letters letters;
  const Dims self = letters.dims(call.tensor(0).dim());
  Dims mask;
  for (const int64_t dim : indexing.indexed) mask.push_back(self.at(size_t(dim)));
  const std::string left = letters.slot(self);
  return letters.finish(left + " + [!" + letters.slot(mask) + "], " + letters.slot(Dims(values.sizes.size(), "1")) +
                        " => " + left);
}

std::string index_put(const Call& call) {
  const Indexing indexing(call);
  const TensorArg* values = call.tensor("values");
  if (values == nullptr || indexing.tensors.empty()) return {};
  const bool accumulate = call.flag("accumulate");
  const bool one_mask = indexing.has_mask && indexing.tensors.size() == 1;
  if (one_mask && values->numel() == 1 && !accumulate) return fill_masked(call, indexing, *values);
  if (indexing.has_mask && !one_mask) return {};
  if (!indexing.even_rank) return {};
  Letters letters;
  const Dims self = letters.dims(call.tensor(0).dim(), indexing.indexed);
  const std::string left = letters.slot(self);
  // Sums over parts of the indices add up; the last of several writes does not.
  const bool sums = accumulate && !indexing.has_mask;
  Dims index = sums ? letters.dims(indexing.ndim) : letters.wholes(indexing.ndim);
  const Dims tensors = one_mask ? letters.wholes(indexing.tensors[0]->dim()) : index;
  const Dims source = broadcast(indexed_dims(self, indexing, index), values->sizes);
  const std::string slots = left + " + [!" + letters.slot(tensors) + "], " + letters.slot(source);
  return letters.finish(slots + (accumulate ? " -> " : " => ") + left);
}

// All dims of self indexed; where the mask is false the result is `fill`.
std::string unsafe_masked_index(const Call& call) {
  const Indexing indexing(call);
  const int64_t ndim = call.tensor(0).dim();
  if (indexing.has_mask || int64_t(indexing.indexed.size()) != ndim) return {};
  Letters letters;
  const std::string self = letters.slot(letters.wholes(ndim));
  const bool linear = call.number("fill", 0) == 0;
  return letters.finish((linear ? "" : "!") + self + ", !..., [!...] -> ...");
}

std::string unsafe_masked_index_put_accumulate(const Call& call) {
  const Indexing indexing(call);
  const int64_t ndim = call.tensor(0).dim();
  if (indexing.has_mask || int64_t(indexing.indexed.size()) != ndim) return {};
  Letters letters;
  const std::string self = letters.slot(letters.wholes(ndim));
  return letters.finish(self + " + !..., [!...], ... -> " + self);
}

std::string index_select(const Call& call) {
  if (call.tensor(0).dim() == 0) return "..., !I => ...";
  if (!can_pick(call.tensor(0)) && call.tensor(1).dim() == 1) return "V@dim ..., !i => i@dim ...";
  return call.tensor(1).dim() == 0 ? "V@dim ..., ! => I@dim ..." : "v@dim ..., !i => i@dim ...; pick v";
}

// Tensors without dims beside vectors of one element: nothing can be cut.
std::string all_whole(const Call& call, bool linear, const char* arrow) {
  Letters letters;
  const std::string self = letters.slot(letters.wholes(call.tensor(0).dim()));
  const std::string index = ", !" + letters.slot(letters.wholes(call.tensor(1).dim()));
  if (call.tensors().size() == 2) return letters.finish("!" + self + index + " -> " + self);
  const std::string source = letters.slot(letters.wholes(call.tensor(2).dim()));
  if (!linear) return letters.finish("!" + self + index + ", !" + source + " -> " + self);
  return letters.finish(self + " +" + index.substr(1) + ", " + source + arrow + self);
}

bool is_usual(const Call& call) {
  const int64_t ndim = call.tensor(0).dim();
  return ndim > 0 && call.tensor("index")->dim() == 1 && call.tensor("source")->dim() == ndim;
}

std::string index_add(const Call& call) {
  return is_usual(call) ? "V@dim ... + !i, i@dim ... -> V@dim ..." : all_whole(call, true, " -> ");
}

std::string index_copy(const Call& call) {
  return is_usual(call) ? "V@dim ... + !I, I@dim ... => V@dim ..." : all_whole(call, true, " => ");
}

std::string index_reduce(const Call& call) {
  return is_usual(call) ? "!V@dim ..., !I, !I@dim ... -> V@dim ..." : all_whole(call, false, " -> ");
}

std::string index_fill(const Call& call) {
  if (call.tensor("index")->dim() > 1) return {};
  if (call.tensor("value") != nullptr) return "V@dim ... + !I, ... => V@dim ...";
  return call.number("value", 1) == 0 ? "V@dim ..., !I -> V@dim ..." : "!V@dim ..., !I -> V@dim ...";
}

// gather and scatter: an index as large as self in all dims but one, or smaller.
struct Along {
  Letters letters;
  Dims self;
  Dims index;
  Dims source;
  int64_t dim = 0;
};

// None where ranks differ. Dims in which all are as large may be cut.
std::optional<Along> along(const Call& call) {
  const TensorArg& self = call.tensor(0);
  const TensorArg& index = *call.tensor("index");
  const TensorArg* source = call.tensor("src");
  if (self.dim() == 0 || index.dim() != self.dim() || (source != nullptr && source->dim() != self.dim())) return {};
  Along result;
  result.dim = from_front(call.integer("dim"), self.dim());
  for (size_t d = 0; d < self.sizes.size(); ++d) {
    const bool is_dim = int64_t(d) == result.dim;
    const bool follows = source == nullptr || source->sizes[d] == index.sizes[d];
    const bool agree = !is_dim && self.sizes[d] == index.sizes[d] && follows;
    result.self.push_back(agree ? result.letters.cut() : result.letters.whole());
    result.index.push_back(agree ? result.self[d] : result.letters.whole());
    result.source.push_back(agree || follows ? result.index[d] : result.letters.whole());
  }
  return result;
}

std::string gather_whole(const Call& call) {
  Letters letters;
  const std::string self = letters.slot(letters.wholes(call.tensor(0).dim()));
  const std::string index = letters.slot(letters.wholes(call.tensor(1).dim()));
  return letters.finish(self + ", !" + index + " => " + index);
}

std::string gather(const Call& call) {
  std::optional<Along> a = along(call);
  if (!a) return gather_whole(call);
  const bool pick = can_pick(call.tensor(0));
  if (pick) a->self[size_t(a->dim)] = a->letters.cut();
  a->index[size_t(a->dim)] = a->letters.cut();
  const std::string index = a->letters.slot(a->index);
  const std::string picked = pick ? "; pick " + a->self[size_t(a->dim)] : std::string();
  return a->letters.finish(a->letters.slot(a->self) + ", !" + index + " => " + index + picked);
}

// Every write counts, so parts of the index give parts of the sum.
std::string added(Along a) {
  if (a.source[size_t(a.dim)] == a.index[size_t(a.dim)]) {
    a.index[size_t(a.dim)] = a.source[size_t(a.dim)] = a.letters.cut();
  }
  const std::string self = a.letters.slot(a.self);
  return a.letters.finish(self + " + !" + a.letters.slot(a.index) + ", " + a.letters.slot(a.source) + " -> " + self);
}

std::string opaque(Along a, bool has_source) {
  const std::string self = a.letters.slot(a.self);
  const std::string source = has_source ? ", !" + a.letters.slot(a.source) : std::string();
  return a.letters.finish("!" + self + ", !" + a.letters.slot(a.index) + source + " -> " + self);
}

std::string scatter(const Call& call) {
  const bool has_source = call.tensor("src") != nullptr;
  const std::optional<Along> a = along(call);
  if (!a) return all_whole(call, has_source && !call.has("reduce"), " => ");
  if (call.has("reduce")) return opaque(*a, has_source);
  if (!has_source && call.number("value", 1) != 0) return opaque(*a, false);
  Along copy = *a;
  const std::string self = copy.letters.slot(copy.self);
  const std::string index = copy.letters.slot(copy.index);
  if (!has_source) return copy.letters.finish(self + ", !" + index + " -> " + self);
  return copy.letters.finish(self + " + !" + index + ", " + copy.letters.slot(copy.source) + " => " + self);
}

std::string scatter_add(const Call& call) {
  const std::optional<Along> a = along(call);
  return a ? added(*a) : all_whole(call, true, " -> ");
}

std::string scatter_reduce(const Call& call) {
  const std::optional<Along> a = along(call);
  if (!a) return all_whole(call, false, " -> ");
  return call.text("reduce") == "sum" && call.flag("include_self", true) ? added(*a) : opaque(*a, true);
}

// Indices into the flat tensor.
std::string put(const Call& call) {
  Letters letters;
  const std::string self = letters.slot(letters.wholes(call.tensor(0).dim()));
  const TensorArg& index = call.tensor(1);
  const TensorArg& source = call.tensor(2);
  if (call.flag("accumulate") && index.sizes == source.sizes) {
    return letters.finish(self + " + !..., ... -> " + self);
  }
  const std::string left = letters.slot(letters.wholes(index.dim()));
  const std::string right = letters.slot(letters.wholes(source.dim()));
  const std::string arrow = call.flag("accumulate") ? " -> " : " => ";
  return letters.finish(self + " + !" + left + ", " + right + arrow + self);
}

std::string masked_fill(const Call& call) {
  if (call.tensor("value") != nullptr) return "... + !..., ... => ...";
  return call.number("value", 1) == 0 ? "..., !... -> ..." : "!..., !... -> ...";
}

// The source is consumed in order: everything is whole.
std::string masked_scatter(const Call& call) {
  Letters letters;
  const Dims self = letters.wholes(std::max(call.tensor(0).dim(), call.tensor(1).dim()));
  const std::string result = letters.slot(self);
  const std::string mask = letters.slot(letters.wholes(call.tensor(1).dim()));
  const std::string source = letters.slot(letters.wholes(call.tensor(2).dim()));
  return letters.finish(result + " + !" + mask + ", " + source + " => " + result);
}

std::string masked_scatter_backward(const Call& call) {
  Letters letters;
  const auto sizes = call.integers("sizes");
  if (!sizes) return {};
  const std::string grad = letters.slot(letters.wholes(call.tensor(0).dim()));
  const std::string mask = letters.slot(letters.wholes(call.tensor(1).dim()));
  return letters.finish(grad + ", !" + mask + " -> " + letters.slot(letters.wholes(int64_t(sizes->size()))));
}

std::string embedding_dense_backward(const Call& call) {
  // Gradients divided by how often an index occurs need all indices.
  if (!call.flag("scale_grad_by_freq")) return "...d, !... -> Vd";
  Letters letters;
  const std::string index = letters.slot(letters.wholes(call.tensor(1).dim()));
  const std::string d = letters.cut();
  return letters.finish(index + d + ", !" + index + " -> V" + d);
}

// Segments of the first dim; the dims behind it stay apart.
std::string segment_reduce_backward(const Call& call) {
  const TensorArg* lengths = call.tensor(call.value("lengths") != nullptr ? "lengths" : "offsets");
  if (call.integer("axis") != 0 || lengths == nullptr || lengths->dim() != 1) return {};
  return "S..., !S..., !N..., !L?, !O? -> N...; dense; fence";
}

// Modes: 0 sum, 1 mean, 2 max, which remembers an index per element instead of per bag.
std::string embedding_bag(const Call& call) {
  return call.integer("mode") == 2 ? "!VD, !I, !O, !I? -> BD, X, Y, BD" : "!VD, !I, !O, !I? -> BD, X, Y, Z";
}
std::string embedding_bag_backward(const Call& call) {
  if (call.integer("mode") == 2) return "Bd, !I, !O, !X, !Y, !Bd, !I? -> Vd";
  return "Bd, !I, !O, !X, !Y, !Z, !I? -> Vd";
}

}  // namespace

RuleTable index_rules() {
  return detail::table("index", {
                                    each(index, "_unsafe_index index"),
                                    each(index_put, "_index_put_impl _unsafe_index_put index_put"),
                                    each(embedding_bag, "_embedding_bag _embedding_bag_forward_only"),
                                    {
                                        {"_embedding_bag_backward", embedding_bag_backward},
                                        {"_embedding_bag_dense_backward", "Bd, !I, !X, !Y, !Z, !I? -> Vd"},
                                        {"_embedding_bag_per_sample_weights_backward", "Bd, Vd, !I, !O, !X -> I"},
                                        {"_segment_reduce_backward", segment_reduce_backward},
                                        {"_unsafe_masked_index", unsafe_masked_index},
                                        {"_unsafe_masked_index_put_accumulate", unsafe_masked_index_put_accumulate},
                                        {"embedding", "vd, !... => ...d; pick v"},  // weight, indices
                                        {"embedding_dense_backward", embedding_dense_backward},
                                        {"gather", gather},
                                        {"index_add", index_add},
                                        {"index_copy", index_copy},
                                        {"index_fill", index_fill},
                                        {"index_reduce", index_reduce},
                                        {"index_select", index_select},
                                        {"masked_fill", masked_fill},
                                        {"masked_scatter", masked_scatter},
                                        {"masked_scatter_backward", masked_scatter_backward},
                                        {"masked_select", "K@*, !J@* => N"},
                                        {"nonzero", "!K@* -> NC"},
                                        {"nonzero_static", "!K@* -> NC"},
                                        {"put", put},
                                        {"repeat_interleave.Tensor", "!I -> N"},
                                        {"scatter", scatter},
                                        {"scatter_add", scatter_add},
                                        {"scatter_reduce", scatter_reduce},
                                        {"take", "V@*, !... => ..."},
                                    },
                                });
}

}  // namespace serried::spmd
