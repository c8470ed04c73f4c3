// Laying a rule over a call: which dim is which factor, how large, and which dims are broadcast.
#include "serried/spmd/bind.h"

#include <algorithm>
#include <map>

#include "serried/base/error.h"

namespace serried::spmd {

namespace {

using Mark = DimPattern::Mark;

constexpr int kEllipsis = '.';
constexpr int64_t kUnknown = -1;

bool is_tensor_type(const c10::TypePtr& type) {
  if (type->kind() == c10::TypeKind::TensorType) return true;
  if (const auto optional = type->cast<c10::OptionalType>()) return is_tensor_type(optional->getElementType());
  if (const auto list = type->cast<c10::ListType>()) return is_tensor_type(list->getElementType());
  return false;
}

class Binder {
 public:
  Binder(const Rule& rule, const Call& call) : rule_(rule), call_(call) {
    bound_.rule = rule;
    bound_.num_terms = rule.num_terms;
  }

  Bound run() {
    bound_.inputs.resize(call_.tensors().size());
    slot_of_.assign(call_.tensors().size(), -1);
    match_slots();
    for (size_t i = 0; i < slot_of_.size(); ++i) bind_input(i);
    for (const LetterSize& given : rule_.sizes) bound_.factors[factor(given.letter, 0)].size = given.size;
    for (size_t i = 0; i < slot_of_.size(); ++i) size_singles(i);
    for (size_t i = 0; i < slot_of_.size(); ++i) size_compounds(i);
    for (size_t i = 0; i < slot_of_.size(); ++i) drop_broadcast(i);
    for (const SlotPattern& slot : rule_.outputs) bind_output(slot);
    for (BoundTensor& input : bound_.inputs) finish_compounds(input);
    for (BoundTensor& output : bound_.outputs) finish_compounds(output);
    return std::move(bound_);
  }

 private:
  int16_t factor(int letter, int index) {
    const auto [found, is_new] = ids_.try_emplace({letter, index}, int16_t(bound_.factors.size()));
    if (is_new) bound_.factors.push_back({char(letter), kUnknown, !(letter >= 'A' && letter <= 'Z'), false});
    return found->second;
  }

  std::string argument_name(size_t tensor) const {
    const TensorArg& arg = call_.tensor(tensor);
    const std::string name = "\"" + call_.schema().arguments()[size_t(arg.argument)].name() + "\"";
    return arg.list_index < 0 ? name : name + "[" + std::to_string(arg.list_index) + "]";
  }

  template <class Exception = c10::ValueError>
  [[noreturn]] void complain(const std::string& what, const std::string& fix) const {
    raise<Exception>({call_.schema().name(), what + "\n  rule: " + std::string(rule_.text), fix});
  }

  // Tensor arguments take slots in schema order; what the call leaves out takes its optional or list slot along.
  void match_slots() {
    const std::vector<c10::Argument>& arguments = call_.schema().arguments();
    size_t slot = 0;
    size_t tensor = 0;
    for (size_t a = 0; a < arguments.size(); ++a) {
      if (arguments[a].is_out() || !is_tensor_type(arguments[a].real_type())) continue;
      const size_t first = tensor;
      const bool is_given = tensor < slot_of_.size() && call_.tensor(tensor).argument == int(a);
      if (!is_given && slot < rule_.inputs.size() && !rule_.inputs[slot].optional && !rule_.inputs[slot].list) continue;
      while (tensor < slot_of_.size() && call_.tensor(tensor).argument == int(a)) slot_of_[tensor++] = int(slot);
      if (tensor > first && slot >= rule_.inputs.size()) {
        complain("argument " + argument_name(first) + " has no slot: the rule has " +
                     std::to_string(rule_.inputs.size()) + " inputs",
                 "write one slot per tensor argument, left of the arrow");
      }
      if (tensor > first + 1 && !rule_.inputs[slot].list) {
        complain("argument \"" + arguments[a].name() + "\" is a list of " + std::to_string(tensor - first) +
                     " tensors, but its slot is not",
                 "write the slot as a list: [...]");
      }
      ++slot;
    }
  }

  void bind_input(size_t i) {
    const SlotPattern& slot = rule_.inputs[size_t(slot_of_[i])];
    BoundTensor& input = bound_.inputs[i];
    input.term = slot.term;
    input.slot = uint8_t(slot_of_[i]);
    input.linear = slot.linear;
    input.list = slot.list;
    input.dims.resize(size_t(call_.tensor(i).dim()));
    if (is_nothing(slot, i)) return;
    std::vector<char> taken(input.dims.size(), 0);
    for (const DimPattern& dim : slot.dims) {
      if (!dim.at.empty()) place_at(i, dim, taken);
    }
    place_rest(i, slot, taken);
  }

  // cat takes tensors of shape [0] beside any others and ignores them.
  bool is_nothing(const SlotPattern& slot, size_t i) const {
    const TensorArg& arg = call_.tensor(i);
    if (!slot.list || arg.dim() != 1 || arg.sizes[0] != 0 || slot.dims.empty() || slot.dims[0].at.empty()) return false;
    return std::any_of(call_.tensors().begin(), call_.tensors().end(),
                       [&](const TensorArg& other) { return other.argument == arg.argument && other.dim() != 1; });
  }

  void place_at(size_t i, const DimPattern& dim, std::vector<char>& taken) {
    const std::vector<int64_t> places = places_of(dim.at, i);
    num_at_[dim.at] = places.size();
    int index = 0;
    for (const int64_t place : places) {
      if (taken[size_t(place)]) continue;
      taken[size_t(place)] = 1;
      if (dim.mark != Mark::one) put(i, size_t(place), dim, index);
      ++index;
    }
  }

  std::vector<int64_t> places_of(std::string_view at, size_t i) const {
    const int64_t ndim = call_.tensor(i).dim();
    if (ndim == 0) return {};
    std::vector<int64_t> places = call_.dims(at, ndim);
    std::sort(places.begin(), places.end());
    for (const int64_t place : places) {
      if (place >= 0 && place < ndim) continue;
      complain<c10::IndexError>("argument \"" + std::string(at) + "\" names dim " + std::to_string(place) +
                                    ", but argument " + argument_name(i) + " has " + std::to_string(ndim) + " dims",
                                "pass a dim from " + std::to_string(-ndim) + " to " + std::to_string(ndim - 1));
    }
    return places;
  }

  // The dims that no "@" took, from the right: what an operand of lower rank lacks are the leading letters.
  void place_rest(size_t i, const SlotPattern& slot, const std::vector<char>& taken) {
    std::vector<size_t> free;
    for (size_t d = 0; d < taken.size(); ++d) {
      if (!taken[d]) free.push_back(d);
    }
    std::vector<const DimPattern*> plain;
    bool has_ellipsis = false;
    for (const DimPattern& dim : slot.dims) {
      if (!dim.at.empty()) continue;
      plain.push_back(&dim);
      has_ellipsis = has_ellipsis || dim.mark == Mark::ellipsis;
    }
    const size_t num_fixed = plain.size() - size_t(has_ellipsis);
    if (free.size() > num_fixed && !has_ellipsis) complain_rank(i, slot);
    const size_t num_ellipsis = free.size() > num_fixed ? free.size() - num_fixed : 0;
    size_t num_missing = num_fixed > free.size() ? num_fixed - free.size() : 0;
    if (has_ellipsis) num_ellipsis_ = std::max(num_ellipsis_, num_ellipsis);
    size_t next = 0;
    for (const DimPattern* dim : plain) {
      if (dim->mark == Mark::ellipsis) {
        for (size_t k = num_ellipsis; k-- > 0;) put_ellipsis(i, free[next++], k);
      } else if (num_missing > 0) {
        --num_missing;
      } else {
        put(i, free[next++], *dim, 0);
      }
    }
  }

  void put_ellipsis(size_t i, size_t place, size_t from_right) {
    bound_.inputs[i].dims[place].push_back(factor(kEllipsis, int(from_right)));
  }

  void put(size_t i, size_t place, const DimPattern& dim, int index) {
    DimFactors& factors = bound_.inputs[i].dims[place];
    if (dim.mark == Mark::whole && bound_.inputs[i].list) {
      factors.push_back(own_whole(dim.letters[0], index, call_.tensor(i).sizes[place]));
      return;
    }
    push_letters(dim, index, factors);
  }

  void push_letters(const DimPattern& dim, int index, DimFactors& factors) {
    if (dim.mark == Mark::one) return;
    for (const char c : dim.letters) {
      if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) factors.push_back(factor(c, index));
    }
  }

  // Tensors of one list may differ in a dim that is never cut: cat's.
  int16_t own_whole(char letter, int index, int64_t size) {
    const int16_t shared = factor(letter, index);
    if (bound_.factors[shared].size == kUnknown) bound_.factors[shared].size = size;
    if (bound_.factors[shared].size == size) return shared;
    bound_.factors.push_back({letter, size, false, false});
    return int16_t(bound_.factors.size() - 1);
  }

  void size_singles(size_t i) {
    const TensorArg& arg = call_.tensor(i);
    for (size_t d = 0; d < bound_.inputs[i].dims.size(); ++d) {
      const DimFactors& factors = bound_.inputs[i].dims[d];
      if (factors.size() != 1) continue;
      Factor& f = bound_.factors[factors[0]];
      if (f.size == kUnknown || f.size == 1) {
        f.size = arg.sizes[d];
      } else if (f.size != arg.sizes[d] && arg.sizes[d] != 1 && f.can_cut) {
        complain_size(i, d, f);
      }
    }
  }

  void size_compounds(size_t i) {
    const TensorArg& arg = call_.tensor(i);
    for (size_t d = 0; d < bound_.inputs[i].dims.size(); ++d) {
      const DimFactors& factors = bound_.inputs[i].dims[d];
      if (factors.size() < 2) continue;
      int64_t known = 1;
      Factor* unknown = nullptr;
      int num_unknown = 0;
      for (const int16_t id : factors) {
        Factor& f = bound_.factors[id];
        if (f.size != kUnknown) {
          known *= f.size;
        } else {
          unknown = &f;
          ++num_unknown;
        }
      }
      if (num_unknown > 1) continue;
      if (num_unknown == 1 && known > 0 && arg.sizes[d] % known == 0) {
        unknown->size = arg.sizes[d] / known;
      } else if (num_unknown == 1 || known != arg.sizes[d]) {
        complain_compound(i, d, known);
      }
    }
  }

  void drop_broadcast(size_t i) {
    const TensorArg& arg = call_.tensor(i);
    for (size_t d = 0; d < bound_.inputs[i].dims.size(); ++d) {
      DimFactors& factors = bound_.inputs[i].dims[d];
      if (factors.size() == 1 && arg.sizes[d] == 1 && bound_.factors[factors[0]].size != 1) factors.clear();
    }
  }

  void bind_output(const SlotPattern& slot) {
    std::vector<DimPattern> at = positioned(slot);
    size_t ndim = 0;
    for (const DimPattern& dim : at) ndim += num_at(dim.at);
    for (const DimPattern& dim : slot.dims) {
      if (dim.at.empty()) ndim += dim.mark == Mark::ellipsis ? num_ellipsis_ : 1;
    }
    BoundTensor output;
    output.slot = uint8_t(bound_.outputs.size());
    output.linear = slot.linear;
    output.list = slot.list;
    output.dims.resize(ndim);
    std::vector<char> taken(ndim, 0);
    for (const DimPattern& dim : at) place_output(dim, output, taken);
    size_t next = 0;
    const auto free = [&] {
      while (taken.at(next)) ++next;
      return next++;
    };
    for (const DimPattern& dim : slot.dims) {
      if (!dim.at.empty()) continue;
      if (dim.mark == Mark::ellipsis) {
        for (size_t k = num_ellipsis_; k-- > 0;) output.dims[free()].push_back(factor(kEllipsis, int(k)));
      } else {
        push_letters(dim, 0, output.dims[free()]);
      }
    }
    bound_.outputs.push_back(std::move(output));
  }

  // The "@" dims of an output, with the ones that keepdim leaves behind.
  std::vector<DimPattern> positioned(const SlotPattern& slot) const {
    std::vector<DimPattern> result;
    for (const DimPattern& dim : slot.dims) {
      if (!dim.at.empty()) result.push_back(dim);
    }
    if (!call_.flag("keepdim")) return result;
    for (const auto& [at, count] : num_at_) {
      const bool written = std::any_of(result.begin(), result.end(), [&](const DimPattern& d) { return d.at == at; });
      if (!written) result.push_back({Mark::one, {}, at});
    }
    return result;
  }

  size_t num_at(std::string_view at) const {
    const auto found = num_at_.find(at);
    if (found != num_at_.end()) return found->second;
    const auto given = call_.integers(at);
    if (!given) {
      complain("an output sits at argument \"" + std::string(at) + "\", which the call does not give",
               "name an int or int[] argument of the op after \"@\"");
    }
    return given->size();
  }

  void place_output(const DimPattern& dim, BoundTensor& output, std::vector<char>& taken) {
    const size_t count = num_at(dim.at);
    if (count == 0) return;
    std::vector<int64_t> places = call_.dims(dim.at, int64_t(output.dims.size()));
    std::sort(places.begin(), places.end());
    for (size_t k = 0; k < count; ++k) {
      if (k >= places.size() || places[k] < 0 || places[k] >= int64_t(taken.size()) || taken[size_t(places[k])]) {
        complain<c10::IndexError>("argument \"" + std::string(dim.at) + "\" does not name dims of an output of " +
                                      std::to_string(taken.size()) + " dims",
                                  "pass each dim once, from -" + std::to_string(taken.size()) + " to " +
                                      std::to_string(int64_t(taken.size()) - 1));
      }
      taken[size_t(places[k])] = 1;
      push_letters(dim, int(k), output.dims[size_t(places[k])]);
    }
  }

  // Inside a compound, factors of size 1 do not matter; the others must be cut in equal parts, or the cut of the merged
  // dim and that of the factor would fall apart.
  void finish_compounds(BoundTensor& tensor) {
    for (DimFactors& factors : tensor.dims) {
      if (factors.size() < 2) continue;
      DimFactors kept;
      for (const int16_t id : factors) {
        if (bound_.factors[id].size != 1) kept.push_back(id);
      }
      if (kept.empty()) kept.push_back(factors[0]);
      factors = kept;
      if (factors.size() < 2) continue;
      for (const int16_t id : factors) bound_.factors[id].must_divide = true;
    }
  }

  [[noreturn]] void complain_rank(size_t i, const SlotPattern& slot) const {
    complain("argument " + argument_name(i) + " has " + std::to_string(call_.tensor(i).dim()) +
                 " dims, but its slot has " + std::to_string(slot.dims.size()),
             "pass a tensor of at most that many dims, or write \"...\" in the slot");
  }
  [[noreturn]] void complain_size(size_t i, size_t d, const Factor& f) const {
    const std::string letter = f.letter == kEllipsis ? "..." : std::string(1, f.letter);
    complain("argument " + argument_name(i) + " has size " + std::to_string(call_.tensor(i).sizes[d]) + " at dim " +
                 std::to_string(d) + ", but \"" + letter + "\" there is " + std::to_string(f.size) +
                 " in the arguments before it",
             "pass tensors whose sizes agree where the rule has the same letter");
  }
  [[noreturn]] void complain_compound(size_t i, size_t d, int64_t known) const {
    complain("argument " + argument_name(i) + " has size " + std::to_string(call_.tensor(i).sizes[d]) + " at dim " +
                 std::to_string(d) + ", which its factors of product " + std::to_string(known) + " do not make",
             "give sizes in the rule whose product is the dim's size: (a=6 b=12)");
  }

  const Rule& rule_;
  const Call& call_;
  Bound bound_;
  std::vector<int> slot_of_;                    // per tensor
  std::map<std::pair<int, int>, int16_t> ids_;  // (letter, place among several) -> factor
  std::map<std::string_view, size_t> num_at_;   // dims that an argument named, as inputs have them
  size_t num_ellipsis_ = 0;
};

}  // namespace

int BoundTensor::position(int16_t factor) const {
  int result = -1;
  for (size_t d = 0; d < dims.size(); ++d) {
    for (size_t k = 0; k < dims[d].size(); ++k) {
      if (dims[d][k] != factor) continue;
      if (k == 0) return int(d);
      result = -2;
    }
  }
  return result;
}

Bound bind(const Rule& rule, const Call& call) {
  return Binder(rule, call).run();
}

int64_t output_size(const Bound& bound, size_t output, size_t dim) {
  int64_t size = 1;
  for (const int16_t id : bound.outputs.at(output).dims[dim]) {
    const Factor& f = bound.factors[size_t(id)];
    // What is never cut is whole in the local result, and may be another size there than in the inputs (conv's H).
    if (!f.can_cut || f.size == kUnknown) return -1;
    size *= f.size;
  }
  return size;
}

}  // namespace serried::spmd
