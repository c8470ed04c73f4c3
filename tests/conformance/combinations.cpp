// Which placements of a case's arguments are tried.
#include "tests/conformance/combinations.h"

#include <algorithm>

#include "tests/support/on_mesh.h"

namespace serried::testing {
namespace {

// Above it the product is not walked: options are drawn tensor by tensor.
constexpr double kMaxProduct = 2e6;

bool is_distributable(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

using Options = std::vector<std::vector<Placements>>;  // per tensor

Options options_of(const VectorCase& vector_case, int64_t mesh_ndim) {
  Options options;
  for (const TensorPlace& place : tensor_places(vector_case)) {
    options.push_back(placement_options(place.tensor, vector_case.mutates(place.argument), mesh_ndim));
  }
  return options;
}

double product(const Options& options) {
  double count = 1;
  for (const auto& list : options) count *= double(list.size());
  return count;
}

std::string option_text(const Placements& placements) {
  std::string text;
  for (const Placement& placement : placements) text += (text.empty() ? "" : ":") + to_string(placement);
  return text;
}

// The index-th combination of the product.
Combination pick(const Options& options, uint64_t index) {
  Combination combination(options.size());
  for (size_t i = options.size(); i-- > 0;) {
    combination[i] = options[i][index % options[i].size()];
    index /= options[i].size();
  }
  return combination;
}

std::vector<std::vector<std::string>> option_texts(const Options& options) {
  std::vector<std::vector<std::string>> texts;
  for (const auto& list : options) {
    texts.emplace_back();
    for (const Placements& option : list) texts.back().push_back(option_text(option));
  }
  return texts;
}

// FNV can go on from a prefix, so each tensor's options are appended once per prefix and not once per product.
class HashWalk {
 public:
  HashWalk(const Options& options, const std::string& id) : texts_(option_texts(options)) {
    visit(0, append(kBasis, id + "|"), 0);
    std::sort(hashes_.begin(), hashes_.end());
  }

  static constexpr uint64_t kBasis = 0xcbf29ce484222325;
  static uint64_t append(uint64_t hash, std::string_view text) {
    for (unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3;
    return hash;
  }

  /// Index in the product of the n-th lowest hash, all Replicate left out.
  uint64_t lowest(size_t n) const { return hashes_[n].second; }

 private:
  void visit(size_t tensor, uint64_t hash, uint64_t index) {
    if (tensor == texts_.size()) {
      if (index != 0) keep({hash, index});
      return;
    }
    const uint64_t prefix = tensor == 0 ? hash : append(hash, ",");
    for (size_t i = 0; i < texts_[tensor].size(); ++i) {
      visit(tensor + 1, append(prefix, texts_[tensor][i]), index * texts_[tensor].size() + i);
    }
  }

  void keep(std::pair<uint64_t, uint64_t> entry) {
    if (hashes_.size() < kMaxCombinations - 1) {
      hashes_.push_back(entry);
    } else if (entry < hashes_.front()) {
      std::pop_heap(hashes_.begin(), hashes_.end());
      hashes_.back() = entry;
    } else {
      return;
    }
    std::push_heap(hashes_.begin(), hashes_.end());
  }

  const std::vector<std::vector<std::string>> texts_;
  std::vector<std::pair<uint64_t, uint64_t>> hashes_;  // the lowest, as a heap with the largest in front
};

std::vector<Combination> drawn(const Options& options, const std::string& id) {
  std::vector<Combination> chosen{pick(options, 0)};
  for (size_t draw = 1; draw < kMaxCombinations; ++draw) {
    Combination combination;
    for (size_t i = 0; i < options.size(); ++i) {
      const uint64_t hash = fnv1a(c10::str(id, "|", draw, "|", i));
      combination.push_back(options[i][(hash >> 16) % options[i].size()]);
    }
    chosen.push_back(std::move(combination));
  }
  return chosen;
}

}  // namespace

std::vector<TensorPlace> tensor_places(const VectorCase& vector_case) {
  std::vector<TensorPlace> places;
  for (size_t i = 0; i < vector_case.arguments.size(); ++i) {
    const c10::IValue& value = vector_case.arguments[i];
    if (value.isTensor() && is_distributable(value.toTensor())) places.push_back({i, -1, value.toTensor()});
    if (!value.isList()) continue;
    int64_t element = 0;
    for (const c10::IValue& item : value.toListRef()) {
      if (item.isTensor() && is_distributable(item.toTensor())) places.push_back({i, element, item.toTensor()});
      ++element;
    }
  }
  return places;
}

std::vector<Placements> placement_options(const at::Tensor& tensor, bool is_mutated, int64_t mesh_ndim) {
  Placements single{Replicate()};
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) > 1) single.push_back(Shard(dim));
  }
  if ((tensor.is_floating_point() || tensor.is_complex()) && !is_mutated) single.push_back(Partial("sum"));
  return placement_lists(single, size_t(mesh_ndim));
}

std::string to_string(const Combination& combination) {
  std::string text;
  for (const Placements& placements : combination) text += (text.empty() ? "" : ",") + option_text(placements);
  return text;
}

std::vector<Combination> combinations(const VectorCase& vector_case, int64_t mesh_ndim) {
  const Options options = options_of(vector_case, mesh_ndim);
  const double count = product(options);
  if (count > kMaxProduct) return drawn(options, vector_case.id);
  std::vector<Combination> chosen;
  if (count <= double(kMaxCombinations)) {
    for (uint64_t i = 0; i < uint64_t(count); ++i) chosen.push_back(pick(options, i));
    return chosen;
  }
  const HashWalk walk(options, vector_case.id);
  chosen.push_back(pick(options, 0));
  for (size_t n = 0; n + 1 < kMaxCombinations; ++n) chosen.push_back(pick(options, walk.lowest(n)));
  return chosen;
}

uint64_t fnv1a(std::string_view text) {
  return HashWalk::append(HashWalk::kBasis, text);
}

}  // namespace serried::testing
